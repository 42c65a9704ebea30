"""The progress display of `Trainer.fit`: lines of text, or a bar in a terminal or in the output of a notebook cell."""

import datetime
import importlib
import importlib.util
import math
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, TextIO, TypeAlias, final, get_args

import jax
import numpy as np

from jdist._src.core.arguments import check_seconds
from jdist._src.core.rendering import html_of
from jdist._src.core.tree import one_line
from jdist._src.training.events import Callback, Event, Moment
from jdist._src.training.history_columns import VALIDATION_PREFIX
from jdist._src.training.state import params_of
from jdist._src.training.summary import summary

ProgressKind: TypeAlias = Literal["auto", "live", "lines", "notebook", "off"]
_BAR_WIDTH = 12  # in characters
_NOTEBOOK_WIDTH = 120  # in characters
_MAX_NOTEBOOK_ROWS = 50


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
        self._display: _Lines | _Bar | None = None
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
        rewrites = isinstance(self._display, _Bar)
        if event.moment is Moment.START:
            self._due = event.seconds + (0.0 if rewrites else self._interval)
        self._meter.record(event)
        is_due = event.moment is Moment.END or event.seconds >= self._due
        ends_row = event.moment in (Moment.VALIDATION, Moment.EPOCH)
        if is_due or ends_row:
            metrics = self._meter.metrics(event)
            if ends_row:
                self._display.add_row(_joined([f"epoch {event.epoch}", f"step {event.step:,}", _time(event)], metrics))
            if is_due:
                self._due = event.seconds + self._interval
            if is_due and (rewrites or not ends_row):
                stall = f"input stall {100 * event.stalled_fraction:.0f} %"
                text = _joined(self._meter.facts(event, metrics), metrics, stall)
                self._display.show(text, event.step, event.total_steps)
        if event.moment is Moment.END:
            self.close()

    def open(self) -> None:
        """Starts the display, before the first batch and the initial state exist. `Trainer.fit` calls it."""
        self._start()
        self._is_opened = True
        if self._display is not None:
            self._display.show("waiting for the first batch and the initial state", 0, None)

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
        self._interval = self._requested_interval or {"live": 0.25, "notebook": 0.5, "lines": 10.0}[kind]
        self._meter = _Meter(max(5.0, 2 * self._interval))
        self._display = _Lines(stream) if kind == "lines" else _Bar(stream, kind == "notebook")


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
        self._examples_per_second = self._steps_per_second = 0.0  # before they were measured
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
            validation = {f"{VALIDATION_PREFIX}{name}": value for name, value in event.validation.items()}
            self._validation = validation or self._validation
            self._samples = deque([sample])  # starts after the validation

    def metrics(self, event: Event) -> Mapping[str, float]:
        """Reads the metrics, and returns the numbers among them and among the metrics of the last validation."""
        metrics = {} if event.moment is Moment.START else {**event.metrics, **self._validation}
        return {name: float(value) for name, value in metrics.items() if not np.ndim(value)}

    def facts(self, event: Event, metrics: Mapping[str, float]) -> list[str]:
        """Returns the step, the epoch, the throughput and the time as texts. Epochs count from 0, as in the history."""
        self._update_rates()
        total = "" if event.total_steps is None else f"/{event.total_steps:,}"
        facts = [f"step {event.step:,}{total}", f"epoch {event.epoch}"]
        if not metrics:
            facts += [*_parameters(event), "waiting for the first step, which is compiled"]
        if throughput := self._examples_per_second:
            facts.append(f"{throughput:,.0f} examples/s" if throughput >= 100 else f"{throughput:.3g} examples/s")
        steps_left = 0 if event.total_steps is None else event.total_steps - event.step
        if event.moment is Moment.END or steps_left <= 0 or not self._steps_per_second:
            return [*facts, _time(event)]
        return [*facts, f"{_duration(steps_left / self._steps_per_second)} left"]

    def _update_rates(self) -> None:
        if not self._samples:
            return
        (start, first_examples, first_step), (now, examples, step) = self._samples[0], self._samples[-1]
        if now > start and step > first_step:
            self._examples_per_second = (examples - first_examples) / (now - start)
            self._steps_per_second = (step - first_step) / (now - start)


def _parameters(event: Event) -> list[str]:
    """Returns the number of parameters as a text, if the state has parameters."""
    params = params_of(event.state)
    return [f"{summary(params).parameters:,} parameters"] if jax.tree.leaves(params) else []


def _joined(facts: list[str], metrics: Mapping[str, float], *last: str) -> str:
    return "  ".join([*facts, *(f"{name} {value:.4g}" for name, value in metrics.items()), *last])


def _time(event: Event) -> str:
    return _duration(event.seconds)


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


class _Lines:
    """Prints each report as a line of text.

    Args:
        stream: The stream to write to.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._last_line = stream, ""

    def show(self, text: str, step: int, total_steps: int | None) -> None:
        """Prints a report."""
        if text != self._last_line:  # the END event may follow the last step directly
            self.add_row(text)
        self._last_line = text

    def add_row(self, text: str) -> None:
        """Prints the line of an epoch or a validation."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """All lines are printed."""


class _Bar:
    """Rewrites a bar and a text, below the lines of epochs and validations: in a terminal or the output of a notebook cell.

    Args:
        stream: The terminal. Other output appears above the bar.
        in_notebook: Whether IPython displays it. Rich's own display in notebooks needs ipywidgets.
    """

    def __init__(self, stream: TextIO, in_notebook: bool):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        text = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
        # The caller chose this display, so the stream is treated as a terminal. It is drawn when there is a new report, not
        # by a thread.
        console = Console(file=stream, force_terminal=True, force_jupyter=False)
        self._bar = Progress(BarColumn(_BAR_WIDTH), text, console=console, auto_refresh=False)
        self._task = self._bar.add_task("", total=None)
        self._rows: deque[Any] = deque(maxlen=_MAX_NOTEBOOK_ROWS)
        self._in_notebook = in_notebook
        if in_notebook:
            self._ipython: Any = importlib.import_module("IPython.display")
            self._handle = self._ipython.display(self._ipython.HTML(""), display_id=True)
        else:
            self._bar.start()

    def show(self, text: str, step: int, total_steps: int | None) -> None:
        """Replaces the last report."""
        self._bar.update(self._task, description=text, completed=step, total=total_steps)
        if not self._in_notebook:
            self._bar.refresh()
        elif self._handle is not None:  # None outside of IPython's shells, where nothing is displayed
            from rich.console import Group

            page = html_of(Group(*self._rows, self._bar.get_renderable()), _NOTEBOOK_WIDTH)
            self._handle.update(self._ipython.HTML(page))

    def add_row(self, text: str) -> None:
        """Shows the line of an epoch or a validation, which remains."""
        from rich.text import Text  # rich parses a plain string as markup

        if self._in_notebook:
            self._rows.append(Text(text))
        else:
            self._bar.console.print(Text(text), highlight=False)

    def close(self) -> None:
        """Ends the display. The last report remains visible."""
        if not self._in_notebook:
            self._bar.stop()
