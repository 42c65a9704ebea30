"""The optional parameters of loss functions and evaluation functions: `key` and `weights`."""

import inspect
from typing import Any

import jax

from jdist._src.core.tree import PyTree, one_line
from jdist._src.replica.metrics import Metric


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
    """Returns whether a node of a tree is a metric."""
    return isinstance(node, Metric)


def check_metric_weights(name: str, result: PyTree, weights: Any, receivers: dict[str, str]) -> None:
    """Raises TypeError if the result of a function for a padded batch contains metrics, and it did not receive the weights."""
    if weights is None or "weights" in receivers:
        return
    for path, node in jax.tree_util.tree_flatten_with_path(result, is_leaf=is_metric)[0]:
        if is_metric(node):
            raise TypeError(
                f"`{name}` returned result{jax.tree_util.keystr(path)}, a metric {type(node).__name__}, for a padded batch "
                "without the weights of its examples, so the metric would count the padding. Add the parameter "
                "`weights`, and pass it to `update(..., weights=weights)`."
            )
