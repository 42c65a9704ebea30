"""Callbacks that write rows: when a row is due, and its contents."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from jdist._src.callbacks.arguments import check_function
from jdist._src.core.arguments import as_int
from jdist._src.training.events import Callback, Event, Moment

ExtraColumns: TypeAlias = Callable[[Event], Mapping[str, float]]
FACTS = ("moment", "epoch", "step", "seconds", "examples", "stalled_fraction")


class RowSchedule:
    """Determines when a row is due: after each epoch and each validation, and every `every` steps.

    Mutable: it stores the step of the last event, because a call of the step may take several steps. If training ends within an
    epoch, one more row is due.

    Args:
        every: The number of steps; None for rows of epochs and validations only.
    """

    def __init__(self, every: int | None):
        self._every = None if every is None else as_int("`every`", every, 1)
        self._last_step = self._last_due = 0

    def is_due(self, event: Event) -> bool:
        """Returns whether a row is due. Call it exactly once per event."""
        last_step, self._last_step = self._last_step, event.step
        match event.moment:
            case Moment.START:
                self._last_due, is_due = event.step, False
            case Moment.STEP:
                is_due = self._every is not None and event.step // self._every > last_step // self._every
            case Moment.VALIDATION | Moment.EPOCH:
                is_due = True
            case Moment.END:
                is_due = event.step > self._last_due
        if is_due:
            self._last_due = event.step
        return is_due


class RowWriter(Callback, abc.ABC):
    """Base class of callbacks that write rows: after each epoch and each validation, and every `every` steps.

    Process 0 writes.

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
        self._schedule, self._also = RowSchedule(every), tuple(also)

    def __call__(self, event: Event, /) -> None:
        """Writes a row if one is due."""
        is_due = self._schedule.is_due(event)
        if jax.process_index() != 0:
            return
        if event.moment is Moment.START:
            self._begin(event.step)
        elif is_due:
            self._write(event)

    @abc.abstractmethod
    def _begin(self, step: int) -> None:
        """Prepares the destination for the steps after `step`. Raises ValueError if it is not writable."""

    @abc.abstractmethod
    def _write(self, event: Event) -> None:
        """Writes a row."""


def measured_columns(event: Event, also: Sequence[ExtraColumns]) -> dict[str, float]:
    """Returns the loss, the metrics and the additional columns of an event.

    Raises:
        ValueError: Two columns have the same name.
    """
    columns = event.logs
    for function in also:
        extra_columns = function(event)
        _check_disjoint(columns, extra_columns)
        columns.update(extra_columns)
    return columns


def row_of(event: Event, also: Sequence[ExtraColumns]) -> dict[str, Any]:
    """Returns the row of an event: the facts, and the measured columns.

    Raises:
        ValueError: Two columns have the same name.
    """
    facts: dict[str, Any] = {name: getattr(event, name) for name in FACTS} | {"moment": str(event.moment)}
    columns = measured_columns(event, also)
    _check_disjoint(facts, columns)
    return facts | columns


def _check_disjoint(columns: Mapping[str, Any], other_columns: Mapping[str, Any]) -> None:
    repeated = sorted(set(columns) & set(other_columns))
    if repeated:
        raise ValueError(f"Two columns have the name {', '.join(map(repr, repeated))}. Rename one of them.")
