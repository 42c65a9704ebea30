"""Policies under which each replica trains by itself, and all meet now and then.

Between two meetings the parameters *drift*: every replica has its own. `Strategy.init` places them `SyncOnRead(MEAN)`, so
the host program reads their average, and likewise what the inner optimizer keeps of its own replica's gradients. What to
place is not guessed: the inner optimizer's update is traced, and the proof says which of its state may come to differ.
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
    policy_context,
    policy_of,
    require_params,
)
from jdist._src.sync.reduction import mean
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.reduce_op import ReduceOp


class LocalState(NamedTuple):
    """The state of `local_sgd`.

    Attributes:
        steps: How many steps since the last meeting, int32 `[]`; mirrored.
        inner: The state of the inner optimizer, in part one a replica.
    """

    steps: jax.Array
    inner: Any


class DilocoState(NamedTuple):
    """The state of `diloco`.

    Attributes:
        steps: How many steps since the last meeting, int32 `[]`; mirrored.
        anchor: The parameters after the last meeting; mirrored.
        inner: The state of the inner optimizer, in part one a replica.
        reduction: The state of the policy that reduces.
        outer: The state of the outer optimizer; mirrored.
    """

    steps: jax.Array
    anchor: PyTree
    inner: Any
    reduction: Any
    outer: Any


def local_sgd(inner: optax.GradientTransformation, *, every: int) -> Policy:
    """Each replica trains by itself, and every `every` steps all take the mean of their parameters.

    A step between two meetings executes no collective. The parameters have to be in the state that `strategy.init` makes,
    the same arrays that are handed to this policy's `init`; they are `SyncOnRead(MEAN)` there. What `inner` keeps stays
    with each replica. After a meeting all parameters are equal to the bit, if `update` is called in the step itself, and
    not in a `jax.jit` or loop within, where it cannot be seen how they are rounded.

    Args:
        inner: The optimizer of each replica, without a policy.
        every: How many steps from meeting to meeting, from 1 up.

    Returns:
        A transformation of each replica's gradients `[...]` into its own updates.

    Raises:
        ValueError: `every` is less than 1.
        TypeError: It is no whole number, or `inner` no gradient transformation; or, by `init`, `inner` keeps of its gradients
            what has no mean.

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
    every = check_integer("local_sgd", "every", every, 1)
    inner = check_transformation("local_sgd", inner)

    def first(params: PyTree) -> LocalState:
        return LocalState(jnp.int32(0), init_local_optimizer("local_sgd", inner, params, every > 1))

    def update(grads: PyTree, state: LocalState, params: PyTree = None, **extra: Any) -> tuple[PyTree, LocalState]:
        context = policy_context("local_sgd")
        params = require_params("local_sgd", params)
        updates, kept = inner.update(grads, state.inner, params, **extra)
        own = optax.apply_updates(params, updates)
        meet = lambda: (context.all_reduce(ReduceOp.MEAN, own), None)
        steps, updates, _ = _met_or_not(every, state.steps, params, updates, meet, (own, None))
        return updates, LocalState(steps, kept)

    return policy_of(first, update)


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    *,
    every: int,
    reduction: optax.GradientTransformation | None = None,
) -> Policy:
    """Each replica trains by itself; every `every` steps an outer optimizer takes one step for all, along their mean way.

    The way that a replica has gone since the last meeting counts as its gradient. A step between two meetings executes no
    collective. The parameters have to be in the state that `strategy.init` makes, the same arrays that are handed to this
    policy's `init`; they are `SyncOnRead(MEAN)` there. What `inner` keeps stays with each replica.

    Args:
        inner: The optimizer of each replica, without a policy; the paper takes AdamW.
        outer: The optimizer of all; by default the paper's, `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        every: How many steps from meeting to meeting, from 1 up; the paper takes 500.
        reduction: The policy that makes one way of all replicas'; `mean()` by default, `int8()` to send less.

    Returns:
        A transformation of each replica's gradients `[...]` into its own updates.

    Raises:
        ValueError: `every` is less than 1.
        TypeError: It is no whole number, or an optimizer no gradient transformation; or, by `init`, `inner` keeps of its
            gradients what has no mean.

    Source:
        A. Douillard et al., "DiLoCo: distributed low-communication training of language models", arXiv:2311.08105.

    Example:
        >>> tx = jdist.sync.diloco(optax.adamw(1e-3), every=50)
    """
    every = check_integer("diloco", "every", every, 1)
    inner = check_transformation("diloco", inner)
    outer = check_transformation("diloco", nesterov() if outer is None else outer)
    reduction = check_transformation("diloco", mean() if reduction is None else reduction)

    def first(params: PyTree) -> DilocoState:
        kept = init_local_optimizer("diloco", inner, params, every > 1)
        anchor = copy_params(params)
        return DilocoState(jnp.int32(0), anchor, kept, reduction.init(anchor), outer.init(anchor))

    def update(grads: PyTree, state: DilocoState, params: PyTree = None, **extra: Any) -> tuple[PyTree, DilocoState]:
        policy_context("diloco")
        params = require_params("diloco", params)
        updates, kept = inner.update(grads, state.inner, params, **extra)
        own = optax.apply_updates(params, updates)

        def meet() -> tuple[PyTree, OuterStep]:
            met = outer_step(reduction, outer, own, state.anchor, state.reduction, state.outer)
            return met.params, met

        apart = (own, OuterStep(state.anchor, state.reduction, state.outer))
        steps, updates, met = _met_or_not(every, state.steps, params, updates, meet, apart)
        return updates, DilocoState(steps, met.params, kept, met.reduction, met.outer)

    return policy_of(first, update)


class OuterStep(NamedTuple):
    """What a meeting comes to.

    Attributes:
        params: The new parameters of all; mirrored.
        reduction: The state of the policy that reduced.
        outer: The state of the outer optimizer.
    """

    params: PyTree
    reduction: Any
    outer: Any


def outer_step(
    reduction: Policy, outer: Policy, own: PyTree, anchor: PyTree, reduction_state: Any, outer_state: Any
) -> OuterStep:
    """One step of the outer optimizer from `anchor`, along the mean of the ways from there to each replica's `own`."""
    way = jax.tree.map(lambda a, p: checkpoint_name(a - p, PSEUDO_GRADIENT_MARK), anchor, own)
    gradient, reduction_state = reduction.update(way, reduction_state, anchor)
    updates, outer_state = outer.update(gradient, outer_state, anchor)
    return OuterStep(optax.apply_updates(anchor, updates), reduction_state, outer_state)


def nesterov() -> Policy:
    """The outer optimizer of the DiLoCo papers."""
    return check_transformation("diloco", optax.sgd(0.7, momentum=0.9, nesterov=True))


def copy_params(params: PyTree) -> PyTree:
    """`params` as arrays of their own, which do not drift with them."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params)


def init_local_optimizer(word: str, inner: Policy, params: PyTree, drifting: bool) -> Any:
    """The first state of the inner optimizer, with what may come to differ noted as such, and the parameters if they drift.

    Raises:
        TypeError: What may differ has no mean.
    """
    for name, leaf in named_leaves("params", params) if drifting else ():
        if not jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"{name} is {dtype_and_shape(leaf)}, and parameters that drift under `jdist.sync.{word}` are read as their mean, which is "
                "no such value. Keep it out of the parameters (`optax.masked`, or a part of the state of its own)."
            )
    state = inner.init(params)
    leaves = named_leaves("its state", state)
    differing = [
        leaf for leaf, differs in zip(leaves, _may_differ(word, inner, params, state, drifting), strict=True) if differs
    ]
    for name, leaf in differing:
        if not is_float(leaf):
            raise TypeError(
                f"`jdist.sync.{word}` cannot place what its inner optimizer keeps: {name} is {dtype_and_shape(leaf)} and comes from each "
                "replica's own gradients, so it would have to be read as a mean. Take that transformation out of the inner "
                "optimizer, or put it around the policy, where all replicas agree."
            )
    mark_local(f"sync.{word}", [leaf for _, leaf in differing], VariableAggregation.MEAN)
    if drifting:
        mark_local(f"sync.{word}", params, VariableAggregation.MEAN, trainable=True)
    return state


def _may_differ(word: str, inner: Policy, params: PyTree, state: Any, drifting: bool) -> list[bool]:
    """Of each leaf of the optimizer's state, whether its updates can make it differ between replicas."""
    axes = getattr(current_context(), "axes", ()) or ("replica",)  # also where the host program makes a state
    leaves, treedef = jax.tree.flatten(state)

    def update(grads: PyTree, leaves: list[Any], params: PyTree) -> list[Any]:
        return jax.tree.leaves(inner.update(grads, treedef.unflatten(leaves), params)[1])

    try:
        program = jax.make_jaxpr(update)(params, leaves, params).jaxpr
    except TypeError as error:
        raise TypeError(
            f"`jdist.sync.{word}` tries its inner optimizer out with gradients, state and parameters, to see what each replica "
            f"keeps for itself, and it failed: {error}. An optimizer that needs more, such as the loss, has no place in it."
        ) from error
    count = len(jax.tree.leaves(params))
    own, agreed = replication.Input("gradients", axes), replication.Input("what is agreed on", ())
    differ = [False] * len(leaves)
    while True:
        kept = [own if one else agreed for one in differ]
        known = replication.prove(program, [own] * count + kept + [own if drifting else agreed] * count, axes)
        after = [was or bool(now) for was, now in zip(differ, known, strict=True)]
        if after == differ:
            return differ
        differ = after


def _met_or_not(
    every: int,
    steps: jax.Array,
    params: PyTree,
    updates: PyTree,
    meet: Callable[[], tuple[PyTree, Any]],
    apart: tuple[PyTree, Any],
) -> tuple[jax.Array, PyTree, Any]:
    """One step of `every`: the number of the next one, the updates, and what else `meet` gives or `apart` has."""

    def together() -> tuple[PyTree, PyTree, Any]:
        target, more = meet()
        return target, updates_to_target(target, params, updates), more

    if every == 1:
        _, updates, more = together()
        return steps, updates, more
    now = steps == every - 1
    target, updates, more = lax.cond(now, together, lambda: (apart[0], updates, apart[1]))
    snap_to_target(params, updates, target, now)
    return jnp.where(now, 0, steps + 1), updates, more


def updates_to_target(target: PyTree, params: PyTree, like: PyTree) -> PyTree:
    """The updates that make `target` of `params`, in the dtypes of `like`."""
    return jax.tree.map(lambda t, p, u: (t - p).astype(u.dtype), target, params, like)
