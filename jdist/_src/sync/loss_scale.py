"""Dynamic loss scaling for float16."""

import math
from typing import Any

import jax.numpy as jnp
import optax

from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.tree import PyTree, one_line
from jdist._src.replica.precision import LossScaleState
from jdist._src.sync.accumulation import update_if_finite
from jdist._src.sync.policy import (
    Policy,
    check_integer,
    check_number,
    check_transformation,
    make_policy,
)

_MAX_SCALE = 2.0**24  # if all gradients are zero, nothing else stops the growth


@explains_arguments()
def dynamic_loss_scale(
    optimizer: optax.GradientTransformation, *, initial: float = 2.0**15, interval: int = 2000, factor: float = 2.0
) -> Policy:
    """Applies `optimizer` with a dynamic loss scale in its state; all replicas share the scale.

    In a step whose state contains the scale, `jdist.value_and_grad` multiplies the loss by the scale and divides the gradients
    by it. If a number is infinite or NaN on any replica, all replicas skip the step and the scale shrinks; after `interval`
    finite steps it grows. Wrap the complete chain.

    Args:
        optimizer: A gradient transformation, such as a policy and an optimizer in a chain.
        initial: The initial scale.
        interval: The number of finite steps after which the scale grows.
        factor: The factor by which the scale grows and shrinks, greater than 1. The scale does not shrink below 1.

    Returns:
        A transformation of each replica's unscaled gradients `[...]` into the updates of `optimizer`, or zeros.

    Raises:
        ValueError: A number is out of range.
        TypeError: `interval` is not an integer, or `optimizer` is not a gradient transformation.

    Source:
        P. Micikevicius et al., "Mixed precision training", arXiv:1710.03740.

    Example:
        >>> tx = jdist.sync.dynamic_loss_scale(
        ...     optax.chain(jdist.sync.mean(), optax.adam(1e-3)), initial=8.0
        ... )
        >>> state = tx.init(jnp.float32(0))
        >>> _, state = tx.update(jnp.float32(jnp.inf), state)
        >>> float(state.scale), int(state.skipped)
        (4.0, 1)
    """
    name = "dynamic_loss_scale"
    optimizer = check_transformation(name, "optimizer", optimizer)
    interval = check_integer(name, "interval", interval, 1)
    if not 1 <= check_number(name, "initial", initial) <= _MAX_SCALE:
        raise ValueError(f"`initial` of `jdist.sync.{name}` must be between 1 and 2**24, got {one_line(initial)}.")
    if not 1 < check_number(name, "factor", factor) < math.inf:
        raise ValueError(f"`factor` of `jdist.sync.{name}` must be finite and greater than 1, got {one_line(factor)}.")

    def init(params: PyTree) -> LossScaleState:
        return LossScaleState(jnp.float32(initial), jnp.int32(0), jnp.int32(0), optimizer.init(params))

    def update(
        grads: PyTree, state: LossScaleState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LossScaleState]:
        is_finite, updates, opt_state = update_if_finite(name, optimizer, grads, state.opt_state, params, extra_args)
        grows = is_finite & (state.finite_steps + 1 == interval)
        scale = jnp.where(is_finite, state.scale * jnp.where(grows, factor, 1), jnp.maximum(state.scale / factor, 1))
        new_state = LossScaleState(
            scale=jnp.minimum(scale, _MAX_SCALE),
            finite_steps=jnp.where(is_finite & ~grows, state.finite_steps + 1, 0),
            skipped=state.skipped + ~is_finite,
            opt_state=opt_state,
        )
        return updates, new_state

    return make_policy(init, update)
