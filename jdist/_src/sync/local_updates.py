"""Policies under which each replica updates its own parameters, with outer steps that synchronize them.

There is one mechanism, `_local_updates`: `streaming_diloco` has an outer step per parameter fragment, `diloco` one outer
step of all parameters, and the outer step of `local_sgd` is the mean.

Between two outer steps the parameters diverge. `Strategy.init` stores them as `SyncOnRead(MEAN)`, so the host program reads
their average; the same applies to state that the optimizer computes from one replica's gradients. Which state leaves these are
is proved, not guessed: `init` traces the optimizer's update, and the replication proof finds the leaves that may vary between
replicas.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.tree import PyTree, dtype_and_shape, is_float, named_leaves, one_line
from jdist._src.jaxpr import replication
from jdist._src.jaxpr.marks import PSEUDO_GRADIENT_MARK
from jdist._src.replica.context import current_context
from jdist._src.replica.leaf_annotations import mark_local, snap_to_target
from jdist._src.sync.policy import (
    Policy,
    check_integer,
    check_number,
    check_transformation,
    make_policy,
    policy_context,
    require_params,
    synchronous_context,
)
from jdist._src.sync.reduction import mean
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.reduce_op import ReduceOp


class OuterStep(NamedTuple):
    """The result of an outer step.

    Attributes:
        params: The new parameters; replicated. None in the state of `local_sgd`, whose outer step does not need the last ones.
        reduction_state: The state of the policy `reduction`.
        outer_state: The state of the outer optimizer; replicated.
    """

    params: PyTree
    reduction_state: Any = ()
    outer_state: Any = ()


class LocalUpdatesState(NamedTuple):
    """The state of `local_sgd`, `diloco` and `streaming_diloco`.

    Attributes:
        steps: The number of steps taken, int32 `[]`; replicated.
        opt_state: The state of each replica's optimizer; leaves that may vary are local to each replica.
        fragments: The last outer step of each fragment of the parameters.
    """

    steps: jax.Array
    opt_state: Any
    fragments: tuple[OuterStep, ...]


@explains_arguments()
def local_sgd(optimizer: optax.GradientTransformation, *, every: int) -> Policy:
    """Local SGD: each replica updates its own parameters, which are averaged every `every` steps.

    Other steps do not use collectives. The parameters must be in the state that `strategy.init` makes, as the same arrays that
    are passed to `init` of this policy; they are stored there as `SyncOnRead(MEAN)`. The optimizer's state stays local to each
    replica. After a synchronization step the parameters of all replicas are bitwise equal if the step calls `update` directly.
    Inside a `jax.jit` or a loop of the step, the rounding of the parameter update is not visible to the policy.

    Args:
        optimizer: The optimizer of each replica, without a policy.
        every: The number of steps per synchronization step, at least 1.

    Returns:
        A transformation of each replica's gradients `[...]` into its own updates.

    Raises:
        ValueError: `every` is less than 1.
        TypeError: `every` is not an integer, or `optimizer` is not a gradient transformation; or, raised by `init`, the
            optimizer stores values computed from gradients that cannot be averaged.

    Source:
        S. U. Stich, "Local SGD converges fast and communicates little", arXiv:1805.09767.

    Example:
        >>> tx = jdist.sync.local_sgd(optax.sgd(0.5), every=2)
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.init(lambda: (w := jnp.float32(0), tx.init(w)))
        >>> @strategy.step
        ... def pull(state, target):
        ...     w, opt_state = state
        ...     updates, opt_state = tx.update(w - target, opt_state, w)
        ...     return (optax.apply_updates(w, updates), opt_state), None
        >>> target = strategy.distribute_values_from_function(
        ...     lambda c: float(c.replica_id_in_sync_group)
        ... )
        >>> for _ in range(2):
        ...     state, _ = pull(state, target)
        ...     print([float(w) for w in state[0].values])
        [0.0, 0.5]
        [0.375, 0.375]
    """
    return _local_updates("local_sgd", optimizer, every)


@explains_arguments()
def diloco(
    optimizer: optax.GradientTransformation,
    outer_optimizer: optax.GradientTransformation | None = None,
    *,
    every: int,
    reduction: optax.GradientTransformation | None = None,
) -> Policy:
    """DiLoCo: each replica updates its own parameters; every `every` steps an outer optimizer updates the parameters of all.

    The gradient of the outer optimizer is the pseudo-gradient: the parameters after the last outer step minus the replica's
    parameters, reduced over the replicas. Other steps do not use collectives. The parameters must be in the state that
    `strategy.init` makes, as the same arrays that are passed to `init` of this policy; they are stored there as
    `SyncOnRead(MEAN)`. The optimizer's state stays local to each replica.

    Args:
        optimizer: The optimizer of each replica, without a policy; AdamW in the paper.
        outer_optimizer: The optimizer of the outer step; by default `optax.sgd(0.7, momentum=0.9, nesterov=True)`, as in the
            paper.
        every: The number of steps per outer step, at least 1; 500 in the paper.
        reduction: The policy that reduces the pseudo-gradients; `mean()` by default. `int8()` sends fewer bytes.

    Returns:
        A transformation of each replica's gradients `[...]` into its own updates.

    Raises:
        ValueError: `every` is less than 1.
        TypeError: `every` is not an integer, or an optimizer is not a gradient transformation; or, raised by `init`, the
            optimizer stores values computed from gradients that cannot be averaged.

    Source:
        A. Douillard et al., "DiLoCo: distributed low-communication training of language models", arXiv:2311.08105.

    Example:
        >>> tx = jdist.sync.diloco(optax.adamw(1e-3), every=50)
    """
    return _local_updates("diloco", optimizer, every, _outer_policies("diloco", outer_optimizer, reduction))


@explains_arguments()
def streaming_diloco(
    optimizer: optax.GradientTransformation,
    outer_optimizer: optax.GradientTransformation | None = None,
    *,
    every: int,
    fragments: int,
    overlap: int = 1,
    blend: float = 0.5,
    reduction: optax.GradientTransformation | None = None,
) -> Policy:
    """Streaming DiLoCo: the outer steps of parameter fragments are spread over the steps, and overlap with computation.

    Each fragment has an outer step every `every` steps, at its own offset, so that no step sends more than a fragment unless
    there are more fragments than steps. Communication overlaps with computation: a fragment's all-reduce starts with one step,
    and its result is applied `overlap` steps later, blended with the parameters that the replica has reached by then.

    Args:
        optimizer: The optimizer of each replica, without a policy.
        outer_optimizer: The optimizer of the outer steps; by default `optax.sgd(0.7, momentum=0.9, nesterov=True)`, as in the
            paper.
        every: The number of steps between two outer steps of a fragment.
        fragments: The number of fragments; each contains complete leaves, with similar numbers of parameters.
        overlap: The number of steps after which the result of an outer step is applied. 0 waits for it, as `diloco` does.
        blend: The weight of the replica's own parameters at that time, at least 0 and less than 1. With 0 all replicas agree.
        reduction: The policy that reduces the pseudo-gradients; `mean()` by default. `int8()` sends fewer bytes.

    Returns:
        A transformation of each replica's gradients `[...]` into its own updates.

    Raises:
        ValueError: A number is out of range; or, raised by `init`, there are fewer leaves than fragments.
        TypeError: As for `diloco`.

    Source:
        A. Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed free lunch",
        arXiv:2501.18512.

    Example:
        >>> tx = jdist.sync.streaming_diloco(optax.adamw(1e-3), every=50, fragments=4)
    """
    name = "streaming_diloco"
    every = check_integer(name, "every", every, 1)
    fragments = check_integer(name, "fragments", fragments, 1)
    overlap = check_integer(name, "overlap", overlap, 0)
    if overlap >= every:
        raise ValueError(
            f"`overlap` of `jdist.sync.{name}` must be less than `every`, got overlap={overlap} and every={every}: the result "
            "of an outer step is applied before the next one starts."
        )
    if not 0 <= check_number(name, "blend", blend) < 1:
        raise ValueError(
            f"`blend` of `jdist.sync.{name}` must be at least 0 and less than 1, got {one_line(blend)}. It is the weight of a "
            "replica's own parameters."
        )
    outer = _outer_policies(name, outer_optimizer, reduction)
    return _local_updates(name, optimizer, every, outer, fragments, overlap, blend)


def _outer_policies(name: str, outer_optimizer: Any, reduction: Any) -> tuple[Policy, Policy]:
    """Returns the reduction and the outer optimizer of the policy `name`, by default as in the DiLoCo papers."""
    if outer_optimizer is None:
        outer_optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    reduction = mean() if reduction is None else reduction
    return (
        check_transformation(name, "reduction", reduction),
        check_transformation(name, "outer_optimizer", outer_optimizer),
    )


def _local_updates(
    name: str,
    optimizer: Any,
    every: Any,
    outer: tuple[Policy, Policy] | None = None,
    fragments: int | None = None,
    overlap: int = 0,
    blend: float = 0.0,
) -> Policy:
    """Returns the policy `name`.

    Args:
        name: The policy, for messages.
        optimizer: The optimizer of each replica.
        every: The number of steps between two outer steps of a fragment.
        outer: The reduction and the outer optimizer; None for the mean of the parameters.
        fragments: The number of fragments; None for one, the tree of the parameters itself.
        overlap: See `streaming_diloco`.
        blend: See `streaming_diloco`.
    """
    every = check_integer(name, "every", every, 1)
    optimizer = check_transformation(name, "optimizer", optimizer)
    always_synchronized = every == 1 and blend == 0

    def init(params: PyTree) -> LocalUpdatesState:
        opt_state = _init_local_optimizer(name, optimizer, params, not always_synchronized)
        return LocalUpdatesState(
            jnp.int32(0), opt_state, tuple(map(init_fragment, _split_into_fragments(params, fragments)))
        )

    def init_fragment(params: PyTree) -> OuterStep:
        if outer is None:
            return OuterStep(None)
        params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)  # `Strategy.init` keeps new arrays replicated
        return OuterStep(params, *(policy.init(params) for policy in outer))

    def update(
        grads: PyTree, state: LocalUpdatesState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LocalUpdatesState]:
        synchronous_context(name)
        params = require_params(name, params)
        updates, opt_state = optimizer.update(grads, state.opt_state, params, **extra_args)
        local_params = optax.apply_updates(params, updates)
        trees = (_split_into_fragments(tree, fragments) for tree in (params, local_params, updates))
        results = [
            update_fragment(number, state.steps, *part)
            for number, part in enumerate(zip(state.fragments, *trees, strict=True))
        ]
        outer_steps, fragment_updates = zip(*results, strict=True)
        updates = fragment_updates[0] if fragments is None else _merge_fragments(updates, fragment_updates)
        return updates, LocalUpdatesState(state.steps + 1, opt_state, outer_steps)

    def update_fragment(
        number: int, steps: jax.Array, last: OuterStep, params: PyTree, local_params: PyTree, updates: PyTree
    ) -> tuple[OuterStep, PyTree]:
        """Returns the last outer step and the updates of a fragment after a step from `params` to `local_params`."""
        starts, is_applied = (
            (moment > 0) & ((moment - number * every // (fragments or 1)) % every == 0)
            for moment in (steps + (overlap == 0), steps + 1 - overlap)
        )
        # With overlap, the parameters before the step are sent, so that the message does not depend on the step's gradients.
        sent = params if overlap else local_params
        last = last if outer else OuterStep(sent)

        def blended_updates(result: OuterStep) -> PyTree:
            blended = lambda p, new, own, u: ((blend * own + (1 - blend) * new if blend else new) - p).astype(u.dtype)
            return jax.tree.map(blended, params, result.params, local_params, updates)

        def synchronized() -> tuple[OuterStep, PyTree]:
            result = _outer_step(outer, sent, last)
            return result, blended_updates(result)

        if always_synchronized:
            result, new_updates = synchronized()
        elif overlap:
            result = lax.cond(starts, lambda: _outer_step(outer, sent, last), lambda: last)
            new_updates = lax.cond(is_applied, lambda: blended_updates(result), lambda: updates)
        else:
            result, new_updates = lax.cond(starts, synchronized, lambda: (last, updates))
        if not blend and not always_synchronized:
            snap_to_target(params, new_updates, result.params, is_applied)
        return result if outer else OuterStep(None), new_updates

    return make_policy(init, update)


def _outer_step(outer: tuple[Policy, Policy] | None, local_params: PyTree, last: OuterStep) -> OuterStep:
    """Returns the next outer step after `last`, along the reduced pseudo-gradients `last.params - local_params`."""
    if outer is None:
        return OuterStep(policy_context("local_sgd").all_reduce(ReduceOp.MEAN, local_params))
    reduction, outer_optimizer = outer
    pseudo_gradient = jax.tree.map(lambda a, p: checkpoint_name(a - p, PSEUDO_GRADIENT_MARK), last.params, local_params)
    reduced, reduction_state = reduction.update(pseudo_gradient, last.reduction_state, last.params)
    updates, outer_state = outer_optimizer.update(reduced, last.outer_state, last.params)
    return OuterStep(optax.apply_updates(last.params, updates), reduction_state, outer_state)


def _init_local_optimizer(name: str, optimizer: Policy, params: PyTree, params_diverge: bool) -> Any:
    """Returns the initial state of each replica's optimizer, and marks the leaves that are local to each replica.

    Args:
        name: The policy, for messages.
        optimizer: The optimizer.
        params: The parameters.
        params_diverge: Whether the parameters diverge between synchronization steps; they are then marked too.

    Raises:
        TypeError: A local leaf cannot be averaged.
    """
    for path, leaf in named_leaves("params", params) if params_diverge else ():
        if not jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"{path} is {dtype_and_shape(leaf)}. Parameters that diverge under `jdist.sync.{name}` are read as their mean, "
                "which is not defined for this dtype. Exclude the leaf with `optax.masked`, or store it in another part of the "
                "state."
            )
    state = optimizer.init(params)
    leaves = named_leaves("its state", state)
    varying = _find_varying(name, optimizer, params, state, params_diverge)
    local_leaves = [leaf for leaf, varies in zip(leaves, varying, strict=True) if varies]
    for path, leaf in local_leaves:
        if not is_float(leaf):
            raise TypeError(
                f"`jdist.sync.{name}` cannot place the state of its optimizer: {path} is {dtype_and_shape(leaf)} and is "
                "computed from each replica's gradients, so it would be read as a mean, which is not defined for this dtype. "
                "Remove that transformation from the optimizer, or apply it outside the policy, where the replicas agree."
            )
    mark_local(f"sync.{name}", [leaf for _, leaf in local_leaves], VariableAggregation.MEAN)
    if params_diverge:
        mark_local(f"sync.{name}", params, VariableAggregation.MEAN, trainable=True)
    return state


def _find_varying(name: str, optimizer: Policy, params: PyTree, state: Any, params_diverge: bool) -> list[bool]:
    """Returns for each leaf of the optimizer's state whether updates can make it vary between replicas."""
    axes = getattr(current_context(), "axes", ()) or ("replica",)  # no axes where the host makes the state
    leaves, treedef = jax.tree.flatten(state)

    def update(grads: PyTree, leaves: list[Any], params: PyTree) -> list[Any]:
        return jax.tree.leaves(optimizer.update(grads, treedef.unflatten(leaves), params)[1])

    try:
        program = jax.make_jaxpr(update)(params, leaves, params).jaxpr
    except TypeError as error:
        raise TypeError(
            f"`jdist.sync.{name}` traces the update of its optimizer with gradients, state and parameters, to find the state "
            f"that is local to each replica, and the trace failed: {error}. Optimizers that need further arguments, such as "
            "the loss, are not supported here."
        ) from error
    num_params = len(jax.tree.leaves(params))
    local, replicated = replication.Input("gradients", axes), replication.Input("replicated values", ())
    param_inputs = [local if params_diverge else replicated] * num_params
    varying = [False] * len(leaves)
    while True:  # to a fixed point: a varying leaf may make others vary in the next update
        state_inputs = [local if varies else replicated for varies in varying]
        variations = replication.prove(program, [local] * num_params + state_inputs + param_inputs, axes)
        next_varying = [varies or bool(new) for varies, new in zip(varying, variations, strict=True)]
        if next_varying == varying:
            return varying
        varying = next_varying


def _split_into_fragments(tree: PyTree, count: int | None) -> list[PyTree]:
    """Returns the leaves of `tree` in `count` fragments of similar numbers of parameters; `[tree]` if it is None.

    Raises:
        ValueError: There are fewer leaves than fragments.
    """
    if count is None:
        return [tree]
    leaves = jax.tree.leaves(tree)
    if len(leaves) < count:
        raise ValueError(
            f"`fragments` of `jdist.sync.streaming_diloco` is {count}, but there are only {len(leaves)} arrays. Use at most "
            f"{len(leaves)} fragments."
        )
    return [[leaves[i] for i in indices] for indices in _assign_leaves([leaf.size for leaf in leaves], count)]


def _assign_leaves(sizes: list[int], count: int) -> list[list[int]]:
    """Returns the leaf indices of each fragment: the largest leaf first, each to the smallest fragment so far."""
    fragments: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(fragments, key=lambda indices: (sum(sizes[j] for j in indices), len(indices))).append(i)
    return [sorted(indices) for indices in fragments]


def _merge_fragments(like: PyTree, fragments: Sequence[list[Any]]) -> PyTree:
    """Returns a tree like `like` of the leaves of its fragments."""
    leaves, treedef = jax.tree.flatten(like)
    indices_of_fragments = _assign_leaves([leaf.size for leaf in leaves], len(fragments))
    for fragment, indices in zip(fragments, indices_of_fragments, strict=True):
        for i, leaf in zip(indices, fragment, strict=True):
            leaves[i] = leaf
    return treedef.unflatten(leaves)
