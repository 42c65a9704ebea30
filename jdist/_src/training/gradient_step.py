"""One step of training: the gradients of a loss, their reduction, and the update of the parameters with its guard.

The guard: a step whose loss or gradient is infinite or NaN changes nothing.

The test of the gradients precedes the update, and each new value of the state is chosen directly after its computation. So XLA
fuses the choice into the pass that writes the state, and the guard costs one pass over the gradients, which the replicas share
if the gradients are large. A choice after the update costs more than the update itself: XLA then stores both values, and reads
them again. It is made only for an optimizer that reduces gradients or tests numbers itself: there the updates are tested,
because they contain its result for the gradients.
"""

import collections
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.core.tree import PyTree, one_line
from jdist._src.jaxpr.interpreter import Evaluator, all_equations, uses_axes
from jdist._src.replica import leaf_annotations
from jdist._src.replica.context import all_reduce, num_replicas, require_replica_context
from jdist._src.replica.finite import NonFinite, are_finite, are_finite_on_all_replicas, select
from jdist._src.replica.gradients import GradientTotals, Remat, divide_by_count, global_loss, gradient_totals
from jdist._src.training.model_state import update_model_state
from jdist._src.training.state import (
    GROWING_OPTIMIZER_STATE,
    TrainState,
    check_optimizer_state,
    check_same_leaves,
)

_SHARED_BYTES = 4 << 20  # of gradients whose test is shared; a message costs more than the test of fewer bytes


class GradientStep(NamedTuple):
    """The results of a training step.

    Attributes:
        loss: The mean loss.
        is_finite: Whether the step is finite.
        params: The parameters after the step.
        opt_state: The state of the optimizer after the step.
        count: The mean of the weights of all losses, None without weights.
        num_weighted: The mean over the replicas of the argument `num_weighted`.
        model_state: The new model state of this replica, even if the step is not taken.
        varies: For each leaf of the model state, whether it may differ between replicas.
        aux: The auxiliary values of this replica, `[micro_batch, ...]` if there are several micro-batches.
        norms: The norms of gradient, update and new parameters, float32 `[]` each, if they were requested. Of a step
            that is not taken, without a meaning.
    """

    loss: jax.Array
    is_finite: jax.Array
    params: PyTree
    opt_state: PyTree
    count: Any
    num_weighted: Any
    model_state: PyTree = None
    varies: Sequence[bool] = ()
    aux: PyTree = None
    norms: Sequence[jax.Array] = ()


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError if `optimizer` is not an optax transformation."""
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", type(optimizer).__name__)
    example = "optax.adamw(1e-3)"
    if isinstance(name, str) and callable(getattr(optax, name.lower(), None)):
        example = f"optax.{name.lower()}(1e-3)"
    raise TypeError(
        f"`optimizer` must be an optax transformation, got {one_line(optimizer)}. Write `optimizer={example}`."
    )


def gradient_step(
    optimizer: Any,
    compute_losses: Callable[..., tuple[Any, tuple[PyTree, PyTree]]],
    fields: TrainState,
    batch: PyTree,
    weights: Any,
    *,
    micro_batches: int,
    remat: Remat,
    non_finite: NonFinite = "keep",
    has_failed: jax.Array | bool = False,
    num_weighted: Any = None,
    norms: bool = False,
) -> GradientStep:
    """Takes a training step: what `jdist.train_step` and `jdist.Trainer` have in common.

    Args:
        optimizer: The optimizer.
        compute_losses: From `(params, batch, weights, part, model_state)` of a micro-batch, whose number is `part[0]`, to its
            losses and `(aux, model_state)`.
        fields: The state before the step; without a model state, there is none to update.
        batch: The batch of this replica, which the number of micro-batches divides.
        weights: The weights of its examples, or None.
        micro_batches: The number of micro-batches.
        remat: See `jdist.value_and_grad`.
        non_finite: The treatment of a step that is not finite.
        has_failed: Whether an earlier step ended training.
        num_weighted: A tree of numbers `[]` of this replica that are reduced in the same message as the count, or None.
        norms: Whether to compute the norms. They need no separate message, unless the optimizer reduces gradients and
            `non_finite` is "keep".

    Raises:
        TypeError: The optimizer needs an unknown argument, its new state or the new model state has other leaves, or the
            state before the step is the state of another optimizer.
    """
    options: Any = {"micro_batches": micro_batches, "weights": weights, "remat": remat}
    data = batch, weights, jnp.arange(micro_batches)

    def compute_totals(params: PyTree, model_state: PyTree, data: Any) -> tuple[Any, PyTree]:
        losses = functools.partial(compute_losses, model_state=model_state)
        totals, (aux, model_state) = gradient_totals(losses, has_aux=True, **options)(params, *data)
        return (totals._replace(params=()), aux), model_state

    # A line search of optax passes on all extra arguments that it does not use itself.
    def value_fn(params: PyTree, obj_fn: Any = None, weight: Any = None) -> jax.Array:
        losses = functools.partial(compute_losses, model_state=fields.model_state)
        return global_loss(lambda *args: losses(*args)[0], **options)(params, *data)

    model_state, varies = None, ()
    if fields.model_state is None:
        (totals, aux), _ = compute_totals(fields.params, None, data)
    else:
        (totals, aux), model_state, varies = update_model_state(
            compute_totals, fields.params, fields.model_state, data, weights, micro_batches
        )
    step = _update_params(optimizer, non_finite, jnp.asarray(has_failed), totals, fields, value_fn, num_weighted, norms)
    return step._replace(model_state=model_state, varies=varies, aux=aux)


def _update_params(
    optimizer: Any,
    non_finite: NonFinite,
    has_failed: jax.Array,
    totals: GradientTotals,
    fields: TrainState,
    value_fn: Callable[..., jax.Array],
    num_weighted: Any,
    has_norms: bool,
) -> GradientStep:
    """Reduces loss and gradients of this replica, and updates the parameters, unless the step is not finite."""
    check_optimizer_state(optimizer, fields.opt_state, fields.params)
    calls: list[PyTree] = []

    def constant_loss(params: PyTree, obj_fn: Any = None, weight: Any = None) -> jax.Array:
        """Returns a number without collectives in place of the loss: the trace shows the collectives of the optimizer."""
        calls.append(params)
        return jnp.float32(0)

    def update_fn(
        grads: PyTree, opt_state: PyTree, inputs: tuple[PyTree, jax.Array, jax.Array]
    ) -> tuple[PyTree, PyTree]:
        params, loss, weight = inputs
        extra_args = {"value": loss, "weight": weight, "value_fn": constant_loss, "obj_fn": constant_loss}
        return _updates(optimizer, grads, opt_state, params, grad=grads, **extra_args)

    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), totals.grads, fields.params)
    # The sum of the weights of all losses, by which `jdist.sync.every` averages steps.
    num_losses = jnp.float32(totals.num_losses * num_replicas())
    update = _trace_update(update_fn, grads, fields.opt_state, (fields.params, totals.loss, num_losses))
    _, new_state = jax.tree.unflatten(update.treedef, [0] * update.treedef.num_leaves)
    check_same_leaves("opt_state", fields.opt_state, new_state, GROWING_OPTIMIZER_STATE)
    counts = totals.count, num_weighted
    is_finite, extra_args = jnp.bool_(True), {"value_fn": value_fn, "obj_fn": value_fn}
    norms_of = lambda *trees: [global_norm(tree) for tree in trees if has_norms]
    # Not of frozen parameters: the reduction of a gradient that nothing reads is removed by XLA.
    read = lambda grads: [leaf for leaf, is_read in zip(jax.tree.leaves(grads), update.reads, strict=True) if is_read]
    if update.has_collectives:  # the optimizer reduces the gradients
        count, num_weighted = all_reduce("mean", counts)
        loss, grads = divide_by_count(totals.loss, grads, count)
        loss, norms = all_reduce("mean", (loss, norms_of(read(grads))))
    elif non_finite == "keep" or update.tests_numbers or calls:
        loss, grads, (count, num_weighted) = all_reduce("mean", (totals.loss, grads, counts))
        loss, grads = divide_by_count(loss, grads, count)
        norms, extra_args["grad"] = norms_of(read(grads)), grads
    else:
        (loss, (count, num_weighted)), grads, is_finite = mean_loss_and_grads(
            (totals.loss, counts), grads, update.reads
        )
        loss, grads = divide_by_count(loss, grads, count)
        is_finite &= are_finite(_gradient_factors(update, fields.opt_state))
        is_taken, inputs = is_finite & ~has_failed, (fields.params, loss, _weight(num_losses, count))
        updates, opt_state = _guarded_update(update, is_taken, grads, fields.opt_state, inputs)
        params = select(is_taken, optax.apply_updates(fields.params, updates), fields.params)
        norms = norms_of(read(grads), updates, params)
        return GradientStep(loss, is_finite, params, opt_state, count, num_weighted, norms=norms)
    extra_args |= {"value": loss, "weight": _weight(num_losses, count)}
    updates, opt_state = _updates(optimizer, grads, fields.opt_state, fields.params, **extra_args)
    params = optax.apply_updates(fields.params, updates)
    new_norms = norms_of(updates, params)
    if non_finite == "keep":
        norms += all_reduce("mean", new_norms) if update.has_collectives else new_norms
        return GradientStep(loss, is_finite, params, opt_state, count, num_weighted, norms=norms)
    is_finite = jnp.isfinite(loss)
    if update.has_collectives:  # the updates of the replicas may differ, and the replicas have to agree
        are_updates_finite, new_norms = _reduce_test_and_norms(updates, new_norms)
    else:
        are_updates_finite = are_finite(updates)
    is_finite, old = is_finite & are_updates_finite, (fields.params, fields.opt_state)
    params, opt_state = select(is_finite & ~has_failed, (params, opt_state), old)
    return GradientStep(loss, is_finite, params, opt_state, count, num_weighted, norms=[*norms, *new_norms])


def _reduce_test_and_norms(updates: PyTree, norms: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Returns whether the updates of all replicas are finite, and the means of the norms of the replicas, in one message."""
    if not norms:
        return are_finite_on_all_replicas(updates), norms
    zero_or_nan, norms = all_reduce("mean", (jnp.where(are_finite(updates), jnp.float32(0), jnp.nan), norms))
    return jnp.isfinite(zero_or_nan), norms


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the L2 norm of all numbers of `tree`, computed in float32, `[]`.

    Example:
        >>> float(global_norm({"w": jnp.full(4, 3.0, jnp.bfloat16), "b": jnp.float32(8)}))
        10.0
    """
    leaves = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(tree)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    squares = [jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in leaves]
    return jnp.sqrt(sum(squares, start=jnp.float32(0)))


def _weight(num_losses: jax.Array, count: Any) -> jax.Array:
    """Returns the sum of the weights of all losses; `count` is their mean, or None without weights."""
    return num_losses if count is None else num_losses * count


def _updates(optimizer: Any, grads: PyTree, opt_state: PyTree, params: PyTree, **extra_args: Any) -> Any:
    """Returns the updates and the new state of an optimizer, which receives the extra arguments that it accepts.

    Raises:
        TypeError: The optimizer needs another argument.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    parameters = inspect.signature(optimizer.update).parameters.values()
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):  # as in `optax.contrib.sam`
        extra_args = {name: extra_args[name] for name in extra_args if name in {one.name for one in parameters}}
    try:
        return optimizer.update(grads, opt_state, params, **extra_args)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        if "'grad'" in str(error):
            raise TypeError(
                f"The optimizer needs the reduced gradients as `grad` ({error}), and reduces gradients itself. Remove the "
                "policy of `jdist.sync` from it: the trainer then reduces the gradients before the update."
            ) from error
        raise TypeError(
            f"The optimizer needs another argument ({error}). jdist passes `value` and `grad`, the loss and its "
            "gradient, `value_fn` and `obj_fn`, functions from parameters to the loss, and `weight`, the sum of the weights of "
            "the examples. For others write the step: `Trainer(step=fn)`."
        ) from error


class _UpdateJaxpr(NamedTuple):
    """The update function of an optimizer, traced for one replica.

    Attributes:
        program: The closed jaxpr, from the leaves of gradients, state and parameters to the leaves of updates and new state.
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
        """For each leaf of the gradients, whether the optimizer reads it: not the gradients of frozen parameters."""
        jaxpr = self.program.jaxpr
        read = {id(atom) for equation in jaxpr.eqns for atom in equation.invars} | set(map(id, jaxpr.outvars))
        return [id(variable) in read for variable in jaxpr.invars[: self.num_grads]]


def _trace_update(update: Callable[..., Any], grads: PyTree, opt_state: PyTree, params: PyTree) -> _UpdateJaxpr:
    """Traces the update function of an optimizer in a replica function."""
    with leaf_annotations.collect_sync_targets():  # discards the annotations of this trace
        program, shapes = jax.make_jaxpr(update, return_shape=True)(grads, opt_state, params)
    axes = frozenset(require_replica_context("sync", "strategy.step").axes)
    return _UpdateJaxpr(
        program,
        jax.tree.structure(shapes),
        len(jax.tree.leaves(grads)),
        has_collectives=any(uses_axes(equation, axes) for equation in program.jaxpr.eqns),
        tests_numbers=any(map(_tests_numbers, all_equations(program.jaxpr))),
    )


def _guarded_update(
    update: _UpdateJaxpr, is_taken: jax.Array, grads: PyTree, opt_state: PyTree, params: PyTree
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

    The leaf is replaced in the computation of the update. The rest of the update reads the chosen value, so that no other value
    is stored.

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


def _gradient_factors(update: _UpdateJaxpr, opt_state: PyTree) -> list[jax.Array]:
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
        are_known = [isinstance(atom, Literal) or id(atom) in known for atom in equation.invars]
        if all(are_known) and not equation.effects and not any(map(jax_compat.shape_of, equation.outvars)):
            operands = [atom.val if isinstance(atom, Literal) else known[id(atom)] for atom in equation.invars]
            results = jax_compat.evaluate_equation(jaxpr, equation, operands)
            known.update(zip(map(id, equation.outvars), results, strict=True))
        elif equation.primitive.name == "mul":
            factors.update((id(atom), known[id(atom)]) for atom in equation.invars if id(atom) in known)
    return list(factors.values())


def mean_loss_and_grads(loss: PyTree, grads: PyTree, is_read: Sequence[bool]) -> tuple[PyTree, PyTree, jax.Array]:
    """Returns the means of loss and gradients over the replicas, and whether these are finite, bool `[]`; all replicated.

    If the gradients that are reduced in separate messages are large, the replicas share their test: each tests a part of
    each array. The result is reduced with the loss and the small gradients, in a message that follows the others.

    Args:
        loss: The loss of this replica, or a tree of numbers `[]` to reduce with it.
        grads: The gradients of this replica.
        is_read: For each leaf of the gradients, whether it is tested.
    """
    context = require_replica_context("mean_loss_and_grads", "strategy.step")
    leaves, treedef = jax.tree.flatten(grads)
    packed_bytes = context.communication_options.bytes_per_pack or 0
    shares_test = context.num_replicas_in_sync > 1 and not context.virtual and packed_bytes > 0
    large = [i for i, leaf in enumerate(leaves) if shares_test and leaf.nbytes >= packed_bytes]
    large = large if sum(leaves[i].nbytes for i in large) >= _SHARED_BYTES else []
    small = [i for i in range(len(leaves)) if i not in set(large)]
    means = dict(zip(large, all_reduce("mean", [leaves[i] for i in large]), strict=True))
    index, count = context.replica_id_in_sync_group, context.num_replicas_in_sync
    parts = [_part(means[i], index, count) for i in large if is_read[i]]
    zero_or_nan = [jnp.where(are_finite(parts), jnp.float32(0), jnp.nan)] if parts else []
    loss, zero_or_nan, values = all_reduce("mean", (loss, zero_or_nan, [leaves[i] for i in small]))
    means.update(zip(small, values, strict=True))
    tested = [means[i] for i in small if is_read[i]]
    return loss, treedef.unflatten([means[i] for i in range(len(leaves))]), are_finite((loss, zero_or_nan, tested))


def _part(leaf: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Returns one of `count` equal parts of the elements of `leaf`, in a row; the last one overlaps the one before it."""
    size = -(-leaf.size // count)
    return lax.dynamic_slice(leaf.ravel(), (jnp.minimum(index * size, leaf.size - size),), (size,))


def _tests_numbers(equation: Equation) -> bool:
    """Whether an equation tests for infinite numbers or NaN: `jnp.isfinite` is a primitive, `jnp.isnan(x)` is `x != x`."""
    name, operands = equation.primitive.name, equation.invars
    return name == "is_finite" or (name == "ne" and operands[0] is operands[1])
