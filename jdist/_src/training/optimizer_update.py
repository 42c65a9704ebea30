"""The optimizer in a training step: the reduction of gradients, the update of the parameters, and its guard."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist._src.core.tree import PyTree, one_line
from jdist._src.replica.context import all_reduce, num_replicas
from jdist._src.replica.gradients import GradientTotals, divide_by_count
from jdist._src.training import finite_guard
from jdist._src.training.finite_guard import NonFinite
from jdist._src.training.state import (
    GROWING_OPTIMIZER_STATE,
    StateFields,
    check_optimizer_state,
    check_same_leaves,
)

LossFunction = Callable[..., jax.Array]


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError if `optimizer` is not an optax transformation."""
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", None)
    example = "optax.adamw(1e-3)"
    if isinstance(name, str) and callable(getattr(optax, name.lower(), None)):
        example = f"optax.{name.lower()}(1e-3)"
    raise TypeError(
        f"`optimizer` must be an optax transformation, got {one_line(optimizer)}. Write `optimizer={example}`."
    )


def update_params(
    optimizer: Any,
    non_finite: NonFinite,
    has_failed: jax.Array,
    totals: GradientTotals,
    fields: StateFields,
    value_fn: LossFunction,
    num_weighted: Any = None,
) -> tuple[jax.Array, jax.Array, PyTree, PyTree, tuple[Any, Any]]:
    """Reduces loss and gradients of this replica, and updates the parameters, unless the step is not finite.

    Args:
        optimizer: The optimizer.
        non_finite: The treatment of a step that is not finite.
        has_failed: Whether an earlier step ended training.
        totals: The loss and the gradient of this replica.
        fields: The state before the step.
        value_fn: From parameters to the loss of all replicas, for optimizers that evaluate it.
        num_weighted: A number `[]` of this replica that is reduced in the same message as the count, or None.

    Returns:
        The mean loss; whether the step is finite; the parameters and the state of the optimizer after it; the means of the
        count and of `num_weighted`, each None where it is.

    Raises:
        TypeError: The optimizer needs an unknown argument, its new state has other leaves, or the state before the step is
            that of another optimizer.
    """
    check_optimizer_state(optimizer, fields.opt_state, fields.params)
    calls: list[PyTree] = []

    def stand_in(params: PyTree, obj_fn: Any = None, weight: Any = None) -> jax.Array:
        """Returns a number without collectives in place of the loss: the trace shows the collectives of the optimizer."""
        calls.append(params)
        return sum((jnp.sum(x.real).astype(jnp.float32) for x in jax.tree.leaves(params)), jnp.float32(0))

    def traced(grads: PyTree, opt_state: PyTree, inputs: tuple[PyTree, jax.Array, jax.Array]) -> tuple[PyTree, PyTree]:
        params, loss, weight = inputs
        extra_args = {"value": loss, "weight": weight, "value_fn": stand_in, "obj_fn": stand_in}
        return _updates(optimizer, grads, opt_state, params, grad=grads, **extra_args)

    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), totals.grads, fields.params)
    # The sum of the weights of all losses, by which `jdist.sync.every` averages steps.
    num_losses = jnp.float32(totals.num_losses * num_replicas())
    update = finite_guard.trace_update(traced, grads, fields.opt_state, (fields.params, totals.loss, num_losses))
    _, new_state = jax.tree.unflatten(update.treedef, [0] * update.treedef.num_leaves)
    check_same_leaves("opt_state", fields.opt_state, new_state, GROWING_OPTIMIZER_STATE)
    counts = totals.count, num_weighted
    is_finite, extra_args = jnp.bool_(True), {"value_fn": value_fn, "obj_fn": value_fn}
    if update.has_collectives:  # the optimizer reduces the gradients
        count, num_weighted = all_reduce("mean", counts)
        loss, grads = divide_by_count(totals.loss, grads, count)
        loss = all_reduce("mean", loss)
    elif non_finite == "keep" or update.tests_numbers or calls:
        loss, grads, (count, num_weighted) = all_reduce("mean", (totals.loss, grads, counts))
        loss, grads = divide_by_count(loss, grads, count)
        extra_args["grad"] = grads
    else:
        (loss, (count, num_weighted)), grads, is_finite = finite_guard.mean_over_replicas(
            (totals.loss, counts), grads, update.reads
        )
        loss, grads = divide_by_count(loss, grads, count)
        is_finite &= finite_guard.are_finite(finite_guard.gradient_factors(update, fields.opt_state))
        is_taken, inputs = is_finite & ~has_failed, (fields.params, loss, _weight(num_losses, count))
        updates, opt_state = finite_guard.guarded_update(update, is_taken, grads, fields.opt_state, inputs)
        params = finite_guard.select(is_taken, optax.apply_updates(fields.params, updates), fields.params)
        return loss, is_finite, params, opt_state, (count, num_weighted)
    extra_args |= {"value": loss, "weight": _weight(num_losses, count)}
    updates, opt_state = _updates(optimizer, grads, fields.opt_state, fields.params, **extra_args)
    params = optax.apply_updates(fields.params, updates)
    if non_finite == "keep":
        return loss, is_finite, params, opt_state, (count, num_weighted)
    # With collectives the updates of the replicas may differ, and the replicas have to agree.
    are_finite = finite_guard.are_finite_on_all_replicas if update.has_collectives else finite_guard.are_finite
    is_finite = jnp.isfinite(loss) & are_finite(updates)
    old = fields.params, fields.opt_state
    params, opt_state = finite_guard.select(is_finite & ~has_failed, (params, opt_state), old)
    return loss, is_finite, params, opt_state, (count, num_weighted)


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
            f"The optimizer needs another argument ({error}). A `Trainer` passes `value` and `grad`, the loss and its "
            "gradient, `value_fn` and `obj_fn`, functions from parameters to the loss, and `weight`, the sum of the weights of "
            "the examples. For others write the step: "
            "`Trainer(step=fn)`."
        ) from error
