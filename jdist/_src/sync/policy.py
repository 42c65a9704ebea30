"""Definitions that all policies share: the `Policy` type, its constructors, and argument checks."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, one_line
from jdist._src.jaxpr.marks import GRADIENT_MARK
from jdist._src.replica.context import ReplicaContext, require_replica_context

Policy: TypeAlias = optax.GradientTransformationExtraArgs


def make_policy(init: Callable[..., Any], update: Callable[..., Any]) -> Policy:
    """Returns the policy of these functions. Their types differ from optax's: each policy has its own type of state."""
    return Policy(init, update)


def stateless_policy(name: str, reduce: Callable[[ReplicaContext, PyTree], PyTree]) -> Policy:
    """Returns the policy `name` without a state, which applies `reduce` to each replica's gradients `[...]`."""

    def update(grads: PyTree, state: Any, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, Any]:
        return reduce(policy_context(name), mark_gradients(grads)), state

    return make_policy(lambda params: optax.EmptyState(), update)


def policy_context(name: str) -> ReplicaContext:
    """Returns the context of the replica that applies the policy `name`.

    Raises:
        RuntimeError: The policy is applied in the cross-replica context, within `strategy.scope()`.
    """
    return require_replica_context(f"sync.{name}", "strategy.reduce")


def synchronous_context(name: str, alternative: str = "jdist.sync.mean()") -> ReplicaContext:
    """Returns the context of the replica that applies the policy `name`, which needs replicas that run in step.

    Args:
        name: The policy.
        alternative: What to write where workers share one state.

    Raises:
        ValueError: Workers update one state at different times.
        RuntimeError: See `policy_context`.
    """
    context = policy_context(name)
    if context.is_asynchronous:
        raise ValueError(
            f"`jdist.sync.{name}` has no meaning under `ParameterServerStrategy`: its workers share one state and do not "
            f"wait for each other. Use `{alternative}`; `max_staleness` bounds how far they diverge."
        )
    return context


def mark_gradients(grads: PyTree) -> PyTree:
    """Returns `grads` with a name on each array, by which `clip_check` finds the operations applied before the policy."""
    return jax.tree.map(lambda g: checkpoint_name(g, GRADIENT_MARK) if isinstance(g, jax.Array) else g, grads)


def check_transformation(name: str, argument: str, value: Any) -> Policy:
    """Returns an argument of the policy `name` as a transformation that accepts extra arguments.

    Raises:
        TypeError: `value` is not a gradient transformation.
    """
    if isinstance(value, optax.GradientTransformation):
        return optax.with_extra_args_support(value)
    example = "optax.adamw(1e-3)" if argument.endswith("optimizer") else "jdist.sync.mean()"
    hint = " Call it." if callable(value) else ""
    raise TypeError(
        f"`{argument}` of `jdist.sync.{name}` must be an optax gradient transformation, such as `{example}`, got "
        f"{one_line(value)}.{hint}"
    )


def check_integer(name: str, argument: str, value: Any, least: int) -> int:
    """Returns an argument of the policy `name` as an integer.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is less than `least`.
    """
    return as_int(f"`{argument}` of `jdist.sync.{name}`", value, least)


def check_number(name: str, argument: str, value: Any) -> float:
    """Returns an argument of the policy `name` as a float.

    Raises:
        TypeError: `value` is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"`{argument}` of `jdist.sync.{name}` must be a number, got {one_line(value)}.")
    return float(value)


def require_params(name: str, params: PyTree) -> PyTree:
    """Returns `params`.

    Raises:
        ValueError: `params` is None.
    """
    if params is None:
        raise ValueError(
            f"`jdist.sync.{name}` needs the parameters in each update: write `tx.update(grads, opt_state, params)`."
        )
    return params
