"""The charts of a training run, drawn with matplotlib: one figure, which `History.plot` returns and the report contains."""

import collections
import contextlib
import dataclasses
import functools
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jdist._src.core.html_page import COLORS
from jdist._src.core.optional_import import optional_import
from jdist._src.core.rendering import printable
from jdist._src.training.history_columns import NON_METRIC_COLUMNS, NORMS, VALIDATION_PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = {name: light for name, (light, _) in COLORS.items()}
_METRICS_PER_PANEL = 5  # the number of metric colors
_MAX_POINTS = 200  # of the loss of the steps; a longer run is drawn as a range
_LOG_RANGE = 100  # the ratio of largest to smallest value from which a scale is logarithmic
_ROUND = (1, 2, 2.5, 5, 10)  # ticks are multiples of these
_MAX_DRAWN = 1e100  # larger values are not drawn: the limits of an axis would overflow


@dataclasses.dataclass(frozen=True)
class Curve:
    """A column of the history, or the loss of the steps.

    Attributes:
        label: The text in the legend; empty for no entry.
        color: The name of its color.
        x: The positions of its values, `[point]`.
        y: The values, `[point]`; some may be infinite or NaN. Of the loss of the steps, the mean of the finite losses of each
            group of consecutive steps.
        dashed: Whether it is a validation curve.
        low: The smallest loss of each group of steps; None for a column.
        high: The largest loss of each group of steps; None for a column.
    """

    label: str
    color: str
    x: np.ndarray
    y: np.ndarray
    dashed: bool = False
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Panel:
    """The contents of one chart.

    Attributes:
        title: The title.
        x_label: The label of the x axis: `step`, or another column that gives the positions.
        curves: The curves.
        bad: The positions of values that are not finite.
        zero: Whether the y axis contains 0.
    """

    title: str
    x_label: str
    curves: Sequence[Curve]
    bad: np.ndarray
    zero: bool = False

    @property
    def log(self) -> bool:
        """Whether the y axis is logarithmic: the values are positive and their ratio is large."""
        parts = [part for curve in self.curves for part in (curve.y, curve.low, curve.high) if part is not None]
        values = np.concatenate(parts)
        values = values[is_drawable(values)]
        if self.zero or not values.size:
            return False
        return bool(values.min() > 1 / _MAX_DRAWN and values.max() / _LOG_RANGE > values.min())

    @property
    def caption(self) -> str:
        """The kind of scale, and the number of values that are not drawn."""
        bad = f"{len(self.bad):,} not finite (×)" if len(self.bad) else ""
        return "; ".join(filter(None, ("log scale" if self.log else "", bad)))


def chart_panels(rows: Sequence[Mapping[str, Any]], losses: Mapping[int, Any]) -> list[Panel]:
    """Returns the panels of a history: loss, metrics, norms, learning rate, throughput and input stall, if they were recorded.

    Metrics between 0 and 1 share panels; every other metric has a separate panel with its scale.

    Example:
        >>> rows = [
        ...     {"step": 10, "loss": 2.0, "val_loss": 2.1, "accuracy": 0.5, "perplexity": 7.4}
        ... ]
        >>> [(panel.title, len(panel.curves)) for panel in chart_panels(rows, {})]
        [('Loss', 2), ('Accuracy', 1), ('Perplexity', 1)]
    """
    x_label, columns = _columns(rows)
    metrics = metric_columns(columns)
    curves = _curves({"loss": metrics.pop("loss", {})}, columns, ["loss"])
    norms = {name: metrics.pop(name) for name in NORMS if name in metrics}
    step_curves, bad_steps = _loss_of_steps(losses)
    panels = [_panel("Loss", x_label if curves else "step", [*step_curves, *curves], bad_steps)]
    shared, separate = [], []
    for name, data_names in metrics.items():
        values = np.concatenate([columns[column][1] for column in data_names])
        drawable = values[is_drawable(values)]
        (shared if drawable.size and 0 <= drawable.min() <= drawable.max() <= 1 else separate).append(name)
    groups = [shared[i : i + _METRICS_PER_PANEL] for i in range(0, len(shared), _METRICS_PER_PANEL)]
    for names in [*groups, *([name] for name in separate)]:
        first = printable(names[0][:1].upper() + names[0][1:], 32).replace("_", " ")
        colors = [f"metric-{i}" for i in range(len(names))]
        curves = _curves({name: metrics[name] for name in names}, columns, colors)
        panels.append(_panel("Metrics" if len(names) > 1 else first, x_label, curves))
    colors = [f"metric-{i}" for i in range(len(norms))]
    panels.append(_panel("Norms", x_label, _curves(norms, columns, colors)))
    for title, column, zero in (
        ("Learning rate", "learning_rate", False),
        ("Examples per second", "examples_per_second", True),
        ("Tokens per second", "tokens_per_second", True),
        ("Model flops utilization", "mfu", True),
        ("Steps that waited for input", "stalled_fraction", True),
    ):
        if column in columns:
            panels.append(_panel(title, x_label, [Curve("", "ink", *columns[column])], zero=zero))
    return [panel for panel in panels if panel.curves]


def metric_columns(columns: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the columns of the loss and of each metric, with the names of their data; the loss first, and training first.

    The data of `val_loss` are "validation", and the data of `val_easy_loss` are the validation set "easy".

    Example:
        >>> metric_columns(["epoch", "recall", "loss", "val_loss", "val_easy_recall"])
        {'loss': {'loss': 'training', 'val_loss': 'validation'},
         'recall': {'recall': 'training', 'val_easy_recall': 'easy'}}
    """
    names = [name for name in dict.fromkeys(columns) if name not in NON_METRIC_COLUMNS]
    training = [name for name in names if not name.startswith(VALIDATION_PREFIX)]
    columns_of: dict[str, dict[str, str]] = {name: {name: "training"} for name in training}
    for column in names:
        if not column.startswith(VALIDATION_PREFIX):
            continue
        name, data = column.removeprefix(VALIDATION_PREFIX), "validation"
        if name not in training:
            suffixes = [metric for metric in training if name.endswith(f"_{metric}")]
            if suffixes:
                metric = max(suffixes, key=len)
                name, data = metric, name.removesuffix(f"_{metric}")
        columns_of.setdefault(name, {})[column] = data
    return {name: columns_of[name] for name in sorted(columns_of, key=lambda name: name != "loss")}


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


def draw_figure(panels: Sequence[Panel]) -> "Figure":
    """Returns a figure of all panels, two per row. It is not registered with pyplot.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> figure = draw_figure(chart_panels([{"step": 10, "loss": 2.0}], {}))
        >>> figure.axes[0].get_xlabel()
        'step'
    """
    with _style():
        from matplotlib.figure import Figure

        columns = min(2, max(1, len(panels)))
        rows = max(1, math.ceil(len(panels) / columns))
        figure = Figure((4.5 * columns, 3.1 * rows), facecolor=_INK["paper"], layout="constrained")
        # Without this, a notebook shows a figure only if pyplot has been imported.
        figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]
        for i, panel in enumerate(panels, start=1):
            _draw_panel(panel, figure.add_subplot(rows, columns, i))
        if not panels:
            figure.text(0.5, 0.5, "Nothing was recorded.", ha="center", va="center", color=_INK["muted"])
    return figure


def figure_as_svg(figure: "Figure") -> str:
    """Returns a figure as an SVG element of a page. Its colors are CSS variables of the page.

    Example:
        >>> figure_as_svg(draw_figure(chart_panels([{"step": 10, "loss": 2.0}], {})))[:4]
        '<svg'
    """
    file = io.StringIO()
    with _style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # the fonts of the browser are used
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    text = file.getvalue()
    text = re.sub(r"<!--.*?-->|<style.*?</style>|<defs>\s*</defs>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    for role, (light, _) in COLORS.items():
        text = text.replace(light, f"var(--{role})")
    text = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', text)
    return re.sub(r"\n\s*", "\n", text)


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Returns the x label, and the positions and the values of each column, over the rows that have it.

    The positions are the steps of the rows, or else their epochs, or else their numbers.
    """
    for x_label in ("step", "epoch", "row"):
        numbers = [number if x_label == "row" else row.get(x_label) for number, row in enumerate(rows, start=1)]
        positions = np.array([to_float(number) for number in numbers])
        if is_drawable(positions).all():
            break
    points: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for position, row in zip(positions, rows, strict=True):
        for name, value in row.items():
            points[name].append((position, to_float(value)))
    return x_label, {name: tuple(np.transpose(column)) for name, column in points.items()}


def _curves(metrics: Mapping[str, Mapping[str, str]], columns: Mapping[str, Any], colors: Sequence[str]) -> list[Curve]:
    """Returns the curves of metrics, each on its data. The labels name the metrics if there are several."""
    curves = []
    for (name, data_names), color in zip(metrics.items(), colors, strict=True):
        for column, data in data_names.items():
            label = data if len(metrics) == 1 else name if data == "training" else f"{name} {data}"
            x, y = columns[column]
            curves.append(Curve(printable(label, 24), color, x, y, dashed=column.startswith(VALIDATION_PREFIX)))
    return curves


def _panel(title: str, x_label: str, curves: Sequence[Curve], bad_steps: Any = (), zero: bool = False) -> Panel:
    bad = [curve.x[~is_drawable(curve.y)] for curve in curves if curve.low is None]
    return Panel(title, x_label, curves, np.unique(np.concatenate([np.array([]), *bad, bad_steps])), zero)


def _loss_of_steps(losses: Mapping[int, Any]) -> tuple[list[Curve], np.ndarray]:
    """Returns the curve of the loss of the steps, if there are any, and the steps whose loss is not finite."""
    if not losses:
        return [], np.array([])
    steps = np.array([to_float(step) for step in losses])
    if not is_drawable(steps).all():
        steps = np.arange(1.0, len(losses) + 1)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], np.array([to_float(value) for value in losses.values()])[order]
    bad = ~is_drawable(values)
    every = -(-len(values) // _MAX_POINTS)
    padding = (0, -len(values) % every)
    masked = np.ma.masked_array(np.pad(values, padding), np.pad(bad, padding, constant_values=True)).reshape(-1, every)
    x = np.pad(steps, padding, mode="edge").reshape(-1, every).mean(axis=1)
    mean, low, high = (np.ma.filled(x, np.nan) for x in (masked.mean(1), masked.min(1), masked.max(1)))
    label = "every step" if every == 1 else f"range of {every:,} steps"
    return [Curve(label, "loss", x, mean, low=low, high=high)], steps[bad]


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Applies the style of this module, independent of the user's settings, which it restores."""
    with optional_import("Charts need matplotlib", "jdist[plot]"):
        import matplotlib
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["font.size"] = 9
        matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
        matplotlib.rcParams["svg.hashsalt"] = "jdist"  # the ids in the SVG are deterministic
        yield


def _png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=144)
    return file.getvalue()


def _draw_panel(panel: Panel, axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title, loc="left", color=_INK["ink"], weight="bold", parse_math=False)
    label = "\n".join(filter(None, (panel.x_label, panel.caption)))
    axes.set_xlabel(label, color=_INK["muted"], size=8, parse_math=False)
    axes.set_facecolor("none")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK["grid"])
    axes.tick_params(colors=_INK["muted"], length=0, pad=5)
    axes.grid(axis="y", color=_INK["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_ROUND))
    if panel.log:
        axes.set_yscale("log")
        axes.minorticks_off()
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_ROUND))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.10g}")
    if panel.zero:
        axes.update_datalim([(panel.curves[0].x[0], 0)])
    lines = [_draw_curve(curve, axes) for curve in panel.curves]
    if len(panel.bad):
        bad = panel.bad[:: -(-len(panel.bad) // 200)]
        transform = axes.get_xaxis_transform()
        axes.plot(bad, np.full(len(bad), 0.03), "x", transform=transform, color=_INK["bad"], label="not finite")
    labels = [curve.label for curve in panel.curves]
    if any(labels):
        legend = axes.legend(lines, "·" * len(lines), frameon=False, fontsize=8, labelcolor=_INK["ink"])
        for text, label in zip(legend.get_texts(), labels, strict=True):  # the legend omits a label that begins with _
            text.set(text=label, parse_math=False)


def _draw_curve(curve: Curve, axes: "Axes") -> Any:
    """Draws a curve, and returns its line."""
    color, values = _INK[curve.color], np.where(is_drawable(curve.y), curve.y, np.nan)
    if curve.low is not None and curve.high is not None:
        axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.22, linewidth=0)
        marker = "." if len(curve.x) == 1 else ""
        return axes.plot(curve.x, values, marker=marker, color=color, linewidth=0.8, alpha=0.5, label=curve.label)[0]
    (line,) = axes.plot(
        curve.x,
        values,
        linestyle=(0, (4, 2)) if curve.dashed else "-",
        color=color,
        linewidth=1.5,
        marker="o" if len(curve.x) <= 60 else "",
        markersize=4,
        markerfacecolor=_INK["paper"] if curve.dashed else color,
        label=curve.label,
        zorder=3,
    )
    return line
