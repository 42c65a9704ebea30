"""The guard of a training step: a step whose loss or gradient is infinite or NaN changes nothing.

The guard decides before the optimizer reads its state, and each new value is chosen where it is computed. So XLA fuses the
choice into the pass that writes the state, and the guard costs one pass over the gradients, which the replicas share if the
gradients are large. A choice after the update costs more than the update itself: XLA then stores both values, and reads them
again. It is made only for an optimizer that reduces gradients or tests numbers itself, whose updates decide, because they show
its result for the gradients.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.core.jax_compat import Literal as JaxprLiteral
from jdist._src.core.tree import PyTree
from jdist._src.jaxpr.interpreter import Evaluator, all_equations, uses_axes
from jdist._src.replica import leaf_annotations
from jdist._src.replica.context import all_reduce, require_replica_context

_SMALL = 4096  # elements of an array that is tested together with others
# Elements from which XLA's CPU programs compute a sum in less time than `isfinite(leaf).all()`: a sum of 131,072 elements
# takes 8 us, and 160 us where devices share the threads between which XLA divides it.
_LARGE = 1 << 19
_SHARED_BYTES = 4 << 20  # of gradients whose test is shared; a message costs more than the test of fewer bytes
NonFinite: TypeAlias = Literal["stop", "skip", "keep"]


class TracedUpdate(NamedTuple):
    """The update function of an optimizer, traced for one replica.

    Attributes:
        program: The closed jaxpr, from the leaves of gradients, state and parameters to those of updates and new state.
        treedef: The structure of `(updates, new_state)`.
        num_grads: The number of leaves of the gradients.
        has_collectives: Whether it uses collectives over the replicas, as a policy of `jdist.sync` does.
        tests_numbers: Whether it tests for infinite numbers or NaN, as `optax.apply_if_finite` does.
    """

    program: Any
    treedef: Any
    num_grads: int
    has_collectives: bool
    tests_numbers: bool

    @property
    def reads(self) -> list[bool]:
        """For each leaf of the gradients, whether the optimizer reads it. It does not read those of frozen parameters."""
        jaxpr = self.program.jaxpr
        read = {id(atom) for equation in jaxpr.eqns for atom in equation.invars} | set(map(id, jaxpr.outvars))
        return [id(variable) in read for variable in jaxpr.invars[: self.num_grads]]


def trace_update(update: Callable[..., Any], grads: PyTree, opt_state: PyTree, params: PyTree) -> TracedUpdate:
    """Traces the update function of an optimizer in a replica function."""
    with leaf_annotations.collect_sync_targets():  # discards the annotations of this trace
        program, shapes = jax.make_jaxpr(update, return_shape=True)(grads, opt_state, params)
    axes = frozenset(require_replica_context("sync", "strategy.step").axes)
    return TracedUpdate(
        program,
        jax.tree.structure(shapes),
        len(jax.tree.leaves(grads)),
        has_collectives=any(uses_axes(equation, axes) for equation in program.jaxpr.eqns),
        tests_numbers=any(map(_tests_numbers, all_equations(program.jaxpr))),
    )


def guarded_update(
    update: TracedUpdate, is_taken: jax.Array, grads: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns the updates and the new state of an optimizer; if not `is_taken`, meaningless updates and `opt_state`."""
    jaxpr, old_leaves = update.program.jaxpr, jax.tree.leaves(opt_state)
    new_variables = jaxpr.outvars[len(jaxpr.outvars) - len(old_leaves) :]
    # A result that is two leaves of the state may have had two values before: it is chosen after the update.
    counts = collections.Counter(map(id, new_variables))
    pairs = zip(new_variables, old_leaves, strict=True)
    evaluator = _GuardedUpdate(is_taken, {id(new): old for new, old in pairs if counts[id(new)] == 1})
    results = evaluator.run(jaxpr, update.program.consts, jax.tree.leaves((grads, opt_state, params)))
    updates, new_state = jax.tree.unflatten(update.treedef, results)
    new_leaves = [
        new if id(variable) in evaluator.guarded else select(is_taken, new, old)
        for variable, new, old in zip(new_variables, jax.tree.leaves(new_state), old_leaves, strict=True)
    ]
    return updates, jax.tree.unflatten(jax.tree.structure(new_state), new_leaves)


class _GuardedUpdate(Evaluator):
    """Evaluates the update of an optimizer, and replaces each new leaf of its state by the old one if the step is not taken.

    The leaf is replaced where it is computed. The rest of the update reads the chosen value, so that no other value is stored.

    Args:
        is_taken: Whether the step is taken.
        old: The old leaves, by the `id` of the variables of the new ones.
    """

    def __init__(self, is_taken: jax.Array, old: Mapping[int, Any]):
        self._is_taken = is_taken
        self._old = old
        self.guarded: set[int] = set()

    def enters(self, equation: Equation) -> bool:
        return False

    def evaluate(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        results = super().evaluate(jaxpr, equation, operands)
        for i, variable in enumerate(equation.outvars):
            if id(variable) in self._old:
                results[i] = select(self._is_taken, results[i], self._old[id(variable)])
                self.guarded.add(id(variable))
        return results


def gradient_factors(update: TracedUpdate, opt_state: PyTree) -> list[jax.Array]:
    """Returns the numbers `[]` that an optimizer multiplies by and that depend only on numbers `[]` of its state.

    The learning rate is one of them: a number of the state, or the result of a schedule. The numbers are computed here in
    addition to the update, and XLA merges the two computations.
    """
    jaxpr, leaves = update.program.jaxpr, jax.tree.leaves(opt_state)
    first = update.num_grads
    variables, values = jaxpr.invars[first : first + len(leaves)], leaves
    pairs = [*zip(jaxpr.constvars, update.program.consts, strict=True), *zip(variables, values, strict=True)]
    known = {id(variable): value for variable, value in pairs if jax_compat.shape_of(variable) == ()}
    factors: dict[int, Any] = {}
    for equation in jaxpr.eqns:
        are_known = [isinstance(atom, JaxprLiteral) or id(atom) in known for atom in equation.invars]
        if all(are_known) and not equation.effects and not any(map(jax_compat.shape_of, equation.outvars)):
            operands = [atom.val if isinstance(atom, JaxprLiteral) else known[id(atom)] for atom in equation.invars]
            results = jax_compat.evaluate_equation(jaxpr, equation, operands)
            known.update(zip(map(id, equation.outvars), results, strict=True))
        elif equation.primitive.name == "mul":
            factors.update((id(atom), known[id(atom)]) for atom in equation.invars if id(atom) in known)
    return list(factors.values())


def mean_over_replicas(loss: PyTree, grads: PyTree, is_read: Sequence[bool]) -> tuple[PyTree, PyTree, jax.Array]:
    """Returns the means of loss and gradients over the replicas, and whether these are finite, bool `[]`; all replicated.

    If the gradients that are reduced in messages of their own are large, the replicas share their test: each tests a part of
    each array. The result is reduced with the loss and the small gradients, in a message that follows the others.

    Args:
        loss: The loss of this replica, or a tree of numbers `[]` to reduce with it.
        grads: The gradients of this replica.
        is_read: For each leaf of the gradients, whether it is tested.
    """
    context = require_replica_context("mean_over_replicas", "strategy.step")
    leaves, treedef = jax.tree.flatten(grads)
    packed_bytes = context.communication_options.bytes_per_pack or 0
    shares_test = context.num_replicas_in_sync > 1 and not context.virtual and packed_bytes > 0
    is_large = [shares_test and leaf.nbytes >= packed_bytes for leaf in leaves]
    if sum(leaf.nbytes for leaf in _where(is_large, leaves)) < _SHARED_BYTES:
        loss, leaves = all_reduce("mean", (loss, leaves))
        return loss, treedef.unflatten(leaves), are_finite((loss, _where(is_read, leaves)))
    large = all_reduce("mean", _where(is_large, leaves))
    index = context.replica_id_in_sync_group
    parts = [_part(leaf, index, context.num_replicas_in_sync) for leaf in _where(_where(is_large, is_read), large)]
    zero_or_nan = jnp.where(are_finite(parts), jnp.float32(0), jnp.nan)
    is_small = [not is_in_large for is_in_large in is_large]
    loss, zero_or_nan, small = all_reduce("mean", (loss, zero_or_nan, _where(is_small, leaves)))
    remaining_large, remaining_small = iter(large), iter(small)
    leaves = [next(remaining_large if is_in_large else remaining_small) for is_in_large in is_large]
    return loss, treedef.unflatten(leaves), are_finite((loss, zero_or_nan, _where(_where(is_small, is_read), small)))


def are_finite(tree: PyTree) -> jax.Array:
    """Returns whether all floats of `tree` are finite, bool `[]`.

    Example:
        >>> bool(are_finite({"w": jnp.ones(3), "n": 2})), bool(are_finite([jnp.float16(jnp.inf)]))
        (True, False)
    """
    leaves = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(tree)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    # A program of many small tests takes longer than one test of a copy.
    tested = [leaf for leaf in leaves if leaf.size > _SMALL]
    for dtype in {leaf.dtype: None for leaf in leaves}:
        small = [leaf.ravel() for leaf in leaves if leaf.size <= _SMALL and leaf.dtype == dtype]
        tested += [jnp.concatenate(small)] if small else []
    return jnp.stack([_is_finite(leaf) for leaf in tested]).all() if tested else jnp.bool_(True)


def are_finite_on_all_replicas(tree: PyTree) -> jax.Array:
    """Returns whether all floats of the trees of all replicas are finite, bool `[]`; replicated."""
    return all_reduce("min", are_finite(tree).astype(jnp.int32)) == 1


def select(condition: jax.Array, tree: PyTree, other: PyTree) -> PyTree:
    """Returns the leaves of `tree` if `condition`, else the leaves of `other`; a leaf that is the same in both unchanged."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), tree, other)


def _is_finite(leaf: jax.Array) -> jax.Array:
    if leaf.size < _LARGE:
        return jnp.isfinite(leaf).all()
    # 0, or NaN if a number is not finite. A maximum drops NaN in XLA's CPU programs.
    return jnp.isfinite(jnp.sum(leaf * 0))


def _part(leaf: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Returns one of `count` equal parts of the elements of `leaf`, in a row; the last one overlaps the one before it."""
    size = -(-leaf.size // count)
    return lax.dynamic_slice(leaf.ravel(), (jnp.minimum(index * size, leaf.size - size),), (size,))


def _where(selected: Sequence[bool], items: Sequence[Any]) -> list[Any]:
    return [item for item, is_selected in zip(items, selected, strict=True) if is_selected]


def _tests_numbers(equation: Equation) -> bool:
    """Whether an equation tests for infinite numbers or NaN: `jnp.isfinite` is a primitive, `jnp.isnan(x)` is `x != x`."""
    name, operands = equation.primitive.name, equation.invars
    return name == "is_finite" or (name == "ne" and operands[0] is operands[1])
