"""A loss scale for float16 that finds its size by itself."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist._src.core.tree import PyTree
from jdist._src.replica.leaf_annotations import collect_sync_targets, snap_to_target_if
from jdist._src.replica.precision import LossScaleState
from jdist._src.sync.accumulation import all_finite, either
from jdist._src.sync.policy import Policy, check_integer, check_number, check_transformation, policy_of

_MOST = 2.0**24  # where all gradients are zero, nothing else would stop it


def dynamic_loss_scale(
    inner: optax.GradientTransformation, *, initial: float = 2.0**15, interval: int = 2000, factor: float = 2.0
) -> Policy:
    """`inner`, with a scale for the loss in its state, which all replicas share.

    `jdist.value_and_grad`, in a step whose state has it, multiplies the loss by the scale and divides the gradients by it.
    Where a number is infinite or NaN on any replica the step changes nothing, on all of them, and the scale becomes
    smaller; after `interval` good steps it becomes larger. Put the whole optimizer inside.

    Args:
        inner: A gradient transformation, such as a policy and an optimizer in a chain.
        initial: The scale to begin with.
        interval: How many good steps until it grows.
        factor: How much it grows and shrinks by, above 1. It does not shrink below 1.

    Returns:
        A transformation of each replica's gradients `[...]`, not scaled, into the updates of `inner`, or zeros.

    Raises:
        ValueError: A number is out of range.
        TypeError: `interval` is no whole number, or `inner` no gradient transformation.

    Source:
        P. Micikevicius et al., "Mixed precision training", arXiv:1710.03740.

    Example:
        >>> tx = jdist.sync.dynamic_loss_scale(optax.chain(jdist.sync.mean(), optax.adam(1e-3)), initial=8.0)
        >>> state = tx.init(jnp.float32(0))
        >>> _, state = tx.update(jnp.float32(jnp.inf), state)
        >>> float(state.scale), int(state.skipped)
        (4.0, 1)
    """
    word = "dynamic_loss_scale"
    inner = check_transformation(word, inner)
    interval = check_integer(word, "interval", interval, 1)
    if not 1 <= check_number(word, "initial", initial) <= _MOST:
        raise ValueError(f"`initial` of `jdist.sync.{word}` is at most 2**24, and from 1 up, got {initial!r}.")
    if not 1 < check_number(word, "factor", factor) < math.inf:
        raise ValueError(f"`factor` of `jdist.sync.{word}` is above 1, got {factor!r}.")

    def first(params: PyTree) -> LossScaleState:
        return LossScaleState(jnp.float32(initial), jnp.int32(0), jnp.int32(0), inner.init(params))

    def update(
        grads: PyTree, state: LossScaleState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, LossScaleState]:
        with collect_sync_targets() as inside:
            updates, kept = inner.update(grads, state.inner, params, **extra)
        good = all_finite(word, (grads, updates))
        snap_to_target_if(good, inside)
        grows = good & (state.good + 1 == interval)
        scale = jnp.where(good, state.scale * jnp.where(grows, factor, 1), jnp.maximum(state.scale / factor, 1))
        count = jnp.where(good & ~grows, state.good + 1, 0)
        updates = either(good, updates, jax.tree.map(jnp.zeros_like, updates))
        state = LossScaleState(jnp.minimum(scale, _MOST), count, state.skipped + ~good, either(good, kept, state.inner))
        return updates, state

    return policy_of(first, update)
