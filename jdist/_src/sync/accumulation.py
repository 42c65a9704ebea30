"""Policies about when a step counts: every k-th one, with the gradients of k; and only if they are finite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdist._src.core.tree import PyTree
from jdist._src.replica.leaf_annotations import collect_sync_targets, mark_local, snap_to_target, snap_to_target_if
from jdist._src.sync.policy import (
    Policy,
    check_integer,
    check_transformation,
    mark_gradients,
    policy_context,
    policy_of,
)
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.reduce_op import ReduceOp


class EveryState(NamedTuple):
    """The state of `every`.

    Attributes:
        steps: How many steps were accumulated since the last one that counted, int32 `[]`; mirrored.
        weight: The sum of their weights, float32 `[]`; mirrored.
        sums: The weighted sum of their gradients, one a replica.
        inner: The state of the inner transformation.
    """

    steps: jax.Array
    weight: jax.Array
    sums: PyTree
    inner: Any


def every(k: int, inner: optax.GradientTransformation) -> Policy:
    """Gradient accumulation: `inner` sees the mean of `k` gradients at every k-th step, and the others change nothing.

    It is the step on a batch `k` times as large, with one reduction. Put the whole optimizer inside:
    `every(4, optax.chain(jdist.sync.mean(), optax.adamw(1e-3)))`. An optimizer behind it would see the zeros between.

    Where the batches have different weights, because of padding, hand them in:
    `tx.update(grads, opt_state, params, weight=w)`, with gradients of a mean over all replicas (`jdist.global_mean`,
    `jdist.value_and_grad`) and the sum of its weights over all replicas, `jdist.all_reduce("sum", weights.sum())`. The
    proof refuses one replica's own.

    Args:
        k: How many steps; 1 is `inner` itself.
        inner: A gradient transformation, such as a policy and an optimizer in a chain.

    Returns:
        A transformation of each replica's gradients `[...]` into the updates of `inner`, or zeros.

    Raises:
        ValueError: `k` is less than 1.
        TypeError: `k` is no whole number, or `inner` no gradient transformation.

    Example:
        >>> tx = jdist.sync.every(2, optax.chain(jdist.sync.mean(), optax.sgd(1.0)))
        >>> w, state = jnp.float32(0), tx.init(jnp.float32(0))
        >>> for grad in (1.0, 3.0):
        ...     updates, state = tx.update(jnp.float32(grad), state, w)
        ...     print(float(updates))
        0.0
        -2.0
    """
    k = check_integer("every", "k", k, 1)
    inner = check_transformation("every", inner)
    if k == 1:
        return inner

    def first(params: PyTree) -> EveryState:
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)
        # What counts is the mean of the sums, so that is what another number of replicas goes on with.
        mark_local("sync.every", sums, VariableAggregation.MEAN)
        return EveryState(jnp.int32(0), jnp.float32(0), sums, inner.init(params))

    def update(
        grads: PyTree, state: EveryState, params: PyTree = None, *, weight: Any = None, **extra: Any
    ) -> tuple[PyTree, EveryState]:
        policy_context("every")
        share = jnp.float32(1 if weight is None else weight)
        # What has no weight is left out, whatever it is.
        sums = jax.tree.map(lambda s, g: s + jnp.where(share == 0, 0, share * g), state.sums, mark_gradients(grads))
        total = state.weight + share
        before: list[list[Any]] = []

        def count() -> tuple[PyTree, EveryState, list[Any]]:
            means = jax.tree.map(lambda s, g: (s / jnp.where(total == 0, 1, total)).astype(g.dtype), sums, grads)
            with collect_sync_targets() as inside:
                updates, kept = inner.update(means, state.inner, params, weight=total, **extra)
            before[:] = [one.before for one in inside]
            state_after = EveryState(jnp.int32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, sums), kept)
            return updates, state_after, [(one.update, one.target, one.when) for one in inside]

        def wait() -> tuple[PyTree, EveryState, list[Any]]:
            updates, _, inside = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return updates, EveryState(state.steps + 1, total, sums, state.inner), inside

        shapes = jax.eval_shape(count)
        updates, state_after, inside = lax.cond(state.steps == k - 1, count, wait)
        for params_before, (update, target, when) in zip(before, inside, strict=True):
            snap_to_target(params_before, update, target, when)
        return updates, state_after

    return policy_of(first, update)


class SkipState(NamedTuple):
    """The state of `skip_nonfinite`.

    Attributes:
        skipped: How many steps were left out so far, int32 `[]`; mirrored.
        inner: The state of the inner transformation.
    """

    skipped: jax.Array
    inner: Any


def skip_nonfinite(inner: optax.GradientTransformation) -> Policy:
    """`inner`, but for steps in which a number is NaN or infinite on any replica: these change nothing, on all of them.

    It looks at each replica's gradients and at the updates that `inner` makes of them, and the replicas agree by a reduction
    of one number. What a skipped step would have left in the state of `inner` is gone with it. Put the whole optimizer
    inside.

    Args:
        inner: A gradient transformation, such as a policy and an optimizer in a chain.

    Returns:
        A transformation of each replica's gradients `[...]` into the updates of `inner`, or zeros; `state.skipped` counts.

    Raises:
        TypeError: `inner` is no gradient transformation.

    Example:
        >>> tx = jdist.sync.skip_nonfinite(optax.chain(jdist.sync.mean(), optax.sgd(1.0)))
        >>> updates, state = tx.update(jnp.float32(jnp.nan), tx.init(jnp.float32(0)), None)
        >>> float(updates), int(state.skipped)
        (0.0, 1)
    """
    inner = check_transformation("skip_nonfinite", inner)

    def first(params: PyTree) -> SkipState:
        return SkipState(jnp.int32(0), inner.init(params))

    def update(grads: PyTree, state: SkipState, params: PyTree = None, **extra: Any) -> tuple[PyTree, SkipState]:
        with collect_sync_targets() as inside:
            updates, kept = inner.update(grads, state.inner, params, **extra)
        good = all_finite("skip_nonfinite", (grads, updates))
        snap_to_target_if(good, inside)
        updates = either(good, updates, jax.tree.map(jnp.zeros_like, updates))
        return updates, SkipState(state.skipped + ~good, either(good, kept, state.inner))

    return policy_of(first, update)


def all_finite(word: str, tree: PyTree) -> jax.Array:
    """Whether every number of `tree` is finite, on every replica; a boolean `[]`, mirrored."""
    numbers = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)]
    bad = sum((jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in numbers), jnp.int32(0))
    return policy_context(word).all_reduce(ReduceOp.MAX, bad) == 0


def either(condition: jax.Array, tree: PyTree, other: PyTree) -> PyTree:
    """`tree` if `condition`, else `other`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), tree, other)
