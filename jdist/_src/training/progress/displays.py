"""Displays of the training progress: a line of a terminal, lines of text, the output of a notebook cell."""

import dataclasses
import datetime
import html
import importlib
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TextIO, final

_BAR_WIDTH = 12  # in characters
_MAX_ROW_LINES = 50  # in a notebook


@dataclasses.dataclass(frozen=True)
class ProgressReport:
    """The progress of training at one time.

    Attributes:
        step: The number of steps taken.
        total_steps: The number of steps after which training ends, if known.
        epoch: The current epoch, from 0.
        seconds: The duration so far.
        examples_per_second: The throughput; None before it was measured.
        seconds_left: The estimated remaining duration, if known.
        stalled_fraction: The fraction of steps that waited for their batch, 0 to 1.
        metrics: The loss and the metrics; empty before the first step.
        has_state: Whether the state at the start exists.
    """

    step: int
    total_steps: int | None
    epoch: int
    seconds: float
    examples_per_second: float | None
    seconds_left: float | None
    stalled_fraction: float
    metrics: Mapping[str, float]
    has_state: bool = True

    @classmethod
    def before_start(cls) -> "ProgressReport":
        """Returns the report before the first batch and the initial state exist."""
        return cls(0, None, 0, 0.0, None, None, 0.0, {}, has_state=False)

    def __str__(self) -> str:
        return "  ".join(self.parts())

    def parts(self) -> list[str]:
        """Returns the facts and the metrics as texts, in order. Epochs count from 0, as in the history."""
        if not self.has_state:
            return ["waiting for the first batch and the initial state"]
        total = "" if self.total_steps is None else f"/{self.total_steps:,}"
        parts = [f"step {self.step:,}{total}", f"epoch {self.epoch}"]
        if not self.metrics:
            parts.append("waiting for the first step, which is compiled")
        if self.examples_per_second is not None:
            throughput = self.examples_per_second
            parts.append(f"{throughput:,.0f} examples/s" if throughput >= 100 else f"{throughput:.3g} examples/s")
        if self.seconds_left is not None and self.step != self.total_steps:
            parts.append(f"{_duration(self.seconds_left)} left")
        else:
            parts.append(_duration(self.seconds))
        return [*parts, *self._metric_parts(), f"input stall {100 * self.stalled_fraction:.0f} %"]

    def row_parts(self) -> list[str]:
        """Returns the texts of the line that remains after an epoch or a validation."""
        return [f"epoch {self.epoch}", f"step {self.step:,}", _duration(self.seconds), *self._metric_parts()]

    def _metric_parts(self) -> list[str]:
        return [f"{name} {value:.4g}" for name, value in self.metrics.items()]


def wrap_parts(parts: Iterable[str], width: int, indent: int = 0) -> list[str]:
    """Returns the parts in lines of at most `width` characters; no part is split.

    Args:
        parts: The texts.
        width: The number of characters per line.
        indent: The number of characters of the first line that are used otherwise.

    Example:
        >>> wrap_parts(["step 1", "loss 0.5", "val_loss 0.25"], 16)
        ['step 1  loss 0.5', 'val_loss 0.25']
    """
    lines, remaining = [""], width - indent
    for part in parts:
        needed = len(part) + 2 * bool(lines[-1])
        if needed > remaining and lines[-1]:
            lines.append(part)
            remaining = width - len(part)
        else:
            lines[-1] += "  " * bool(lines[-1]) + part
            remaining -= needed
    return lines


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


class Display(Protocol):
    """Shows progress reports until it is closed.

    Attributes:
        rewrites: Whether a report replaces the last one; otherwise each report is a line that remains.
    """

    rewrites: bool

    def show(self, report: ProgressReport) -> None:
        """Replaces the last report."""
        ...

    def add_row(self, report: ProgressReport) -> None:
        """Shows the end of an epoch, or a validation, in a line that remains."""
        ...

    def close(self) -> None:
        """Ends the display. The last report remains visible."""
        ...


@final
class LinesDisplay:
    """Prints each report as a line of text.

    Args:
        stream: The stream to write to.
    """

    rewrites = False

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last_line = ""

    def show(self, report: ProgressReport) -> None:
        """See `Display`."""
        line = str(report)
        if line != self._last_line:  # the END event may follow the last step directly
            print(line, file=self._stream, flush=True)
        self._last_line = line

    def add_row(self, report: ProgressReport) -> None:
        """See `Display`."""
        print("  ".join(report.row_parts()), file=self._stream, flush=True)

    def close(self) -> None:
        """See `Display`."""


@final
class LiveDisplay:
    """Rewrites one line of a terminal, or several if it is narrow. Other output appears above it.

    Args:
        stream: The terminal.
    """

    rewrites = True

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.live import Live

        # The caller chose this display, so the stream is treated as a terminal. It is drawn when there is a new report, not
        # by a thread.
        console = Console(file=stream, force_terminal=True, force_jupyter=False)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, report: ProgressReport) -> None:
        """See `Display`."""
        self._live.update(_bar_and_text(report, self._live.console.width), refresh=True)

    def add_row(self, report: ProgressReport) -> None:
        """See `Display`."""
        from rich.text import Text

        text = "\n".join(wrap_parts(report.row_parts(), self._live.console.width))
        self._live.console.print(Text(text), highlight=False)

    def close(self) -> None:
        """See `Display`."""
        self._live.stop()


def _bar_and_text(report: ProgressReport, width: int) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text  # rich parses a plain string as markup

    indent = 0 if report.total_steps is None else _BAR_WIDTH + 2
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in wrap_parts(report.parts(), width, indent)]
    if report.total_steps is None:
        return Group(*lines)
    first_line = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, report.total_steps), completed=report.step, width=_BAR_WIDTH)
    first_line.add_row(bar, lines[0])
    return Group(first_line, *lines[1:])


@final
class NotebookDisplay:
    """Updates a bar and a line in the output of a notebook cell, below a line per epoch and validation.

    Args:
        stream: Not used: IPython displays the output.
    """

    rewrites = True

    def __init__(self, stream: TextIO):
        self._ipython: Any = importlib.import_module("IPython.display")
        self._handle = self._ipython.display(self._ipython.HTML(""), display_id=True)
        self._rows: deque[list[str]] = deque(maxlen=_MAX_ROW_LINES)

    def show(self, report: ProgressReport) -> None:
        """See `Display`."""
        if self._handle is not None:  # None outside of IPython's shells, where nothing is displayed
            self._handle.update(self._ipython.HTML(to_html(report, self._rows)))

    def add_row(self, report: ProgressReport) -> None:
        """See `Display`."""
        self._rows.append(report.row_parts())

    def close(self) -> None:
        """See `Display`."""


def to_html(report: ProgressReport, rows: Sequence[Sequence[str]] = ()) -> str:
    """Returns a report as HTML, below the lines of the epochs and validations, in columns. Long lines are wrapped.

    Args:
        report: The report.
        rows: The texts of each line, see `ProgressReport.row_parts`.
    """
    bar = ""
    if report.total_steps is not None:
        bar = f'<progress value="{report.step}" max="{max(1, report.total_steps)}"></progress> '
    style = "font-family:monospace;font-variant-numeric:tabular-nums;white-space:pre-wrap"
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    row_lines = ("  ".join(map(str.ljust, parts, widths)).rstrip() for parts in rows)
    lines = "".join(f"{html.escape(line)}<br>" for line in row_lines)
    return f'<div style="{style}">{lines}{bar}{html.escape(str(report))}</div>'
