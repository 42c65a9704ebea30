"""Rows for those who write them: when one is due, and what is in it."""

import abc
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from jdist._src.callbacks.arguments import check_function
from jdist._src.core.arguments import as_int
from jdist._src.training.events import Event, Moment

Also: TypeAlias = Callable[[Event], Mapping[str, float]]
FACTS = ("moment", "epoch", "step", "seconds", "rows", "stalled")


class Pace:
    """Says when something is due: after each epoch, and each time that so many steps have gone by.

    Remembers the step of the last event, as a call of the step may be several steps. Training that ends within an epoch
    makes one more due.

    Args:
        every: How many steps; None for none between epochs.
    """

    def __init__(self, every: int | None):
        self._every = None if every is None else as_int("`every`", every, 1)
        self._seen = self._due = 0

    def due(self, event: Event) -> bool:
        """Whether it is time. To be asked at each event, once."""
        before, self._seen = self._seen, event.step
        match event.moment:
            case Moment.START:
                self._due, due = event.step, False
            case Moment.STEP:
                due = self._every is not None and event.step // self._every > before // self._every
            case Moment.EPOCH:
                due = True
            case Moment.END:
                due = event.step > self._due
        if due:
            self._due = event.step
        return due


class RowWriter(abc.ABC):
    """A callback that writes rows: after each epoch, and each `every` steps. Process 0 writes.

    Args:
        every: Each how many steps besides; each of them reads the metrics from the devices.
        also: What to write besides, functions from an event to names and numbers, as `jdist.callbacks.learning_rate()`.
    """

    def __init__(self, every: int | None, also: Sequence[Also]):
        self._pace, self._also = Pace(every), _checked(also)

    def __call__(self, event: Event, /) -> None:
        """Called by the loop."""
        due = self._pace.due(event)
        if jax.process_index() != 0:
            return
        if event.moment is Moment.START:
            self._begin(event.step)
        elif due:
            self._write(event)

    @property
    @abc.abstractmethod
    def destination(self) -> pathlib.Path:
        """The file or the directory that it writes to."""

    @abc.abstractmethod
    def _begin(self, step: int) -> None:
        """Training begins, or goes on from step `step`. ValueError where nothing can be written."""

    @abc.abstractmethod
    def _write(self, event: Event) -> None:
        """A row is due."""


def check_destinations(callbacks: Iterable[object]) -> None:
    """Raises ValueError if two of the callbacks write rows to one place."""
    writers: dict[pathlib.Path, RowWriter] = {}
    for callback in callbacks:
        if not isinstance(callback, RowWriter):
            continue
        place = callback.destination.resolve()
        if place in writers:
            kinds = " and ".join(type(one).__name__ for one in (writers[place], callback))
            raise ValueError(f"Two callbacks, {kinds}, write to {str(place)!r}. Give each a path of its own.")
        writers[place] = callback


def _checked(also: Sequence[Also]) -> tuple[Also, ...]:
    """`also` as a tuple.

    Raises:
        TypeError: It is no list, or not of functions.
    """
    if not isinstance(also, (tuple, list)):
        raise TypeError(
            f"`also` is a list of functions of an event, got {type(also).__name__}: write `also=[callbacks.learning_rate()]`."
        )
    for function in also:
        check_function("also", function, "an event")
    return tuple(also)


def measured(event: Event, also: Sequence[Also]) -> dict[str, float]:
    """The loss and the metrics of an event, and what else is to be written.

    Raises:
        ValueError: A name is there twice.
    """
    found = event.logs
    for function in also:
        more = function(event)
        _check_apart(found, more)
        found.update(more)
    return found


def row_of(event: Event, also: Sequence[Also]) -> dict[str, Any]:
    """A row: when it was, and what was measured.

    Raises:
        ValueError: A name is there twice.
    """
    when = event.moment.name.lower(), event.epoch, event.step, event.seconds, event.rows, event.stalled
    facts: dict[str, Any] = dict(zip(FACTS, when, strict=True))
    found = measured(event, also)
    _check_apart(facts, found)
    return facts | found


def _check_apart(names: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    twice = sorted(set(names) & set(more))
    if twice:
        raise ValueError(f"Two things to write are called {', '.join(map(repr, twice))}. Give one another name.")
