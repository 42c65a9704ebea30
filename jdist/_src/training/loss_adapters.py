"""Loss functions of other libraries, adapted to the argument order of a `Trainer`: `loss(outputs, targets)`."""

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

# Keras passes the targets first. Its functions, and functions written for it, use these parameter names.
TARGETS_FIRST = {("y_true", "y_pred"), ("target", "output")}
_keras_loss_lock = threading.RLock()  # held while the reduction of a Keras loss is replaced


def adapt_loss(loss: Any) -> Any:
    """Returns `loss` as a function from outputs and targets to losses `[batch, ...]`.

    A `keras.losses.Loss` is called with the targets first and without its reduction. A function whose first two parameters
    are called `y_true, y_pred` (all of `keras.losses`) or `target, output` (`keras.ops`) is called with the targets first.
    Any other loss is returned unchanged. Keras is not imported here: the creator of a Keras loss has imported it.

    Args:
        loss: A loss function, a Keras loss object, or None.

    Raises:
        TypeError: `loss` is a class, or has a third parameter without a default.
        ValueError: `loss` is a Keras loss with the reduction "sum", or the backend of Keras is not JAX.

    Example:
        >>> adapt_loss(lambda y_true, y_pred: y_pred - y_true)(5.0, 3.0)
        2.0
        >>> adapt_loss(lambda outputs, targets: outputs - targets)(5.0, 3.0)
        2.0
    """
    if isinstance(loss, type):
        raise TypeError(f"`loss` is the class {loss.__name__}. Pass an instance of it: `{loss.__name__}(...)`.")
    if _is_keras_object(loss, "losses", "Loss"):
        return _with_targets_first(_per_example(loss))
    if not callable(loss):
        return loss
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = []
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if len(required) > 2:
        raise TypeError(
            f"`loss` has a third parameter without a default, `{required[2]}`, and is called as `loss(outputs, targets)`. For "
            "a loss of parameters or other values, write an objective: `Trainer(objective=fn)`, with "
            "`fn(params, batch, key, apply)`."
        )
    is_keras_order = tuple(p.name for p in parameters[:2]) in TARGETS_FIRST
    return _with_targets_first(loss) if is_keras_order else loss


def is_keras_metric(metric: Any) -> bool:
    """Returns whether `metric` is a Keras metric object, which updates variables in place."""
    return _is_keras_object(metric, "metrics", "Metric")


def check_keras_backend() -> None:
    """Raises ValueError if Keras is imported with another backend than JAX."""
    keras = sys.modules.get("keras")
    if keras is not None and keras.backend.backend() != "jax":
        raise ValueError(
            f"The backend of Keras is {keras.backend.backend()}; it must be JAX. Set the environment variable "
            "KERAS_BACKEND=jax before Keras is imported."
        )


def _is_keras_object(value: Any, module: str, name: str) -> bool:
    kind = getattr(getattr(sys.modules.get("keras"), module, None), name, None)
    return kind is not None and isinstance(value, kind)


def _per_example(loss: Any) -> Callable[[Any, Any], Any]:
    """Returns a function that calls a Keras loss, and returns one value per example."""
    check_keras_backend()
    if loss.reduction == "sum":
        raise ValueError(
            f'The Keras loss {loss.name} has reduction="sum". A `Trainer` averages the losses over the examples of all '
            "replicas. Pass the loss with `reduction=None`; for the scale of the sum, multiply the learning rate."
        )

    def losses(targets: Any, outputs: Any) -> Any:
        # The object itself is called. A copy goes through `get_config`, and has only the attributes that it returns.
        with _keras_loss_lock:
            reduction, loss.reduction = loss.reduction, None
            try:
                result = loss(targets, outputs)
            finally:
                loss.reduction = reduction
        if jnp.ndim(result) == 0:
            raise ValueError(
                f"The Keras loss {loss.name} returned one number for a batch, although it was called without its reduction. "
                "It must return one value per example, [batch, ...]: create the losses that it calls with `reduction=None`; "
                "of `Dice` and `Tversky`, pass the `axis` of each example, such as `axis=(1, 2, 3)`."
            )
        return result

    return losses


def _with_targets_first(loss: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda outputs, targets: loss(targets, outputs)
