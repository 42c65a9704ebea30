"""Policies under which each replica updates its own parameters, with a synchronization step every `every` steps.

Between two synchronization steps the parameters diverge. `Strategy.init` stores them as `SyncOnRead(MEAN)`, so the host
program reads their average; the same applies to state that the optimizer computes from one replica's gradients. Which state
leaves these are is proved, not guessed: `init` traces the optimizer's update, and the replication proof finds the leaves that
may vary between replicas.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.jaxpr import replication
from jdist._src.jaxpr.clip_check import PSEUDO_GRADIENT_MARK
from jdist._src.replica.context import current_context
from jdist._src.replica.leaf_annotations import mark_local, snap_to_target
from jdist._src.sync.policy import (
    Policy,
    check_integer,
    check_transformation,
    is_float,
    make_policy,
    require_params,
    synchronous_context,
)
from jdist._src.sync.reduction import mean
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.reduce_op import ReduceOp


class LocalState(NamedTuple):
    """The state of `local_sgd`.

    Attributes:
        steps: The number of steps since the last synchronization step, int32 `[]`; replicated.
        opt_state: The state of each replica's optimizer; leaves that may vary are local to each replica.
    """

    steps: jax.Array
    opt_state: Any


class DilocoState(NamedTuple):
    """The state of `diloco`.

    Attributes:
        steps: The number of steps since the last synchronization step, int32 `[]`; replicated.
        anchor: The parameters after the last synchronization step; replicated.
        opt_state: The state of each replica's optimizer; leaves that may vary are local to each replica.
        reduction_state: The state of the policy `reduction`.
        outer_state: The state of the outer optimizer; replicated.
    """

    steps: jax.Array
    anchor: PyTree
    opt_state: Any
    reduction_state: Any
    outer_state: Any


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
        >>> target = strategy.distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))
        >>> for _ in range(2):
        ...     state, _ = pull(state, target)
        ...     print([float(w) for w in state[0].values])
        [0.0, 0.5]
        [0.375, 0.375]
    """
    name = "local_sgd"
    every = check_integer(name, "every", every, 1)
    optimizer = check_transformation(name, "optimizer", optimizer)

    def init(params: PyTree) -> LocalState:
        return LocalState(jnp.int32(0), init_local_optimizer(name, optimizer, params, every > 1))

    def update(grads: PyTree, state: LocalState, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, LocalState]:
        context = synchronous_context(name)
        params = require_params(name, params)
        updates, opt_state = optimizer.update(grads, state.opt_state, params, **extra_args)
        local_params = optax.apply_updates(params, updates)
        synchronize = lambda: (context.all_reduce(ReduceOp.MEAN, local_params), None)
        steps, updates, _ = _synchronize_every(every, state.steps, params, updates, synchronize, (local_params, None))
        return updates, LocalState(steps, opt_state)

    return make_policy(init, update)


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
    name = "diloco"
    every = check_integer(name, "every", every, 1)
    optimizer = check_transformation(name, "optimizer", optimizer)
    outer_optimizer = check_outer_optimizer(name, outer_optimizer)
    reduction = check_transformation(name, "reduction", mean() if reduction is None else reduction)

    def init(params: PyTree) -> DilocoState:
        opt_state = init_local_optimizer(name, optimizer, params, every > 1)
        anchor = copy_params(params)
        return DilocoState(jnp.int32(0), anchor, opt_state, reduction.init(anchor), outer_optimizer.init(anchor))

    def update(
        grads: PyTree, state: DilocoState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, DilocoState]:
        synchronous_context(name)
        params = require_params(name, params)
        updates, opt_state = optimizer.update(grads, state.opt_state, params, **extra_args)
        local_params = optax.apply_updates(params, updates)
        before = OuterStep(state.anchor, state.reduction_state, state.outer_state)

        def synchronize() -> tuple[PyTree, OuterStep]:
            after = outer_step(reduction, outer_optimizer, local_params, before)
            return after.params, after

        steps, updates, after = _synchronize_every(
            every, state.steps, params, updates, synchronize, (local_params, before)
        )
        return updates, DilocoState(steps, after.params, opt_state, after.reduction_state, after.outer_state)

    return make_policy(init, update)


class OuterStep(NamedTuple):
    """The result of an outer step.

    Attributes:
        params: The new parameters; replicated.
        reduction_state: The state of the policy `reduction`.
        outer_state: The state of the outer optimizer; replicated.
    """

    params: PyTree
    reduction_state: Any
    outer_state: Any


def outer_step(reduction: Policy, outer_optimizer: Policy, local_params: PyTree, last: OuterStep) -> OuterStep:
    """Returns the next outer step after `last`, along the reduced pseudo-gradients `last.params - local_params`."""
    pseudo_gradient = jax.tree.map(lambda a, p: checkpoint_name(a - p, PSEUDO_GRADIENT_MARK), last.params, local_params)
    reduced, reduction_state = reduction.update(pseudo_gradient, last.reduction_state, last.params)
    updates, outer_state = outer_optimizer.update(reduced, last.outer_state, last.params)
    return OuterStep(optax.apply_updates(last.params, updates), reduction_state, outer_state)


def check_outer_optimizer(name: str, outer_optimizer: Any) -> Policy:
    """Returns the outer optimizer of the policy `name`; for None, Nesterov momentum as in the DiLoCo papers."""
    if outer_optimizer is None:
        outer_optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return check_transformation(name, "outer_optimizer", outer_optimizer)


def copy_params(params: PyTree) -> PyTree:
    """Returns a copy of `params` in new arrays, which `Strategy.init` keeps replicated."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params)


def init_local_optimizer(name: str, optimizer: Policy, params: PyTree, params_diverge: bool) -> Any:
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
    axes = getattr(current_context(), "axes", ()) or ("replica",)  # a state made on the host has no axes
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


def _synchronize_every(
    every: int,
    steps: jax.Array,
    params: PyTree,
    updates: PyTree,
    synchronize: Callable[[], tuple[PyTree, Any]],
    local: tuple[PyTree, Any],
) -> tuple[jax.Array, PyTree, Any]:
    """Synchronizes in every `every`-th step.

    Args:
        every: The number of steps per synchronization step.
        steps: The number of steps since the last synchronization step.
        params: The parameters before the step.
        updates: The updates of a step without synchronization.
        synchronize: Returns the synchronized parameters and a further result.
        local: The same pair for a step without synchronization.

    Returns:
        The new number of steps, the updates, and the further result.
    """

    def synchronized() -> tuple[PyTree, PyTree, Any]:
        target, extra = synchronize()
        return target, updates_to_target(target, params, updates), extra

    if every == 1:
        _, new_updates, extra = synchronized()
        return steps, new_updates, extra
    is_sync_step = steps == every - 1
    target, new_updates, extra = lax.cond(is_sync_step, synchronized, lambda: (local[0], updates, local[1]))
    snap_to_target(params, new_updates, target, is_sync_step)
    return jnp.where(is_sync_step, 0, steps + 1), new_updates, extra


def updates_to_target(target: PyTree, params: PyTree, like: PyTree) -> PyTree:
    """Returns the updates that change `params` to `target`, in the dtypes of `like`."""
    return jax.tree.map(lambda t, p, u: (t - p).astype(u.dtype), target, params, like)
