"""Rows of numbers for trackers of experiments."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from jdist._src.callbacks.arguments import check_function
from jdist._src.callbacks.log_rows import ExtraColumns, RowWriter, row_of
from jdist._src.training.events import Event


@final
class Rows(RowWriter):
    """Calls a function with a row of numbers: after each epoch and each validation, and every `every` steps.

    It connects every tracker whose function takes a dict and a step: `Rows(wandb.log)`, `Rows(mlflow.log_metrics)`. The row has
    the columns of `CSVLog` except for `moment`, `step` and metrics that are arrays. Process 0 calls the function.

    Args:
        function: Called as `function(row, step=step)`; its result is not used.
        every: The number of steps between additional rows; each of them reads the metrics from the devices.
        also: Additional columns: functions from an event to names and numbers, such as `jdist.callbacks.learning_rate()`.

    Raises:
        TypeError: `function` is not a function of a row and a keyword argument `step`.

    Example:
        >>> rows = []
        >>> callback = jdist.callbacks.Rows(lambda row, step: rows.append((step, row["loss"])), every=100)
    """

    def __init__(self, function: Callable[..., Any], *, every: int | None = None, also: Sequence[ExtraColumns] = ()):
        super().__init__(every, also)
        check_function("function", function, "a row and a step")
        if not _accepts_step(function):
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(
                f"`Rows` calls `{name}(row, step=step)`, and it does not accept these arguments. Write "
                f"`Rows(lambda row, step: {name}(row))`."
            )
        self._function = function

    def _begin(self, step: int) -> None:
        """The tracker has been started by the user."""

    def _write(self, event: Event) -> None:
        row = row_of(event, self._also)
        numbers = {name: value for name, value in row.items() if name not in ("moment", "step") and np.ndim(value) == 0}
        self._function(numbers, step=event.step)


def _accepts_step(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind({}, step=0)
    except TypeError:
        return False
    except ValueError:  # a function without a signature, implemented in C
        return True
    return True
