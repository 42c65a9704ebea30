"""The optional parameters of loss and evaluation functions, `key` and `weights`; and their results."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core.tree import PyTree, dtype_and_shape, has_dtype, one_line
from jdist._src.replica.losses import WeightedLosses, broadcast_weights
from jdist._src.replica.metrics import Metric
from jdist._src.training.foreign_metrics import is_foreign_metric


def optional_parameters(name: str, fn: Any, *arguments: str) -> dict[str, str]:
    """Returns the parameters of `fn(first, batch, ...)` that receive optional arguments, by the name of the argument.

    A parameter receives the argument of its name. A third parameter without a default receives the first of `arguments`.

    Args:
        name: The name of `fn`, for messages.
        fn: The function of the user.
        arguments: The names of the optional arguments.

    Raises:
        TypeError: `fn` is not a function, or cannot be called with these arguments.
    """
    if not callable(fn):
        raise TypeError(f"`{name}` must be a function, got {one_line(fn)}.")
    signature = inspect.signature(fn)
    receivers = {argument: argument for argument in arguments if argument in signature.parameters}
    others = [p for p in list(signature.parameters.values())[2:] if p.name not in arguments and p.default is p.empty]
    if arguments[0] not in receivers and others and others[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        receivers[arguments[0]] = others[0].name
    try:
        signature.bind(None, None, **dict.fromkeys(receivers.values()))
    except TypeError as error:
        optional = " and ".join(f"`{argument}=`" for argument in arguments)
        raise TypeError(
            f"`{name}` is called with two arguments, and optionally with {optional}; its parameters are {signature}: {error}."
        ) from None
    return receivers


def is_metric(node: PyTree) -> bool:
    """Returns whether a node of a tree is a metric, of jdist or another library."""
    return isinstance(node, Metric) or is_foreign_metric(node)


def check_metric_weights(name: str, result: PyTree, weights: Any, receivers: dict[str, str]) -> None:
    """Raises TypeError if the result of a function for a padded batch contains metrics, and it did not receive the weights."""
    if weights is None or "weights" in receivers:
        return
    for path, node in jax.tree_util.tree_flatten_with_path(result, is_leaf=is_metric)[0]:
        if is_metric(node):
            raise TypeError(
                f"`{name}` returned result{jax.tree_util.keystr(path)}, a metric {type(node).__name__}, for a padded batch "
                "without the weights of its examples, so the metric would count the padding. Add the parameter "
                "`weights`, and pass it to `update(..., weights=weights)`, or to a metric of clu or metrax as its mask."
            )


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
    rank = getattr(aux, "ndim", 0) if has_dtype(aux) else 0
    is_weights = rank > 0 and (not takes_array_as_aux or rank <= getattr(losses, "ndim", 0))
    return (losses, aux, None) if is_weights else (losses, None, aux)


def weighted_losses(name: str, losses: Any, weights: Any, example_weights: Any) -> WeightedLosses:
    """Returns losses with the weights that `name` returned, multiplied by the weights of their examples.

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
