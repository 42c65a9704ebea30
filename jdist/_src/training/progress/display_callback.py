"""The callback that shows the progress of training."""

import importlib.util
import math
import sys
from collections import deque
from collections.abc import Callable
from typing import Literal, TextIO, TypeAlias, final, get_args

import jax
import numpy as np

from jdist._src.core.arguments import check_seconds
from jdist._src.core.tree import one_line
from jdist._src.training.events import Callback, Event, Moment
from jdist._src.training.progress.displays import (
    Display,
    LinesDisplay,
    LiveDisplay,
    NotebookDisplay,
    ProgressReport,
)

ProgressKind: TypeAlias = Literal["auto", "live", "lines", "notebook", "off"]
# The class of each display, and the default number of seconds between two reports.
_DISPLAYS: dict[str, tuple[Callable[[TextIO], Display], float]] = {
    "live": (LiveDisplay, 0.25),
    "notebook": (NotebookDisplay, 0.5),
    "lines": (LinesDisplay, 10.0),
}


@final
class Progress(Callback):
    """Shows the progress of training: steps, examples per second, remaining time, metrics, and the input stall.

    The throughput is measured over the last seconds, without validation. The metrics are read from the devices when they are
    shown, not at each step. With several processes, process 0 shows the progress.

    Args:
        kind: `"live"`, a line of a terminal that is rewritten, below a line per epoch and validation; `"lines"`, the same
            lines per epoch and validation, and a line every few seconds, suitable for a file; `"notebook"`, a bar and the same
            lines in the output of a cell; `"off"`, nothing. `"auto"` is a notebook if an IPython kernel runs this, a live line
            if `stream` is a terminal, else lines.
        interval_seconds: The number of seconds between two reports: by default 0.25 live, 0.5 in a notebook, 10 between lines.
        stream: The stream to write to; by default `sys.stdout` at the start of training.

    Raises:
        ValueError: `kind` is not one of these, or `interval_seconds` is not a positive number.
        ModuleNotFoundError: `kind` is `"notebook"` and IPython is not installed.

    Example:
        >>> callbacks = [jdist.callbacks.Progress("lines", interval_seconds=30)]
    """

    def __init__(
        self, kind: ProgressKind = "auto", *, interval_seconds: float | None = None, stream: TextIO | None = None
    ):
        if kind not in get_args(ProgressKind):
            kinds = ", ".join(map(repr, get_args(ProgressKind)))
            raise ValueError(f"The kind of progress display must be one of {kinds}, got {one_line(kind)}.")
        if interval_seconds is not None:
            check_seconds("interval_seconds", interval_seconds)
        if kind == "notebook" and importlib.util.find_spec("IPython") is None:
            raise ModuleNotFoundError(
                'A "notebook" display needs IPython, which is not installed. Use "lines" or "auto".'
            )
        self._kind, self._requested_interval, self._stream = kind, interval_seconds, stream
        self._display: Display | None = None
        self._is_opened = False

    @property
    def step_interval_seconds(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A tenth of the interval between two reports; infinite without a display."""
        return math.inf if self._display is None else self._interval / 10

    def __call__(self, event: Event, /) -> None:
        """Shows a report if one is due."""
        if event.moment is Moment.START:
            if not self._is_opened:
                self._start()
            self._is_opened = False
        if self._display is None:
            return
        rewrites = self._display.rewrites
        if event.moment is Moment.START:
            self._due = event.seconds + (0.0 if rewrites else self._interval)
        self._meter.record(event)
        is_due = event.moment is Moment.END or event.seconds >= self._due
        ends_row = event.moment in (Moment.VALIDATION, Moment.EPOCH)
        if is_due or ends_row:
            report = self._meter.report(event)
            if ends_row:
                self._display.add_row(report)
            if is_due:
                self._due = event.seconds + self._interval
            if is_due and (rewrites or not ends_row):
                self._display.show(report)
        if event.moment is Moment.END:
            self.close()

    def open(self) -> None:
        """Starts the display, before the first batch and the initial state exist. `Trainer.fit` calls it."""
        self._start()
        self._is_opened = True
        if self._display is not None:
            self._display.show(ProgressReport.before_start())

    def close(self) -> None:
        """Restores the terminal. The last report remains visible."""
        display, self._display = self._display, None
        if display is not None:
            display.close()

    def _start(self) -> None:
        self.close()
        if jax.process_index() != 0 or self._kind == "off":
            return
        stream = self._stream or sys.stdout
        kind = detect_kind(stream) if self._kind == "auto" else self._kind
        make_display, default_interval = _DISPLAYS[kind]
        self._interval = self._requested_interval or default_interval
        self._meter = _Meter(max(5.0, 2 * self._interval))
        self._display = make_display(stream)


def detect_kind(stream: TextIO) -> Literal["live", "lines", "notebook"]:
    """Returns the kind of display for the current environment."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return "notebook"
    return "live" if stream.isatty() else "lines"


class _Meter:
    """Measures the throughput over the last seconds.

    Args:
        window: The number of seconds.
    """

    def __init__(self, window: float):
        self._window = window
        self._samples: deque[tuple[float, int, int]] = deque()  # seconds, examples, step
        self._examples_per_second = self._steps_per_second = None
        self._validation: dict[str, float] = {}

    def record(self, event: Event) -> None:
        """Records the time of an event. Does not read its metrics, which are on the devices."""
        sample = event.seconds, event.examples, event.step
        if event.moment is Moment.STEP:  # not START: the first call compiles, so its duration is not representative
            self._samples.append(sample)
            while len(self._samples) > 2 and self._samples[1][0] <= event.seconds - self._window:
                self._samples.popleft()
        if event.moment in (Moment.VALIDATION, Moment.EPOCH):
            self._update_rates()
            self._validation = {f"val_{name}": value for name, value in event.validation.items()} or self._validation
            self._samples = deque([sample])  # starts after the validation

    def report(self, event: Event) -> ProgressReport:
        """Returns the report of an event. Reads its metrics."""
        self._update_rates()
        seconds_left = None
        if event.total_steps is not None and event.moment is not Moment.END and self._steps_per_second:
            seconds_left = max(0, event.total_steps - event.step) / self._steps_per_second
        metrics = {} if event.moment is Moment.START else {**event.metrics, **self._validation}
        return ProgressReport(
            step=event.step,
            total_steps=event.total_steps,
            epoch=event.epoch,
            seconds=event.seconds,
            examples_per_second=self._examples_per_second,
            seconds_left=seconds_left,
            stalled_fraction=event.stalled_fraction,
            metrics={name: float(value) for name, value in metrics.items() if not np.ndim(value)},
        )

    def _update_rates(self) -> None:
        if not self._samples:
            return
        (start, first_examples, first_step), (now, examples, step) = self._samples[0], self._samples[-1]
        if now > start and step > first_step:
            self._examples_per_second = (examples - first_examples) / (now - start)
            self._steps_per_second = (step - first_step) / (now - start)
