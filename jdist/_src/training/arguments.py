"""Errors about the arguments of a `Trainer` that contain the line to write."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from jdist._src.core.tree import one_line

P = ParamSpec("P")
R = TypeVar("R")
# Arguments of `fit` and `evaluate` in Keras, and what to write instead.
_KERAS_ARGUMENTS = {
    "x": "pass inputs and targets as one tuple, `trainer.{call}`",
    "y": "pass inputs and targets as one tuple, `trainer.{call}`",
    "verbose": 'write `progress="lines"`, or `progress="off"` for `verbose=0`',
    "validation_split": "split the data, and write `validation_data=(x_validation, y_validation)`",
    "sample_weight": "pass the weights of the examples with the data, `(x, y, weights)`",
    "steps_per_epoch": "write `steps=`, the number of steps after which training ends",
    "validation_freq": "write `validate_every=`, the number of steps between validations",
    "validation_steps": "pass as many validation examples as are to be evaluated",
    "initial_epoch": "write `state=` or `resume=`, which continue from a saved state",
}


def explain_keras_arguments(call: str, num_positional: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator of a method that answers arguments of the same method in Keras with the line to write.

    Args:
        call: A call of the method, for the messages.
        num_positional: The number of positional arguments, without `self`.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > 1 + num_positional:
                raise TypeError(f"`{method.__name__}` takes inputs and targets as one tuple. Write `trainer.{call}`.")
            for name in kwargs:
                if name in _KERAS_ARGUMENTS:
                    hint = _KERAS_ARGUMENTS[name].format(call=call)
                    raise TypeError(f"`{method.__name__}` has no argument `{name}`: {hint}.")
            return method(*args, **kwargs)

        return checked

    return decorate


def require_arguments(method: str, **arguments: Any) -> None:
    """Raises TypeError if an argument of the trainer that `method` needs is None."""
    missing = [name for name, value in arguments.items() if value is None]
    if missing:
        raise TypeError(
            f"`{method}` needs the argument `{'`, `'.join(missing)}` of the trainer: `jdist.Trainer(model, optimizer, loss)`, "
            "such as `jdist.Trainer(model, optax.adamw(1e-3), optax.softmax_cross_entropy_with_integer_labels)`."
        )


def check_alternatives(model: Any, optimizer: Any, loss: Any, objective: Any, step: Any) -> None:
    """Raises TypeError if arguments of the trainer exclude each other."""
    if loss is not None and objective is not None:
        raise TypeError("Pass either `loss` or `objective`: an objective computes the losses itself.")
    if step is not None and optimizer is not None:
        raise TypeError("Pass either `optimizer` or `step`: a step updates the parameters itself.")
    if step is not None:
        _check_step(step)


def _check_step(step: Any) -> None:
    expected = "`step` must be a function `fn(state, batch)` or `fn(state, batch, weights)`"
    if not callable(step):
        raise TypeError(f"{expected}, got {one_line(step)}.")
    signature = inspect.signature(step)
    try:
        signature.bind(*range(2 + (len(signature.parameters) > 2)))
    except TypeError as error:
        raise TypeError(f"{expected}, got one with the parameters {signature}: {error}.") from None


def check_eval_params(eval_params: Any) -> None:
    """Raises TypeError if `eval_params` is neither a function of two arguments nor None."""
    if eval_params is None:
        return
    got = one_line(eval_params)
    if callable(eval_params):
        try:
            inspect.signature(eval_params).bind(None, None)
            return
        except TypeError as error:
            got = f"a function with the parameters {inspect.signature(eval_params)}: {error}"
    raise TypeError(
        "`eval_params` must be a function `fn(opt_state, params)` that returns parameters, such as "
        f"`optax.contrib.schedule_free_eval_params`, got {got}."
    )
