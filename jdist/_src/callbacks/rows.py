"""Callbacks that write rows of numbers: their base class, the columns of a row, and `Rows`, which calls a function."""

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np

from jdist._src.callbacks.arguments import check_function
from jdist._src.core.arguments import as_int
from jdist._src.training.events import Callback, Event, Moment

ExtraColumns: TypeAlias = Callable[[Event], Mapping[str, float]]
# The columns of each row, attributes of the event.
EVENT_COLUMNS = ("moment", "epoch", "step", "seconds", "examples", "stalled_fraction")


class RowWriter(Callback, abc.ABC):
    """Base class of callbacks that write rows: after each epoch and each validation, and every `every` steps.

    If training ends within an epoch, one more row is written. Process 0 writes.

    Args:
        every: The number of steps between additional rows; each of them reads the metrics from the devices.
        also: Additional columns: functions from an event to names and numbers, such as `jdist.callbacks.learning_rate()`.
    """

    def __init__(self, every: int | None, also: Sequence[ExtraColumns]):
        if not isinstance(also, (tuple, list)):
            raise TypeError(
                f"`also` must be a list of functions of an event, got {type(also).__name__}: write "
                "`also=[callbacks.learning_rate()]`."
            )
        for function in also:
            check_function("also", function, "an event")
        self._every, self._also = None if every is None else as_int("`every`", every, 1), tuple(also)
        self._last_step = self._last_due = 0

    def __call__(self, event: Event, /) -> None:
        """Writes a row if one is due."""
        last_step, self._last_step = self._last_step, event.step  # a call of the step may take several steps
        match event.moment:
            case Moment.START:
                self._last_due = event.step
                if jax.process_index() == 0:
                    self._begin(event.step)
                return
            case Moment.STEP:
                is_due = self._every is not None and event.step // self._every > last_step // self._every
            case Moment.VALIDATION | Moment.EPOCH:
                is_due = True
            case Moment.END:
                is_due = event.step > self._last_due
        if is_due:
            self._last_due = event.step
        if is_due and jax.process_index() == 0:
            columns = event.logs
            for function in self._also:
                columns = _disjoint_union(columns, function(event))
            self._write(event, columns)

    @abc.abstractmethod
    def _begin(self, step: int) -> None:
        """Prepares the destination for the steps after `step`. Raises ValueError if it is not writable."""

    @abc.abstractmethod
    def _write(self, event: Event, columns: Mapping[str, Any]) -> None:
        """Writes a row: the loss, the metrics and the additional columns of an event."""


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
        TypeError: `function` is not a function of a row and a keyword argument `step`, `every` is not an integer, or `also` is
            not a list of functions.
        ValueError: `every` is less than 1.

    Example:
        >>> rows = []
        >>> callback = jdist.callbacks.Rows(
        ...     lambda row, step: rows.append((step, row["loss"])), every=100
        ... )
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

    def _write(self, event: Event, columns: Mapping[str, Any]) -> None:
        row = row_of(event, columns)
        numbers = {name: value for name, value in row.items() if name not in ("moment", "step") and np.ndim(value) == 0}
        self._function(numbers, step=event.step)


def row_of(event: Event, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of an event: `EVENT_COLUMNS`, and the measured columns.

    Raises:
        ValueError: Two columns have the same name.
    """
    row = {name: getattr(event, name) for name in EVENT_COLUMNS} | {"moment": str(event.moment)}
    return _disjoint_union(row, columns)


def _disjoint_union(columns: Mapping[str, Any], other_columns: Mapping[str, Any]) -> dict[str, Any]:
    repeated = sorted(set(columns) & set(other_columns))
    if repeated:
        raise ValueError(f"Two columns have the name {', '.join(map(repr, repeated))}. Rename one of them.")
    return {**columns, **other_columns}


def _accepts_step(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind({}, step=0)
    except TypeError:
        return False
    except ValueError:  # a function without a signature, implemented in C
        return True
    return True
