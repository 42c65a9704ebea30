"""Where progress is shown: a line of a terminal, lines of text, the output of a notebook's cell."""

import dataclasses
import datetime
import html
import importlib
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TextIO, final

_BAR = 12  # letters
_EPOCHS = 50  # lines in a notebook


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
        return "  ".join(self.parts())

    def parts(self) -> list[str]:
        """The facts and the metrics as texts, in order. Epochs count from 0, as in the history."""
        total = "" if self.total is None else f"/{self.total:,}"
        parts = [f"step {self.step:,}{total}", f"epoch {self.epoch}"]
        if not self.metrics:
            parts.append("waiting for the first step, which is compiled")
        if self.rows_a_second is not None:
            parts.append(f"{_number(self.rows_a_second)} rows/s")
        if self.left is not None and self.step != self.total:
            parts.append(f"{_time(self.left)} left")
        else:
            parts.append(_time(self.seconds))
        return [*parts, *self._metrics(), f"input stall {100 * self.stalled:.0f} %"]

    def epoch_parts(self) -> list[str]:
        """What remains of an epoch that has ended."""
        return [f"epoch {self.epoch}", f"step {self.step:,}", _time(self.seconds), *self._metrics()]

    def _metrics(self) -> list[str]:
        return [f"{name} {value:.4g}" for name, value in self.metrics.items()]


def lines_of(parts: Iterable[str], width: int, first: int = 0) -> list[str]:
    """Returns the parts in lines of at most `width` letters; a part is not broken.

    Args:
        parts: The texts.
        width: The number of letters per line.
        first: The number of letters that are taken of the first line.

    Example:
        >>> lines_of(["step 1", "loss 0.5", "val_loss 0.25"], 16)
        ['step 1  loss 0.5', 'val_loss 0.25']
    """
    lines, left = [""], width - first
    for part in parts:
        needed = len(part) + 2 * bool(lines[-1])
        if needed > left and lines[-1]:
            lines.append(part)
            left = width - len(part)
        else:
            lines[-1] += "  " * bool(lines[-1]) + part
            left -= needed
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


class Display(Protocol):
    """Shows one reading after the other, until it is closed.

    Attributes:
        keeps_epochs: Whether a line per epoch remains, see `keep`.
    """

    keeps_epochs: bool

    def show(self, reading: Reading) -> None:
        """Shows what is now."""
        ...

    def keep(self, reading: Reading) -> None:
        """Shows the end of an epoch in a line that remains."""
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

    keeps_epochs = False  # every line remains, and how many there are is up to the pace

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last = ""

    def show(self, reading: Reading) -> None:
        """See `Display`."""
        line = str(reading)
        if line != self._last:  # the end may come with the last step
            print(line, file=self._stream, flush=True)
        self._last = line

    def keep(self, reading: Reading) -> None:
        """See `Display`."""

    def close(self) -> None:
        """See `Display`."""


@final
class Live:
    """A line of a terminal, or several where it is narrow, written anew each time. What is printed meanwhile is above it.

    Args:
        stream: The terminal.
    """

    keeps_epochs = True

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.live import Live

        # Asked for, so shown as in a terminal. Drawn when there is something new, and not by a thread of its own.
        console = Console(file=stream, force_terminal=True, force_jupyter=False)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, reading: Reading) -> None:
        """See `Display`."""
        self._live.update(_bar_and_text(reading, self._live.console.width), refresh=True)

    def keep(self, reading: Reading) -> None:
        """See `Display`."""
        from rich.text import Text

        text = "\n".join(lines_of(reading.epoch_parts(), self._live.console.width))
        self._live.console.print(Text(text), highlight=False)

    def close(self) -> None:
        """See `Display`."""
        self._live.stop()


def _bar_and_text(reading: Reading, width: int) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text  # a plain string would be read as markup

    taken = 0 if reading.total is None else _BAR + 2
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines_of(reading.parts(), width, taken)]
    if reading.total is None:
        return Group(*lines)
    line = Table.grid(padding=(0, 2))
    line.add_row(ProgressBar(total=max(1, reading.total), completed=reading.step, width=_BAR), lines[0])
    return Group(line, *lines[1:])


@final
class Notebook:
    """A bar and a line in the output of a cell, written anew each time, below the lines of the last epochs.

    Args:
        stream: Not used: the notebook has a way of its own.
    """

    keeps_epochs = True

    def __init__(self, stream: TextIO):
        self._ipython: Any = importlib.import_module("IPython.display")
        self._shown = self._ipython.display(self._ipython.HTML(""), display_id=True)
        self._epochs: deque[str] = deque(maxlen=_EPOCHS)

    def show(self, reading: Reading) -> None:
        """See `Display`."""
        if self._shown is not None:  # None outside of IPython's shells, where nothing displays it
            self._shown.update(self._ipython.HTML(page(reading, self._epochs)))

    def keep(self, reading: Reading) -> None:
        """See `Display`."""
        self._epochs.append("  ".join(reading.epoch_parts()))

    def close(self) -> None:
        """See `Display`."""


def page(reading: Reading, epochs: Iterable[str] = ()) -> str:
    """Returns a reading as HTML, below the lines of epochs."""
    bar = (
        "" if reading.total is None else f'<progress value="{reading.step}" max="{max(1, reading.total)}"></progress> '
    )
    style = "font-family:monospace;font-variant-numeric:tabular-nums;overflow-x:auto;white-space:nowrap"
    above = "".join(f"{html.escape(line)}<br>" for line in epochs)
    return f'<div style="{style}">{above}{bar}{html.escape(str(reading))}</div>'
