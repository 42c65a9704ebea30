"""Policies that apply an optimizer at some steps only: gradient accumulation, and skipping of non-finite steps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.tree import PyTree
from jdist._src.replica.finite import are_finite_on_all_replicas, select
from jdist._src.replica.leaf_annotations import (
    collect_sync_targets,
    mark_local,
    snap_to_target,
)
from jdist._src.sync.policy import (
    Policy,
    check_integer,
    check_transformation,
    make_policy,
    mark_gradients,
    policy_context,
    synchronous_context,
)
from jdist._src.values.aggregation import VariableAggregation


class EveryState(NamedTuple):
    """The state of `every`.

    Attributes:
        steps: The number of steps accumulated since the last update, int32 `[]`; replicated.
        weight: The sum of their weights, float32 `[]`; replicated.
        sums: The weighted sums of the gradients; local to each replica.
        opt_state: The state of the optimizer.
    """

    steps: jax.Array
    weight: jax.Array
    sums: PyTree
    opt_state: Any


@explains_arguments()
def every(optimizer: optax.GradientTransformation, steps: int) -> Policy:
    """Accumulates gradients: every `steps` steps, `optimizer` receives their mean; the updates of other steps are zero.

    The result is a step on a batch `steps` times as large. `every` accumulates the gradients of each replica and does not
    reduce them: `optimizer` contains the reduction, once every `steps` steps. Wrap the complete chain,
    `every(optax.chain(jdist.sync.mean(), optax.adamw(1e-3)), 4)`: an optimizer outside would receive the zero updates too, and
    a step without a reduction inside is rejected (`NotMirroredError`).

    If the batches have different weights, because of padding, pass the weight: `tx.update(grads, opt_state, params, weight=w)`,
    with gradients of a mean over all replicas (`jdist.global_mean`, `jdist.value_and_grad`) and the sum of the weights over
    all replicas, `jdist.all_reduce("sum", weights.sum())`. The proof rejects a weight that differs between replicas.

    Args:
        optimizer: A gradient transformation, such as a policy and an optimizer in a chain.
        steps: The number of steps per update. 1 returns `optimizer`.

    Returns:
        A transformation of each replica's gradients `[...]` into the updates of `optimizer`, or zeros.

    Raises:
        ValueError: `steps` is less than 1.
        TypeError: `steps` is not an integer, or `optimizer` is not a gradient transformation.

    Example:
        >>> tx = jdist.sync.every(optax.chain(jdist.sync.mean(), optax.sgd(1.0)), 2)
        >>> w, state = jnp.float32(0), tx.init(jnp.float32(0))
        >>> for grad in (1.0, 3.0):
        ...     updates, state = tx.update(jnp.float32(grad), state, w)
        ...     print(float(updates))
        0.0
        -2.0
    """
    if isinstance(steps, optax.GradientTransformation):
        raise TypeError(
            "`jdist.sync.every` takes the optimizer first and the number of steps second: write "
            f"`jdist.sync.every(optimizer, {optimizer!r})`."
        )
    steps = check_integer("every", "steps", steps, 1)
    optimizer = check_transformation("every", "optimizer", optimizer)
    if steps == 1:
        return optimizer

    def init(params: PyTree) -> EveryState:
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)
        # The reduction averages the sums, so their mean is the value that another number of replicas resumes with.
        mark_local("sync.every", sums, VariableAggregation.MEAN)
        return EveryState(jnp.int32(0), jnp.float32(0), sums, optimizer.init(params))

    def update(
        grads: PyTree, state: EveryState, params: PyTree = None, *, weight: Any = None, **extra_args: Any
    ) -> tuple[PyTree, EveryState]:
        synchronous_context("every", "optax.chain(jdist.sync.mean(), optax.MultiSteps(optimizer, k))")
        step_weight = jnp.float32(1 if weight is None else weight)
        # A gradient with weight zero has no effect, even if it is not finite.
        weighted = mark_gradients(jax.tree.map(lambda g: step_weight * g, grads))
        sums = jax.tree.map(lambda s, g: s + jnp.where(step_weight == 0, 0, g), state.sums, weighted)
        total = state.weight + step_weight
        params_before: list[list[Any]] = []

        def apply() -> tuple[PyTree, EveryState, list[Any]]:
            means = jax.tree.map(lambda s, g: (s / jnp.where(total == 0, 1, total)).astype(g.dtype), sums, grads)
            with collect_sync_targets() as targets:
                updates, opt_state = optimizer.update(means, state.opt_state, params, weight=total, **extra_args)
            params_before[:] = [one.before for one in targets]
            new_state = EveryState(jnp.int32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, sums), opt_state)
            return updates, new_state, [(one.update, one.target, one.when) for one in targets]

        def accumulate() -> tuple[PyTree, EveryState, list[Any]]:
            updates, _, targets = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return updates, EveryState(state.steps + 1, total, sums, state.opt_state), targets

        shapes = jax.eval_shape(apply)
        updates, new_state, targets = lax.cond(state.steps == steps - 1, apply, accumulate)
        # A target recorded inside `cond` is part of another trace. Record each target again in this trace.
        for before, (target_update, target, when) in zip(params_before, targets, strict=True):
            snap_to_target(before, target_update, target, when)
        return updates, new_state

    return make_policy(init, update)


class SkipState(NamedTuple):
    """The state of `skip_nonfinite`.

    Attributes:
        skipped: The number of steps skipped so far, int32 `[]`; replicated.
        opt_state: The state of the optimizer.
    """

    skipped: jax.Array
    opt_state: Any


@explains_arguments()
def skip_nonfinite(optimizer: optax.GradientTransformation) -> Policy:
    """Applies `optimizer`, except for steps in which a number is NaN or infinite on any replica: all replicas skip these.

    Checks each replica's gradients and the updates of `optimizer`, and reduces one number over the replicas. A skipped step
    leaves the parameters and the state of `optimizer` unchanged. Wrap the complete chain.

    Args:
        optimizer: A gradient transformation, such as a policy and an optimizer in a chain.

    Returns:
        A transformation of each replica's gradients `[...]` into the updates of `optimizer`, or zeros; `state.skipped` counts
        the skipped steps.

    Raises:
        TypeError: `optimizer` is not a gradient transformation.

    Example:
        >>> tx = jdist.sync.skip_nonfinite(optax.chain(jdist.sync.mean(), optax.sgd(1.0)))
        >>> updates, state = tx.update(jnp.float32(jnp.nan), tx.init(jnp.float32(0)), None)
        >>> float(updates), int(state.skipped)
        (0.0, 1)
    """
    optimizer = check_transformation("skip_nonfinite", "optimizer", optimizer)

    def init(params: PyTree) -> SkipState:
        return SkipState(jnp.int32(0), optimizer.init(params))

    def update(grads: PyTree, state: SkipState, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, SkipState]:
        is_finite, updates, opt_state = update_if_finite(
            "skip_nonfinite", optimizer, grads, state.opt_state, params, extra_args
        )
        return updates, SkipState(state.skipped + ~is_finite, opt_state)

    return make_policy(init, update)


def update_if_finite(
    name: str, optimizer: Policy, grads: PyTree, opt_state: Any, params: PyTree, extra_args: Mapping[str, Any]
) -> tuple[jax.Array, PyTree, Any]:
    """Returns whether all gradients and updates are finite; the updates and the new state, or zeros and `opt_state`."""
    policy_context(name)
    with collect_sync_targets() as targets:
        updates, new_state = optimizer.update(grads, opt_state, params, **extra_args)
    is_finite = are_finite_on_all_replicas((grads, updates))
    for one in targets:
        snap_to_target(one.before, one.update, one.target, one.when & is_finite)
    zeros = jax.tree.map(jnp.zeros_like, updates)
    return is_finite, select(is_finite, updates, zeros), select(is_finite, new_state, opt_state)
