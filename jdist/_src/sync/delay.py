"""Corrections of updates that are applied to another state than the one that their gradients were computed from."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.tree import PyTree
from jdist._src.jaxpr.marks import READ_MARK, STALENESS_MARK
from jdist._src.sync.policy import Policy, check_number, make_policy, policy_context, require_params


def scale_by_staleness() -> Policy:
    """Divides updates by their staleness, if it is greater than 1. Put it behind the optimizer.

    The staleness is the number of updates between the read of a worker of `jdist.ParameterServerStrategy` and its own update.
    Under other strategies it is 0, and this is the identity.

    Returns:
        A transformation of updates `[...]`.

    Source:
        W. Zhang, S. Gupta, X. Lian and J. Liu, "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016,
        arXiv:1511.05950.

    Example:
        >>> tx = optax.chain(
        ...     jdist.sync.mean(), optax.adam(1e-3), jdist.sync.scale_by_staleness()
        ... )
        >>> float(jdist.sync.scale_by_staleness().update(jnp.float32(3), ())[0])
        3.0
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object) -> tuple[PyTree, PyTree]:
        policy_context("scale_by_staleness")
        divisor = jnp.maximum(1, checkpoint_name(jnp.float32(0), STALENESS_MARK))
        return jax.tree.map(lambda u: (u / divisor).astype(u.dtype), updates), state

    return make_policy(lambda params: (), update)


@explains_arguments()
def delay_compensation(*, strength: float = 0.04) -> Policy:
    """Corrects gradients for the change of the parameters since they were read. Put it between the mean and the optimizer.

    Adds `strength * g * g * (params - params_read)` to each gradient `g`: the first-order change of the gradient, with the
    squared gradient in place of the Hessian. A worker of `jdist.ParameterServerStrategy` then sends the parameters that it has
    read with its gradients. Under other strategies both are equal, and this is the identity.

    Args:
        strength: The factor, at least 0.

    Returns:
        A transformation of averaged gradients `[...]`.

    Raises:
        ValueError: `strength` is negative. When applied: the parameters were not passed to `update`.
        TypeError: `strength` is not a number.

    Source:
        S. Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, arXiv:1609.08326.

    Example:
        >>> tx = optax.chain(jdist.sync.mean(), jdist.sync.delay_compensation(), optax.sgd(0.1))
        >>> float(jdist.sync.delay_compensation().update(jnp.float32(3), (), jnp.float32(1))[0])
        3.0
    """
    name = "delay_compensation"
    if check_number(name, "strength", strength) < 0:
        raise ValueError(f"`strength` of `jdist.sync.{name}` must be at least 0, got {strength}.")

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra_args: object) -> tuple[PyTree, PyTree]:
        policy_context(name)

        def compensated(grad: jax.Array, now: jax.Array) -> jax.Array:
            return (grad + strength * grad * grad * (now - checkpoint_name(now, READ_MARK))).astype(grad.dtype)

        return jax.tree.map(compensated, grads, require_params(name, params)), state

    return make_policy(lambda params: (), update)
