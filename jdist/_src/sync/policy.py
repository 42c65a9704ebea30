"""What all policies share: what a policy is, and the words for what is wrong with its arguments."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree
from jdist._src.jaxpr.clip_check import GRADIENT_MARK
from jdist._src.replica.context import ReplicaContext, require_replica_context

Policy: TypeAlias = optax.GradientTransformationExtraArgs


def policy_of(init: Callable[..., Any], update: Callable[..., Any]) -> Policy:
    """The transformation of these two functions; of a type of its own each has its state."""
    return Policy(init, update)


def stateless_policy(word: str, reduce: Callable[[ReplicaContext, PyTree], PyTree]) -> Policy:
    """A policy without a state: gradients `[...]` of each replica in, `reduce` of them out."""

    def update(grads: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        return reduce(policy_context(word), mark_gradients(grads)), state

    return policy_of(lambda params: optax.EmptyState(), update)


def policy_context(word: str) -> ReplicaContext:
    """The replica that applies the policy `word`.

    Raises:
        RuntimeError: It is the host program, within `strategy.scope()`.
    """
    return require_replica_context(f"sync.{word}", "strategy.reduce")


def mark_gradients(grads: PyTree) -> PyTree:
    """`grads`, named as what a policy was given, so that what was done to them before can be looked at."""
    return jax.tree.map(lambda g: checkpoint_name(g, GRADIENT_MARK) if isinstance(g, jax.Array) else g, grads)


def check_transformation(word: str, inner: Any) -> Policy:
    """`inner`, taking whatever extra arguments the user hands in.

    Raises:
        TypeError: It is no gradient transformation.
    """
    if not isinstance(inner, optax.GradientTransformation):
        hint = " Call it." if callable(inner) else ""
        raise TypeError(
            f"`jdist.sync.{word}` works on an optax gradient transformation, such as `jdist.sync.mean()`, got {inner!r}.{hint}"
        )
    return optax.with_extra_args_support(inner)


def check_integer(word: str, name: str, value: Any, least: int) -> int:
    """`value` as a whole number from `least` up.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is less than `least`.
    """
    return as_int(f"`{name}` of `jdist.sync.{word}`", value, least)


def check_number(word: str, name: str, value: Any) -> float:
    """`value` as a number.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"`{name}` of `jdist.sync.{word}` is a number, got {value!r}.")
    return float(value)


def require_params(word: str, params: PyTree) -> PyTree:
    """`params`.

    Raises:
        ValueError: There are none.
    """
    if params is None:
        raise ValueError(
            f"`jdist.sync.{word}` changes the parameters, and needs them: `tx.update(grads, opt_state, params)`."
        )
    return params


def is_float(leaf: Any) -> bool:
    """Whether `leaf` is an array of real floating-point numbers."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
