"""How far training is, while it goes on."""

import importlib.util
import sys
from collections import deque
from collections.abc import Callable
from typing import Literal, TextIO, TypeAlias, final, get_args

import jax
import numpy as np

from jdist._src.callbacks.arguments import check_seconds
from jdist._src.callbacks.displays import Display, Lines, Live, Notebook, Reading
from jdist._src.training.events import Callback, Event, Moment

Kind: TypeAlias = Literal["auto", "live", "lines", "notebook", "off"]
_DISPLAYS: dict[
    str, tuple[Callable[[TextIO], Display], float]
] = {  # and how many seconds there are between two readings
    "live": (Live, 0.25),
    "notebook": (Notebook, 0.5),
    "lines": (Lines, 10.0),
}


def progress(kind: Kind = "auto", *, every: float | None = None, stream: TextIO | None = None) -> Callback:
    """Shows how far training is: steps, rows a second, the time that is left, the metrics, and the input stall.

    The rows a second are those of the last seconds, without validation. The metrics are read from the devices when they are
    shown, and not at each step. Process 0 shows; others are silent.

    Args:
        kind: `"live"`, a line of a terminal that is written anew, below a line per epoch; `"lines"`, a line every few
            seconds, as for a file; `"notebook"`, a bar and lines of the epochs in the output of a cell; `"off"`, nothing.
            `"auto"` is a notebook if a kernel of one runs this, a live line if `stream` is a terminal, else lines.
        every: How many seconds there are between two readings: 0.25 live, 0.5 in a notebook, 10 between lines.
        stream: Where to; `sys.stdout`, as it is when training begins, by default.

    Raises:
        ValueError: There is no such kind, or `every` is no positive number.
        ModuleNotFoundError: A notebook is asked for, where there is no IPython.

    Example:
        >>> callbacks = [jdist.callbacks.progress("lines", every=30)]
    """
    if kind not in get_args(Kind):
        raise ValueError(f"`kind` of progress is one of {', '.join(map(repr, get_args(Kind)))}, got {kind!r}.")
    if every is not None:
        check_seconds("every", every)
    if kind == "notebook" and importlib.util.find_spec("IPython") is None:
        raise ModuleNotFoundError('There is no IPython here, so no notebook shows this: take "lines", or "auto".')
    return _silent if kind == "off" else Progress(kind, every, stream)


def _silent(event: Event) -> None:
    """Shows nothing."""


@final
class Progress:
    """What `progress` returns. Mutable: it remembers the last readings, and what is displayed."""

    def __init__(self, kind: Kind, every: float | None, stream: TextIO | None):
        self._kind, self._asked, self._stream = kind, every, stream
        self._display: Display | None = None

    def __call__(self, event: Event, /) -> None:
        """Called by the loop."""
        if event.moment is Moment.START:
            self.close()
            self._begin(event)
        if self._display is None:
            return
        self._meter.take(event)
        is_due = event.moment is Moment.END or event.seconds >= self._due
        stays = event.moment is Moment.EPOCH and self._display.keeps_epochs
        if is_due or stays:
            reading = self._meter.reading(event)
            if stays:
                self._display.keep(reading)
            if is_due:
                self._due = event.seconds + self._every
                self._display.show(reading)
        if event.moment is Moment.END:
            self.close()

    def close(self) -> None:
        """Leaves the terminal as it was; what was shown last stays."""
        display, self._display = self._display, None
        if display is not None:
            display.close()

    def _begin(self, event: Event) -> None:
        if jax.process_index() != 0:
            return
        stream = self._stream or sys.stdout
        kind = kind_for(stream) if self._kind == "auto" else self._kind
        make, seconds = _DISPLAYS[kind]
        self._every = self._asked or seconds
        self._due = event.seconds + (self._every if kind == "lines" else 0.0)
        self._meter = _Meter(max(5.0, 2 * self._every))
        self._display = make(stream)


def kind_for(stream: TextIO) -> Literal["live", "lines", "notebook"]:
    """What suits the place where this runs."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return "notebook"
    return "live" if stream.isatty() else "lines"


class _Meter:
    """Rates of the last seconds.

    Args:
        window: How many seconds.
    """

    def __init__(self, window: float):
        self._window = window
        self._samples: deque[tuple[float, int, int]] = deque()  # seconds, rows, step
        self._rows_a_second = self._steps_a_second = None
        self._validation: dict[str, float] = {}

    def take(self, event: Event) -> None:
        """Notes when an event was; not its metrics, which are on the devices."""
        sample = event.seconds, event.rows, event.step
        if event.moment is Moment.STEP:  # the first call compiled: its time says nothing of the next
            self._samples.append(sample)
            while len(self._samples) > 2 and self._samples[1][0] <= event.seconds - self._window:
                self._samples.popleft()
        if event.moment is Moment.EPOCH:
            self._measure()
            self._validation = {f"val_{name}": value for name, value in event.validation.items()} or self._validation
            self._samples = deque([sample])  # from after the validation on

    def reading(self, event: Event) -> Reading:
        """What there is to show; reads the metrics."""
        self._measure()
        total = None if event.moment is Moment.END else event.total_steps
        steps = None if total is None else max(0, total - event.step)
        left = None if steps is None or not self._steps_a_second else steps / self._steps_a_second
        metrics = {} if event.moment is Moment.START else {**event.metrics, **self._validation}
        numbers = {name: float(value) for name, value in metrics.items() if not np.ndim(value)}
        facts = event.step, event.total_steps, event.epoch, event.seconds
        return Reading(*facts, self._rows_a_second, left, event.stalled, numbers)

    def _measure(self) -> None:
        if not self._samples:
            return
        (before, rows_before, step_before), (now, rows, step) = self._samples[0], self._samples[-1]
        if now > before and step > step_before:
            self._rows_a_second = (rows - rows_before) / (now - before)
            self._steps_a_second = (step - step_before) / (now - before)
