"""The results of loss functions and objectives: losses, their weights, and auxiliary values."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.replica.losses import WeightedLosses, broadcast_weights


def split_result(result: Any, takes_array_as_aux: bool) -> tuple[Any, Any, PyTree]:
    """Returns losses, weights and auxiliary values, of which the last two may be None.

    The result is losses; a pair of losses and weights, or of losses and auxiliary values; or `((losses, weights), aux)`. In a
    pair, an array with at least one dimension is weights.

    Args:
        result: The result of the function of the user.
        takes_array_as_aux: Whether an array with more dimensions than the losses is auxiliary values.
    """
    losses, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(losses, tuple) and len(losses) == 2:
        return losses[0], losses[1], aux
    rank = getattr(aux, "ndim", 0) if hasattr(aux, "dtype") else 0
    is_weights = rank > 0 and (not takes_array_as_aux or rank <= getattr(losses, "ndim", 0))
    return (losses, aux, None) if is_weights else (losses, None, aux)


def weighted_losses(name: str, losses: Any, weights: Any, example_weights: Any) -> WeightedLosses:
    """Returns losses with the weights that `name` returned, multiplied by those of their examples.

    Raises:
        TypeError: The weights are not an array of numbers.
        ValueError: Their dimensions are not the first dimensions of the losses.
    """
    fix = (
        'Auxiliary values are a dict: return `(losses, {"name": values})`, or `((losses, weights), {"name": values})`.'
    )
    dtype = getattr(weights, "dtype", None)
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        got = type(weights).__name__ if dtype is None else dtype_and_shape(weights)
        raise TypeError(f"`{name}` returned weights of its losses that are not an array of numbers, got {got}. {fix}")
    rank = jnp.ndim(weights)
    if rank > jnp.ndim(losses) or jnp.shape(weights) != jnp.shape(losses)[:rank]:
        raise ValueError(
            f"`{name}` returned losses {dtype_and_shape(losses)} with weights {dtype_and_shape(weights)}: the dimensions of "
            f"the weights must be the first dimensions of the losses, as [batch, time] for [batch, time, ...]. {fix}"
        )
    losses = jnp.asarray(losses)
    weights = lax.stop_gradient(jnp.asarray(weights).astype(jnp.promote_types(dtype, jnp.float32)))
    if example_weights is not None:
        rank = max(rank, jnp.ndim(example_weights))
        like = losses[(..., *[0] * (losses.ndim - rank))]
        of_examples, weights = (broadcast_weights(one, like, "losses") for one in (example_weights, weights))
        weights = jnp.where(of_examples == 0, 0, weights * of_examples)
    return WeightedLosses(losses, weights)
