"""What the pictures of training show, in numbers: which curves belong together, and what of a long run can be drawn."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

FACTS = ("epoch", "step", "seconds", "rows_per_second", "stalled", "learning_rate")  # columns that are no metrics
VALIDATION = "val_"
_DRAWN = 2_000  # points of a curve; on paper, more are one blot
_TOGETHER = 5  # metrics in a panel: as many as there are colours for them
_RANGE = 100  # from where on a scale is logarithmic: largest by smallest
_HUGE = 1e100  # what is beyond is not drawn: the limits of an axis would overflow


@dataclasses.dataclass(frozen=True)
class Line:
    """A column of the epochs.

    Attributes:
        label: What is written beside its end.
        color: The name of its colour.
        x: Where its values stand, `[row]`.
        y: The values, `[row]`; some may be infinite, or not a number.
        dashed: Whether it is of the validation.
    """

    label: str
    color: str
    x: np.ndarray
    y: np.ndarray
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Trace:
    """The loss of every step, or of every so many: then what it was at least, at most, and on average.

    Attributes:
        x: The steps, `[point]`.
        low: The least of each point; NaN where none is finite.
        mean: The average of those that are finite.
        high: The most.
        smooth: The average over the points around each.
        every: How many steps are one point.
        bad: The steps whose loss is not finite.
    """

    x: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    smooth: np.ndarray
    every: int
    bad: np.ndarray


@dataclasses.dataclass(frozen=True)
class Panel:
    """What is drawn over one pair of axes.

    Attributes:
        title: What is shown.
        note: How it is to be read.
        across: What the values stand at: `step`, or what else the rows have.
        lines: The columns.
        trace: The loss of every step, if this is about it.
        strip: Parts of 1, drawn below on axes of their own.
        zero: Whether the scale begins at 0.
    """

    title: str
    note: str
    across: str
    lines: tuple[Line, ...] = ()
    trace: Trace | None = None
    strip: Line | None = None
    zero: bool = False

    @property
    def bad(self) -> np.ndarray:
        """Where a value is not finite."""
        places = [line.x[~finite(line.y)] for line in self.lines]
        return np.unique(np.concatenate([*places, self.trace.bad if self.trace else []]))

    @property
    def log(self) -> bool:
        """Whether the scale is logarithmic: the values are positive, and of different orders."""
        known = self._known()
        return bool(not self.zero and known.size and known.min() > 1 / _HUGE and known.max() / _RANGE > known.min())

    @property
    def reading(self) -> str:
        """The note, what its scale is, and how many values are missing from it."""
        bad = f"{len(self.bad):,} not finite (×)" if len(self.bad) else ""
        return "; ".join(filter(None, (self.note, "log scale" if self.log else "", bad)))

    def _known(self) -> np.ndarray:
        parts = [line.y for line in self.lines] + ([self.trace.low, self.trace.high] if self.trace else [])
        values = np.concatenate([[], *parts])
        return values[finite(values)]


def panels(rows: Sequence[Mapping[str, Any]], losses: Mapping[int, Any]) -> list[Panel]:
    """The panels of a history: loss, metrics, learning rate and throughput, each if something is known of it.

    Metrics between 0 and 1 share panels; any other has one to itself, as its scale is its own.

    Example:
        >>> rows = [{"step": 10, "loss": 2.0, "val_loss": 2.1, "accuracy": 0.5, "perplexity": 7.4}]
        >>> [(panel.title, len(panel.lines)) for panel in panels(rows, {})]
        [('Loss', 2), ('Accuracy', 1), ('Perplexity', 1)]
    """
    across, places = _places(rows)
    columns = _columns(rows, places)
    rate, rows_per_second, stalled = map(columns.get, ("learning_rate", "rows_per_second", "stalled"))
    found = [_loss(across, columns, losses), *_metrics(across, columns)]
    if rate:
        found.append(Panel("Learning rate", "", across, (Line("", "ink", *rate),)))
    if rows_per_second or stalled:
        lines = (Line("", "ink", *rows_per_second),) if rows_per_second else ()
        strip = Line("", "ink", *stalled) if stalled else None
        note = "below: steps that waited for their batch" if stalled else ""
        found.append(Panel("Rows a second", note, across, lines, strip=strip, zero=True))
    return [panel for panel in found if panel.lines or panel.trace or panel.strip]


def metrics_of(columns: Iterable[str]) -> list[str]:
    """The names of the loss and the metrics, those of the validation without what marks them; the loss first.

    Example:
        >>> metrics_of(["epoch", "accuracy", "loss", "val_loss", "val_recall"])
        ['loss', 'accuracy', 'recall']
    """
    names = dict.fromkeys(name.removeprefix(VALIDATION) for name in columns if name not in FACTS)
    return sorted(names, key=lambda name: name != "loss")


def shown(name: str, most: int = 60) -> str:
    r"""A name that anyone may have chosen, as it can be drawn: on one line, with nothing that does not print, and not too long.

    Example:
        >>> shown("top\n5"), shown("a_very_long_name", most=8)
        ('top\\n5', 'a_very_…')
    """
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)
    return text if len(text) <= most else text[: most - 1] + "…"


def finite(values: np.ndarray) -> np.ndarray:
    """Which of the values can be drawn.

    Example:
        >>> finite(np.array([1.0, np.nan, -np.inf])).tolist()
        [True, False, False]
    """
    return np.abs(values) < _HUGE  # not of NaN either


def number(value: Any) -> float:
    """A value as a number; NaN if it is none.

    Example:
        >>> number(np.float32(0.5)), number(None)
        (0.5, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _places(rows: Sequence[Mapping[str, Any]]) -> tuple[str, np.ndarray]:
    """Where the rows stand: at their steps, if they have them; else at their epochs, or their numbers."""
    for name in ("step", "epoch"):
        places = np.array([number(row.get(name)) for row in rows])
        if finite(places).all():
            return name, places
    return "row", np.arange(1.0, len(rows) + 1)


def _columns(rows: Sequence[Mapping[str, Any]], places: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each column as places and values, over the rows that have it."""
    pairs: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for place, row in zip(places, rows, strict=True):
        for name, value in row.items():
            pairs[name].append((place, number(value)))
    return {name: (np.array(found)[:, 0], np.array(found)[:, 1]) for name, found in pairs.items()}


def _twins(name: str) -> tuple[str, ...]:
    """The columns of a metric: its own, and that of the validation."""
    return (VALIDATION + name,) if name.startswith(VALIDATION) else (name, VALIDATION + name)


def _both(name: str, label: str, color: str, columns: Mapping[str, Any]) -> list[Line]:
    """The line of a metric, and that of the validation."""
    found = ((columns[of], of != name) for of in _twins(name) if of in columns)
    return [Line(label, color, x, y, dashed) for (x, y), dashed in found]


def _loss(across: str, columns: Mapping[str, Any], losses: Mapping[int, Any]) -> Panel:
    trace = _trace(losses) if losses else None
    lines = _both("loss", "", "loss", columns)
    lines = [dataclasses.replace(line, label="validation" if line.dashed else "training") for line in lines]
    notes = []
    if trace:
        notes.append("every step" if trace.every == 1 else f"least to most of every {trace.every:,} steps")
    if lines:
        notes.append("points: averages of the epochs")
    return Panel("Loss", ", ".join(notes), across if lines else "step", tuple(lines), trace)


def _metrics(across: str, columns: Mapping[str, Any]) -> list[Panel]:
    alone, together = [], []
    for name in (name for name in metrics_of(columns) if name != "loss"):
        values = np.concatenate([line.y for line in _both(name, "", "", columns)])
        known = values[finite(values)]
        (together if known.size and 0 <= known.min() <= known.max() <= 1 else alone).append(name)
    groups = [together[i : i + _TOGETHER] for i in range(0, len(together), _TOGETHER)]
    groups += [[name] for name in alone]
    return [_group(across, names, columns) for names in groups]


def _group(across: str, names: Sequence[str], columns: Mapping[str, Any]) -> Panel:
    lines = [
        line
        for i, name in enumerate(names)
        for line in _both(name, shown(name, 14), f"metric-{i % _TOGETHER}", columns)
    ]
    if len(names) == 1:
        lines = [dataclasses.replace(line, label="validation" if line.dashed else "training") for line in lines]
    note = "dashed: validation" if len(names) > 1 and any(line.dashed for line in lines) else ""
    title = "Metrics" if len(names) > 1 else shown(names[0][:1].upper() + names[0][1:], 32).replace("_", " ")
    return Panel(title, note, across, tuple(lines))


def _trace(losses: Mapping[int, Any]) -> Trace:
    steps = np.array([number(step) for step in losses])
    if not finite(steps).all():
        steps = np.arange(1.0, len(losses) + 1)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], np.array([number(value) for value in losses.values()])[order]
    bad = steps[~finite(values)]
    every = -(-len(values) // _DRAWN)
    starts = np.arange(0, len(values), every)
    known, zeros = finite(values), np.where(finite(values), values, 0)
    counts = np.add.reduceat(known, starts, dtype=float)
    some = counts > 0
    low = np.minimum.reduceat(np.where(known, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
    sums = np.add.reduceat(zeros, starts)
    mean = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=some)
    place = np.add.reduceat(steps, starts) / np.diff(np.append(starts, len(values)))
    low, high = np.where(some, low, np.nan), np.where(some, high, np.nan)
    return Trace(place, low, mean, high, _smooth(sums, counts), every, bad)


def _smooth(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The average around each point, near ones counting most. NaN where nothing is finite."""
    around = max(1, len(sums) // 40)
    weights = np.hanning(2 * around + 3)[1:-1]
    total, count = (np.convolve(part, weights)[around : around + len(sums)] for part in (sums, counts))
    return np.divide(total, count, out=np.full(len(sums), np.nan), where=count > 0)
