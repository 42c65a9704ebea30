"""Draws the panels of a history with matplotlib: all in one figure, or each as an SVG element of an HTML page."""

import contextlib
import functools
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jdist._src.core.optional_import import optional_import
from jdist._src.training.report.charts import Line, LossTrace, Panel, is_drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# On light and on dark paper. All light colors differ, because `draw_svg` replaces each by a CSS variable. The hues are
# distinguishable with color blindness.
COLORS = {
    "paper": ("#fefefe", "#16191d"),
    "ink": ("#3c434b", "#c6ccd3"),
    "muted": ("#6a727b", "#949da7"),
    "grid": ("#e6e8eb", "#2a3036"),
    "bad": ("#c8102e", "#ff6b7d"),
    "loss": ("#2364aa", "#6fb1f5"),
    "metric-0": ("#0f8265", "#45c4a0"),
    "metric-1": ("#b8551a", "#f0935a"),
    "metric-2": ("#8a4a9e", "#cb93de"),
    "metric-3": ("#8f6f00", "#d9b63c"),
    "metric-4": ("#a33a5e", "#ef88aa"),
}
_INK = {name: light for name, (light, _) in COLORS.items()}
_WIDTH, _HEIGHT, _HEAD = 4.5, 2.6, 0.5  # in inches: a panel, and the height of its title and caption
_LEFT, _TOP, _BOTTOM = 0.58, 0.12, 0.46
_RIGHT, _LABELS = 0.2, 1.0  # the right margin without and with labels beside the lines
_STRIP, _GAP = 0.34, 0.16
_ROUND = (1, 2, 2.5, 5, 10)  # ticks are multiples of these
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "axes.edgecolor": _INK["grid"],
    "axes.unicode_minus": True,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jdist",  # the ids in the SVG are deterministic
    "savefig.dpi": 144,
}


def draw_figure(panels: Sequence[Panel]) -> "Figure":
    """Returns a figure of all panels, two per row. It is not registered with pyplot.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> from jdist._src.training.report.charts import chart_panels
        >>> figure = draw_figure(chart_panels([{"step": 10, "loss": 2.0}], {}))
        >>> figure.axes[0].get_xlabel()
        'step'
    """
    with _style():
        from matplotlib.figure import Figure

        columns = min(2, max(1, len(panels)))
        rows = max(1, math.ceil(len(panels) / columns))
        figure = Figure((columns * _WIDTH, rows * (_HEIGHT + _HEAD)), facecolor=_INK["paper"])
        # Without this, a notebook shows a figure only if pyplot has been imported.
        figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]
        for subfigure, panel in zip(figure.subfigures(rows, columns, squeeze=False).flat, panels, strict=False):
            _draw_title(panel, subfigure)
            _draw_panel(panel, subfigure, _HEAD)
        if not panels:
            figure.text(0.5, 0.5, "Nothing was recorded.", ha="center", va="center", color=_INK["muted"])
    return figure


def draw_svg(panel: Panel, name: str) -> str:
    """Returns a panel without title and caption as an SVG element. Its colors are CSS variables of the page.

    Args:
        panel: The panel.
        name: A prefix of all ids in the element, unique in the page.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> from jdist._src.training.report.charts import chart_panels
        >>> (panel,) = chart_panels([{"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.5}], {})
        >>> draw_svg(panel, "loss")[:4]
        '<svg'
    """
    file = io.StringIO()
    with _style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # the fonts of the browser are used
        from matplotlib.figure import Figure

        figure = Figure((_WIDTH, _HEIGHT))
        _draw_panel(panel, figure, 0)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    text = file.getvalue()
    text = re.sub(r"<!--.*?-->|<style.*?</style>|<defs>\s*</defs>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace("xlink:href", "href")
    for role, (light, _) in COLORS.items():
        text = text.replace(light, f"var(--{role})")
    text = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', text)
    return re.sub(r"\n\s*", "\n", text)


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Applies the style of this module, independent of the user's settings, which it restores."""
    with optional_import("Charts need matplotlib", "jdist[plot]"):
        import matplotlib
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_title(panel: Panel, figure: "Figure | SubFigure") -> None:
    for text, distance, options in (
        (panel.title, 0.27, {"color": _INK["ink"], "weight": "bold", "size": 10.5}),
        (panel.caption, 0.45, {"color": _INK["muted"], "size": 8}),
    ):
        figure.text(0.12 / _WIDTH, 1 - distance / (_HEIGHT + _HEAD), text, parse_math=False, **options)


def _draw_panel(panel: Panel, figure: "Figure | SubFigure", head: float) -> None:
    """Draws the axes of a panel, `head` inches below the top of the figure."""
    strip = (_STRIP + _GAP if panel.lines else _HEIGHT - _TOP - _BOTTOM) if panel.strip else 0
    axes = None
    width, height = _WIDTH - _LEFT - (_LABELS if any(line.label for line in panel.lines) else _RIGHT), _HEIGHT + head
    if panel.lines or panel.trace:
        axes = _add_axes(figure, _BOTTOM + strip, _HEIGHT - _TOP, width, height)
        _set_x_limits(panel, axes)
        _draw_curves(panel, axes)
        axes.tick_params(labelbottom=not strip)
    if panel.strip:
        strip_axes = _add_axes(figure, _BOTTOM, _BOTTOM + strip - (_GAP if axes else 0), width, height)
        _set_x_limits(panel, strip_axes)
        _draw_strip(panel.strip, strip_axes)
    figure.axes[-1].set_xlabel(panel.x_label, color=_INK["muted"], size=8.5)


def _add_axes(figure: "Figure | SubFigure", bottom: float, top: float, width: float, height: float) -> "Axes":
    """Returns new axes between the heights `bottom` and `top` of a panel. All sizes are in inches."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes = figure.add_axes((_LEFT / _WIDTH, bottom / height, width / _WIDTH, (top - bottom) / height))
    axes.set_facecolor("none")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.tick_params(colors=_INK["muted"], length=0, pad=5, labelsize=8.5)
    axes.grid(axis="y", color=_INK["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_ROUND, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(_abbreviated))
    return axes


def _set_x_limits(panel: Panel, axes: "Axes") -> None:
    """Sets the limits to the first and the last position, also of values that are not finite."""
    lines = [*panel.lines, *([panel.strip] if panel.strip else []), *([panel.trace] if panel.trace else [])]
    positions = np.concatenate([line.x for line in lines])
    low, high = positions.min(), positions.max()
    margin = max((high - low) * 0.02, abs(high) * 1e-9, 0.5 if low == high else 0)
    axes.set_xlim(low - margin, high + margin)


def _draw_curves(panel: Panel, axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    if panel.log:
        axes.set_yscale("log")
    if panel.trace:
        _draw_trace(panel.trace, axes)
    for line in panel.lines:
        _draw_line(line, axes, joined=not panel.trace or line.dashed)
    if len(panel.bad):
        bad = panel.bad[:: -(-len(panel.bad) // 200)]
        bottom = axes.get_xaxis_transform()
        options: dict[str, Any] = {"color": _INK["bad"], "markersize": 5, "label": "not finite"}
        axes.plot(bad, np.full(len(bad), 0.03), "x", transform=bottom, **options)
    if panel.zero:
        axes.set_ylim(0, 1.04 * axes.get_ylim()[1] or 1)
    if panel.log:
        low, high = axes.get_ylim()
        subs = (1, 3) if high / low < 2e3 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(_general))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_ROUND))
        plain = ScalarFormatter(useMathText=False)
        plain.set_powerlimits((-4, 5))
        axes.yaxis.set_major_formatter(FuncFormatter(_abbreviated) if panel.zero else plain)
        axes.yaxis.get_offset_text().set(color=_INK["muted"], size=8)
    _label_lines(panel, axes)


def _draw_trace(trace: LossTrace, axes: "Axes") -> None:
    color = _INK["loss"]
    if trace.every == 1:
        marker = "." if len(trace.x) == 1 else ""
        axes.plot(trace.x, trace.mean, marker=marker, color=color, linewidth=0.7, alpha=0.4, label="every step")
    else:
        axes.fill_between(trace.x, trace.low, trace.high, color=color, alpha=0.22, linewidth=0, label="range")
    if len(trace.x) > 10:
        axes.plot(trace.x, trace.smooth, color=color, linewidth=1.7, label="smooth")


def _draw_line(line: Line, axes: "Axes", joined: bool) -> None:
    values = np.where(is_drawable(line.y), line.y, np.nan)
    size = 4.2 if len(line.x) <= 25 else 2.4 if len(line.x) <= 60 else 0
    dashes = (0, (4, 2)) if line.dashed else "-"
    axes.plot(
        line.x,
        values,
        linestyle=dashes if joined else "",
        color=_INK[line.color],
        linewidth=1.5,
        marker="o",
        markersize=size if joined else max(size, 2),
        markerfacecolor=_INK["paper"] if line.dashed else _INK[line.color],
        markeredgewidth=1.1,
        label=f"{line.label} (validation)" if line.dashed else line.label,
        zorder=3,
    )


def _draw_strip(strip: Line, axes: "Axes") -> None:
    """Draws fractions as an area; a single one as a bar."""
    from matplotlib.ticker import FixedLocator, PercentFormatter

    fractions = np.where(is_drawable(strip.y), np.clip(strip.y, 0, 1), np.nan)
    if len(fractions) == 1:
        axes.bar(strip.x, fractions, width=0.2, color=_INK["muted"], alpha=0.5)
    else:
        axes.fill_between(strip.x, 0, fractions, color=_INK["muted"], alpha=0.35, linewidth=0)
        axes.plot(strip.x, fractions, color=_INK["muted"], linewidth=1.2)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_locator(FixedLocator([0, 1]))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.tick_params(labelsize=7.5)


def _label_lines(panel: Panel, axes: "Axes") -> None:
    """Writes a label beside the end of each line; training and validation with the same label have one, beside the first."""
    labelled = {
        (line.label, line.color): line for line in reversed(panel.lines) if line.label and is_drawable(line.y).any()
    }
    ends = [line.y[is_drawable(line.y)][-1] for line in labelled.values()]
    axes.get_ylim()  # computes the limits, which the transforms below need
    heights = [axes.transAxes.inverted().transform(axes.transData.transform((0, end)))[1] for end in ends]
    line_height = 11 / 72 * axes.figure.dpi / axes.bbox.height
    style: dict[str, Any] = {"size": 8.5, "va": "center", "annotation_clip": False, "parse_math": False}
    for line, height in zip(labelled.values(), _spread(heights, line_height), strict=True):
        axes.annotate(
            line.label, (1, height), (5, 0), "axes fraction", "offset points", color=_INK[line.color], **style
        )


def _spread(heights: Sequence[float], distance: float) -> list[float]:
    """Returns heights moved to be at least `distance` from each other, in the same order, the highest at most 1."""
    placed: dict[int, float] = {}
    ceiling = 1.0
    for i in sorted(range(len(heights)), key=lambda i: -heights[i]):
        placed[i] = min(max(heights[i], 0.0), ceiling)
        ceiling = placed[i] - distance
    lowest = min(placed.values(), default=0.0)
    return [placed[i] + max(0.0, -lowest) for i in range(len(heights))]


def _abbreviated(number: float, _: Any = None) -> str:
    """Returns a round number with a unit prefix: `20k`, `3M`."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{number / unit:,.6g}{letter}"
    return f"{number:,.6g}"


def _general(number: float, _: Any = None) -> str:
    return f"{number:g}"
