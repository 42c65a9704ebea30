"""Where progress is shown: a line of a terminal, lines of text, the output of a notebook's cell."""

import dataclasses
import datetime
import html
import importlib
from collections.abc import Mapping
from typing import Any, Protocol, TextIO, final


@dataclasses.dataclass(frozen=True)
class Reading:
    """How far training is.

    Attributes:
        step: How many steps it has gone through.
        total: How many it goes through, if that is known.
        epoch: Which epoch it is in, from 0.
        seconds: How long it has run.
        rows_a_second: How many examples it takes a second; None before that was measured.
        left: In how many seconds it will be at its end, if that is known.
        stalled: Which part of the steps had to wait for their batch, 0 to 1.
        metrics: The loss and the metrics; empty before the first step.
    """

    step: int
    total: int | None
    epoch: int
    seconds: float
    rows_a_second: float | None
    left: float | None
    stalled: float
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        total = "" if self.total is None else f"/{self.total:,}"
        parts = [f"step {self.step:,}{total}", f"epoch {self.epoch + 1}"]
        if not self.metrics:
            parts.append("waiting for the first step, which is compiled")
        if self.rows_a_second is not None:
            parts.append(f"{_number(self.rows_a_second)} rows/s")
        if self.left is not None and self.step != self.total:
            parts.append(f"{_time(self.left)} left")
        else:
            parts.append(_time(self.seconds))
        parts += [f"{name} {value:.4g}" for name, value in self.metrics.items()]
        return "  ".join([*parts, f"input stall {100 * self.stalled:.0f} %"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


class Display(Protocol):
    """Shows one reading after the other, until it is closed."""

    def show(self, reading: Reading) -> None:
        """Shows what is now."""
        ...

    def close(self) -> None:
        """Leaves what was shown last, and everything else as it was."""
        ...


@final
class Lines:
    """A line of text each time.

    Args:
        stream: Where to.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last = ""

    def show(self, reading: Reading) -> None:
        """See `Display`."""
        line = str(reading)
        if line != self._last:  # the end may come with the last step
            print(line, file=self._stream, flush=True)
        self._last = line

    def close(self) -> None:
        """See `Display`."""


@final
class Live:
    """One line of a terminal, written anew each time. What is printed meanwhile appears above it.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.live import Live

        # Asked for, so shown as in a terminal. Drawn when there is something new, and not by a thread of its own.
        console = Console(file=stream, force_terminal=True, force_jupyter=False)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, reading: Reading) -> None:
        """See `Display`."""
        self._live.update(_bar_and_text(reading), refresh=True)

    def close(self) -> None:
        """See `Display`."""
        self._live.stop()


def _bar_and_text(reading: Reading) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text  # a plain string would be read as markup

    text = Text(str(reading), no_wrap=True, overflow="ellipsis")
    if reading.total is None:
        return text
    line = Table.grid(padding=(0, 2))
    line.add_row(ProgressBar(total=max(1, reading.total), completed=reading.step, width=12), text)
    return line


@final
class Notebook:
    """A bar and a line in the output of a cell, written anew each time.

    Args:
        stream: Not used: the notebook has a way of its own.
    """

    def __init__(self, stream: TextIO):
        self._ipython: Any = importlib.import_module("IPython.display")
        self._shown = self._ipython.display(self._ipython.HTML(""), display_id=True)

    def show(self, reading: Reading) -> None:
        """See `Display`."""
        if self._shown is not None:  # None outside of IPython's shells, where nothing displays it
            self._shown.update(self._ipython.HTML(page(reading)))

    def close(self) -> None:
        """See `Display`."""


def page(reading: Reading) -> str:
    """A reading as HTML."""
    bar = (
        "" if reading.total is None else f'<progress value="{reading.step}" max="{max(1, reading.total)}"></progress> '
    )
    style = "font-family:monospace;font-variant-numeric:tabular-nums;overflow-x:auto;white-space:nowrap"
    return f'<div style="{style}">{bar}{html.escape(str(reading))}</div>'
