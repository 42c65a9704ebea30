"""Losses of nnx modules as functions of their parameters.

An nnx module changes in place while it computes: batch norm updates statistics, dropout counts random numbers. `split_module`
returns its parameters, which are differentiated, and all other variables, which are carried from one micro-batch to the next.
"""

from collections.abc import Callable
from typing import Any

from jdist._src.core.tree import PyTree, describe_tree
from jdist._src.replica.losses import WeightedLosses, is_loss


def split_module(
    loss_fn: Callable[..., Any], has_aux: bool, module: Any
) -> tuple[PyTree, PyTree, Callable[..., tuple[Any, Any]]]:
    """Returns the parameters of an nnx module, its other variables, and the loss as a function of both.

    The function takes `(carried, params, *batch)`, and returns the losses and `(carried, aux)`.
    """
    from flax import nnx

    graph, params, carried = nnx.split(module, nnx.Param, ...)

    def loss(carried: PyTree, params: PyTree, *batch: PyTree) -> tuple[Any, Any]:
        merged = nnx.merge(graph, params, carried, copy=True)
        losses, aux = split_aux(loss_fn(merged, *batch), has_aux)
        return losses, (nnx.state(merged, nnx.Not(nnx.Param)), aux)

    return params, carried, loss


def update_module(module: Any, carried: PyTree) -> None:
    """Sets the variables of an nnx module that are not parameters."""
    from flax import nnx

    nnx.update(module, carried)


def split_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the losses and the auxiliary values that a loss function returned.

    Raises:
        TypeError: The result is not a pair although `has_aux`, or the losses are not one array or number.
    """
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"With `has_aux` the loss function must return a pair `(losses, aux)`, and it returned {describe_tree(result)}."
        )
    losses, aux = result if has_aux else (result, None)
    if is_loss(losses) or isinstance(losses, WeightedLosses):
        return losses, aux
    hint = ""
    if isinstance(losses, (tuple, list)) and not has_aux:
        hint = " If it returns a loss and another value, return a pair, and pass `has_aux=True`."
    raise TypeError(
        f"The loss function returned {describe_tree(losses)}, and the losses must be one array or number.{hint}"
    )
