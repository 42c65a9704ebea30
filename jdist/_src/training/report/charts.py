"""The data of the charts of a training run: which curves share a panel, and how a long loss curve is reduced."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Columns of a history that are not metrics.
FACTS = (
    "epoch",
    "step",
    "seconds",
    "examples_per_second",
    "stalled_fraction",
    "skipped_steps",
    "dropped_examples",
    "learning_rate",
)
VALIDATION_PREFIX = "val_"
_MAX_POINTS = 2_000  # per loss curve; more cannot be distinguished in print
_METRICS_PER_PANEL = 5  # the number of metric colors
_LOG_RANGE = 100  # the ratio of largest to smallest value from which a scale is logarithmic
_MAX_DRAWN = 1e100  # larger values are not drawn: the limits of an axis would overflow


@dataclasses.dataclass(frozen=True)
class Line:
    """A column of the history as a curve.

    Attributes:
        label: The text beside its end.
        color: The name of its color.
        x: The positions of its values, `[row]`.
        y: The values, `[row]`; some may be infinite or NaN.
        dashed: Whether it is a validation curve.
    """

    label: str
    color: str
    x: np.ndarray
    y: np.ndarray
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class LossTrace:
    """The loss of every step, or the minimum, mean and maximum of groups of consecutive steps.

    Attributes:
        x: The steps, `[point]`.
        low: The minimum of each group; NaN where no loss is finite.
        mean: The mean of the finite losses of each group.
        high: The maximum.
        smooth: A moving average.
        every: The number of steps per group.
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
    """The contents of one chart.

    Attributes:
        title: The title.
        note: An explanation below the title.
        x_label: The label of the x axis: `step`, or another column that gives the positions.
        lines: The curves.
        trace: The losses of the steps, in the panel of the loss.
        strip: Values from 0 to 1, drawn below on separate axes.
        zero: Whether the y axis starts at 0.
    """

    title: str
    note: str
    x_label: str
    lines: tuple[Line, ...] = ()
    trace: LossTrace | None = None
    strip: Line | None = None
    zero: bool = False

    @property
    def bad(self) -> np.ndarray:
        """The positions of values that are not finite."""
        positions = [line.x[~is_drawable(line.y)] for line in self.lines]
        return np.unique(np.concatenate([*positions, self.trace.bad if self.trace else []]))

    @property
    def log(self) -> bool:
        """Whether the y axis is logarithmic: the values are positive and their ratio is large."""
        values = self._drawable_values()
        if self.zero or not values.size:
            return False
        return bool(values.min() > 1 / _MAX_DRAWN and values.max() / _LOG_RANGE > values.min())

    @property
    def caption(self) -> str:
        """The note, the kind of scale, and the number of values that are not drawn."""
        bad = f"{len(self.bad):,} not finite (×)" if len(self.bad) else ""
        return "; ".join(filter(None, (self.note, "log scale" if self.log else "", bad)))

    def _drawable_values(self) -> np.ndarray:
        parts = [line.y for line in self.lines] + ([self.trace.low, self.trace.high] if self.trace else [])
        values = np.concatenate([[], *parts])
        return values[is_drawable(values)]


def chart_panels(rows: Sequence[Mapping[str, Any]], losses: Mapping[int, Any]) -> list[Panel]:
    """Returns the panels of a history: loss, metrics, learning rate and throughput, if they were recorded.

    Metrics between 0 and 1 share panels; every other metric has a separate panel with its scale.

    Example:
        >>> rows = [{"step": 10, "loss": 2.0, "val_loss": 2.1, "accuracy": 0.5, "perplexity": 7.4}]
        >>> [(panel.title, len(panel.lines)) for panel in chart_panels(rows, {})]
        [('Loss', 2), ('Accuracy', 1), ('Perplexity', 1)]
    """
    x_label, positions = _positions(rows)
    columns = _columns(rows, positions)
    rate, throughput, stalled = map(columns.get, ("learning_rate", "examples_per_second", "stalled_fraction"))
    panels = [_loss_panel(x_label, columns, losses), *_metric_panels(x_label, columns)]
    if rate:
        panels.append(Panel("Learning rate", "", x_label, (Line("", "ink", *rate),)))
    if throughput or stalled:
        lines = (Line("", "ink", *throughput),) if throughput else ()
        strip = Line("", "ink", *stalled) if stalled else None
        note = "below: steps that waited for their batch" if stalled else ""
        panels.append(Panel("Examples per second", note, x_label, lines, strip=strip, zero=True))
    return [panel for panel in panels if panel.lines or panel.trace or panel.strip]


def metric_columns(columns: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the columns of the loss and of each metric, with the names of their data; the loss first, and training first.

    The data of `val_loss` are "validation", and those of `val_easy_loss` are the validation set "easy".

    Example:
        >>> metric_columns(["epoch", "recall", "loss", "val_loss", "val_easy_recall"])
        {'loss': {'loss': 'training', 'val_loss': 'validation'}, 'recall': {'recall': 'training', 'val_easy_recall': 'easy'}}
    """
    names = [name for name in dict.fromkeys(columns) if name not in FACTS]
    training = [name for name in names if not name.startswith(VALIDATION_PREFIX)]
    found: dict[str, dict[str, str]] = {name: {name: "training"} for name in training}
    for column in names:
        if not column.startswith(VALIDATION_PREFIX):
            continue
        name, data = column.removeprefix(VALIDATION_PREFIX), "validation"
        if name not in training:
            suffixes = [metric for metric in training if name.endswith(f"_{metric}")]
            if suffixes:
                metric = max(suffixes, key=len)
                name, data = metric, name.removesuffix(f"_{metric}")
        found.setdefault(name, {})[column] = data
    return {name: found[name] for name in sorted(found, key=lambda name: name != "loss")}


def printable(text: str, max_length: int = 60) -> str:
    r"""Returns `text` on one line, with unprintable characters escaped, shortened to `max_length`.

    Example:
        >>> printable("top\n5"), printable("a_very_long_name", max_length=8)
        ('top\\n5', 'a_very_…')
    """
    escaped = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return escaped if len(escaped) <= max_length else escaped[: max_length - 1] + "…"


def is_drawable(values: np.ndarray) -> np.ndarray:
    """Returns which of the values are finite and small enough to draw.

    Example:
        >>> is_drawable(np.array([1.0, np.nan, -np.inf])).tolist()
        [True, False, False]
    """
    return np.abs(values) < _MAX_DRAWN  # False for NaN


def to_float(value: Any) -> float:
    """Returns `value` as a float; NaN if it cannot be converted.

    Example:
        >>> to_float(np.float32(0.5)), to_float(None)
        (0.5, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _positions(rows: Sequence[Mapping[str, Any]]) -> tuple[str, np.ndarray]:
    """Returns the x label and the x positions of the rows: their steps, or else their epochs, or else their numbers."""
    for name in ("step", "epoch"):
        positions = np.array([to_float(row.get(name)) for row in rows])
        if is_drawable(positions).all():
            return name, positions
    return "row", np.arange(1.0, len(rows) + 1)


def _columns(rows: Sequence[Mapping[str, Any]], positions: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the positions and the values of each column, over the rows that have it."""
    pairs: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for position, row in zip(positions, rows, strict=True):
        for name, value in row.items():
            pairs[name].append((position, to_float(value)))
    return {name: (np.array(column)[:, 0], np.array(column)[:, 1]) for name, column in pairs.items()}


def _curves(
    data_names: Mapping[str, str], color: str, columns: Mapping[str, Any], label: str | None = None
) -> list[Line]:
    """Returns the curves of a metric on its data.

    Args:
        data_names: The names of the data by the columns of the metric.
        color: The color.
        columns: The positions and values of all columns.
        label: The name of the metric, in a panel with several; otherwise the names of the data are the labels.
    """
    lines = []
    for column, data in data_names.items():
        is_unnamed = data in ("training", "validation")
        text = printable(data, 14) if label is None else label if is_unnamed else printable(f"{label} {data}", 14)
        lines.append(Line(text, color, *columns[column], dashed=column.startswith(VALIDATION_PREFIX)))
    return lines


def _loss_panel(x_label: str, columns: Mapping[str, Any], losses: Mapping[int, Any]) -> Panel:
    trace = _loss_trace(losses) if losses else None
    lines = _curves(metric_columns(columns).get("loss", {}), "loss", columns)
    notes = []
    if trace:
        notes.append("every step" if trace.every == 1 else f"range over every {trace.every:,} steps")
    if lines:
        notes.append("points: averages since the previous point")
    return Panel("Loss", ", ".join(notes), x_label if lines else "step", tuple(lines), trace)


def _metric_panels(x_label: str, columns: Mapping[str, Any]) -> list[Panel]:
    separate, shared = [], []
    metrics = metric_columns(columns)
    for name in metrics:
        if name == "loss":
            continue
        values = np.concatenate([columns[column][1] for column in metrics[name]])
        drawable = values[is_drawable(values)]
        (shared if drawable.size and 0 <= drawable.min() <= drawable.max() <= 1 else separate).append(name)
    groups = [shared[i : i + _METRICS_PER_PANEL] for i in range(0, len(shared), _METRICS_PER_PANEL)]
    groups += [[name] for name in separate]
    return [_metric_panel(x_label, {name: metrics[name] for name in names}, columns) for names in groups]


def _metric_panel(x_label: str, metrics: Mapping[str, Mapping[str, str]], columns: Mapping[str, Any]) -> Panel:
    has_several, first_name = len(metrics) > 1, next(iter(metrics))
    lines = [
        line
        for i, (name, data_names) in enumerate(metrics.items())
        for line in _curves(
            data_names, f"metric-{i % _METRICS_PER_PANEL}", columns, printable(name, 14) if has_several else None
        )
    ]
    note = "dashed: validation" if has_several and any(line.dashed for line in lines) else ""
    title = "Metrics" if has_several else printable(first_name[:1].upper() + first_name[1:], 32).replace("_", " ")
    return Panel(title, note, x_label, tuple(lines))


def _loss_trace(losses: Mapping[int, Any]) -> LossTrace:
    steps = np.array([to_float(step) for step in losses])
    if not is_drawable(steps).all():
        steps = np.arange(1.0, len(losses) + 1)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], np.array([to_float(value) for value in losses.values()])[order]
    drawable = is_drawable(values)
    every = -(-len(values) // _MAX_POINTS)
    starts = np.arange(0, len(values), every)
    counts = np.add.reduceat(drawable, starts, dtype=float)
    sums = np.add.reduceat(np.where(drawable, values, 0), starts)
    low = np.minimum.reduceat(np.where(drawable, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(drawable, values, -np.inf), starts)
    mean = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    low, high = np.where(counts > 0, low, np.nan), np.where(counts > 0, high, np.nan)
    x = np.add.reduceat(steps, starts) / np.diff(np.append(starts, len(values)))
    return LossTrace(x, low, mean, high, _moving_average(sums, counts), every, steps[~drawable])


def _moving_average(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns an average around each point with a Hann window; NaN where no value is finite."""
    radius = max(1, len(sums) // 40)
    window = np.hanning(2 * radius + 3)[1:-1]
    total, count = (np.convolve(part, window)[radius : radius + len(sums)] for part in (sums, counts))
    return np.divide(total, count, out=np.full(len(sums), np.nan), where=count > 0)
