"""Draws the panels of a history with matplotlib, as one figure or as a picture each for a page."""

import contextlib
import functools
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jdist._src.training.report.charts import Line, Panel, Trace, finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# On light, and on dark. All differ: that is how a page knows them again. The hues can be told apart by the colour-blind.
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
_WIDTH, _HEIGHT, _HEAD = 4.5, 2.6, 0.5  # inches: of a panel, and of what is written above it
_LEFT, _TOP, _BOTTOM = 0.58, 0.12, 0.46
_RIGHT, _LABELS = 0.2, 1.0  # without labels beside the lines, and with them
_STRIP, _GAP = 0.34, 0.16
_ROUND = (1, 2, 2.5, 5, 10)  # what ticks are multiples of
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "axes.edgecolor": _INK["grid"],
    "axes.unicode_minus": True,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "jdist",  # the same picture is the same text
    "savefig.dpi": 144,
}


def figure(panels: Sequence[Panel]) -> "Figure":
    """All panels in one figure, two beside each other. It is nobody's current figure: pyplot does not know of it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> from jdist._src.training.report.charts import panels
        >>> drawn = figure(panels([{"step": 10, "loss": 2.0}], {}))
        >>> drawn.axes[0].get_xlabel()
        'step'
    """
    with _style():
        from matplotlib.figure import Figure

        across = min(2, max(1, len(panels)))
        down = max(1, math.ceil(len(panels) / across))
        drawn = Figure((across * _WIDTH, down * (_HEIGHT + _HEAD)), facecolor=_INK["paper"])
        # A notebook shows a figure by itself only if pyplot has been imported.
        drawn._repr_png_ = functools.partial(_png, drawn)  # type: ignore[attr-defined]
        parts = drawn.subfigures(down, across, squeeze=False).flat
        for part, panel in zip(parts, panels, strict=False):
            _head(panel, part)
            _draw(panel, part, _HEAD)
        if not panels:
            drawn.text(0.5, 0.5, "Nothing was recorded.", ha="center", va="center", color=_INK["muted"])
    return drawn


def svg(panel: Panel, name: str) -> str:
    """A panel, without what is written above it, as an SVG element within a page. Its colours are variables of the page.

    Args:
        panel: What to draw.
        name: What the ids in it begin with, so that they are of no other picture in the page.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> from jdist._src.training.report.charts import panels
        >>> (panel,) = panels([{"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.5}], {})
        >>> svg(panel, "loss")[:4]
        '<svg'
    """
    file = io.StringIO()
    with _style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # the reader's browser has other fonts
        from matplotlib.figure import Figure

        drawn = Figure((_WIDTH, _HEIGHT))
        _draw(panel, drawn, 0)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawn.savefig(file, format="svg", transparent=True, metadata=nothing)
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
    """Within, matplotlib draws as is meant here, whatever the user has set; afterwards all is as it was."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ModuleNotFoundError(
            'Pictures are drawn with matplotlib, which is not installed: python -m pip install "jdist[plot]"',
            name="matplotlib",
        ) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _png(drawn: "Figure") -> bytes:
    file = io.BytesIO()
    drawn.savefig(file, format="png")
    return file.getvalue()


def _head(panel: Panel, where: "Figure | SubFigure") -> None:
    for text, below, options in (
        (panel.title, 0.27, {"color": _INK["ink"], "weight": "bold", "size": 10.5}),
        (panel.reading, 0.45, {"color": _INK["muted"], "size": 8}),
    ):
        where.text(0.12 / _WIDTH, 1 - below / (_HEIGHT + _HEAD), text, parse_math=False, **options)


def _draw(panel: Panel, where: "Figure | SubFigure", head: float) -> None:
    """The axes of a panel, below `head` inches."""
    strip = (_STRIP + _GAP if panel.lines else _HEIGHT - _TOP - _BOTTOM) if panel.strip else 0
    axes = None
    width, height = _WIDTH - _LEFT - (_LABELS if any(line.label for line in panel.lines) else _RIGHT), _HEIGHT + head
    if panel.lines or panel.trace:
        axes = _axes(where, _BOTTOM + strip, _HEIGHT - _TOP, width, height)
        _limit_across(panel, axes)
        _fill(panel, axes)
        axes.tick_params(labelbottom=not strip)
    if panel.strip:
        below = _axes(where, _BOTTOM, _BOTTOM + strip - (_GAP if axes else 0), width, height)
        _limit_across(panel, below)
        _fill_strip(panel.strip, below)
    where.axes[-1].set_xlabel(panel.across, color=_INK["muted"], size=8.5)


def _axes(where: "Figure | SubFigure", bottom: float, top: float, width: float, height: float) -> "Axes":
    """Axes between two heights, on a panel that is `height` high: all in inches."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes = where.add_axes((_LEFT / _WIDTH, bottom / height, width / _WIDTH, (top - bottom) / height))
    axes.set_facecolor("none")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.tick_params(colors=_INK["muted"], length=0, pad=5, labelsize=8.5)
    axes.grid(axis="y", color=_INK["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_ROUND, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    return axes


def _limit_across(panel: Panel, axes: "Axes") -> None:
    """From the first to the last place, even if nothing there is finite."""
    lines = [*panel.lines, *([panel.strip] if panel.strip else []), *([panel.trace] if panel.trace else [])]
    places = np.concatenate([line.x for line in lines])
    low, high = places.min(), places.max()
    margin = max((high - low) * 0.02, abs(high) * 1e-9, 0.5 if low == high else 0)
    axes.set_xlim(low - margin, high + margin)


def _fill(panel: Panel, axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    if panel.log:
        axes.set_yscale("log")
    if panel.trace:
        _draw_trace(panel.trace, axes)
    for line in panel.lines:
        _draw_line(line, axes, joined=not panel.trace or line.dashed)
    if len(panel.bad):
        _mark(panel.bad[:: -(-len(panel.bad) // 200)], axes)
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
        axes.yaxis.set_major_formatter(FuncFormatter(_short) if panel.zero else plain)
        axes.yaxis.get_offset_text().set(color=_INK["muted"], size=8)
    _label(panel, axes)


def _mark(bad: np.ndarray, axes: "Axes") -> None:
    """A cross at the foot of the axes for each value that has no place on them."""
    foot = axes.get_xaxis_transform()
    axes.plot(bad, np.full(len(bad), 0.03), "x", color=_INK["bad"], markersize=5, transform=foot, label="not finite")


def _draw_trace(trace: Trace, axes: "Axes") -> None:
    color = _INK["loss"]
    if trace.every == 1:
        marker = "." if len(trace.x) == 1 else ""
        axes.plot(trace.x, trace.mean, marker=marker, color=color, linewidth=0.7, alpha=0.4, label="every step")
    else:
        axes.fill_between(trace.x, trace.low, trace.high, color=color, alpha=0.22, linewidth=0, label="least to most")
    if len(trace.x) > 10:
        axes.plot(trace.x, trace.smooth, color=color, linewidth=1.7, label="smooth")


def _draw_line(line: Line, axes: "Axes", joined: bool) -> None:
    known = np.where(finite(line.y), line.y, np.nan)
    size = 4.2 if len(line.x) <= 25 else 2.4 if len(line.x) <= 60 else 0
    dashes = (0, (4, 2)) if line.dashed else "-"
    axes.plot(
        line.x,
        known,
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


def _fill_strip(strip: Line, axes: "Axes") -> None:
    """Parts of 1 as an area, or a bar if there is one."""
    from matplotlib.ticker import FixedLocator, PercentFormatter

    known = np.where(finite(strip.y), np.clip(strip.y, 0, 1), np.nan)
    if len(known) == 1:
        axes.bar(strip.x, known, width=0.2, color=_INK["muted"], alpha=0.5)
    else:
        axes.fill_between(strip.x, 0, known, color=_INK["muted"], alpha=0.35, linewidth=0)
        axes.plot(strip.x, known, color=_INK["muted"], linewidth=1.2)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_locator(FixedLocator([0, 1]))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.tick_params(labelsize=7.5)


def _label(panel: Panel, axes: "Axes") -> None:
    """Writes beside the end of each line what it is; the two lines of one name have one label, beside the first."""
    named = {(line.label, line.color): line for line in reversed(panel.lines) if line.label and finite(line.y).any()}
    ends = [line.y[finite(line.y)][-1] for line in named.values()]
    axes.get_ylim()  # the limits are found when they are asked for
    heights = [axes.transAxes.inverted().transform(axes.transData.transform((0, end)))[1] for end in ends]
    apart = 11 / 72 * axes.figure.dpi / axes.bbox.height  # a line of text
    style: dict[str, Any] = {"size": 8.5, "va": "center", "annotation_clip": False, "parse_math": False}
    for line, height in zip(named.values(), _spread(heights, apart), strict=True):
        axes.annotate(
            line.label, (1, height), (5, 0), "axes fraction", "offset points", color=_INK[line.color], **style
        )


def _spread(heights: Sequence[float], apart: float) -> list[float]:
    """Heights that are at least so far apart, in the same order and near where they were, the highest at most at 1."""
    placed: dict[int, float] = {}
    ceiling = 1.0
    for i in sorted(range(len(heights)), key=lambda i: -heights[i]):
        placed[i] = min(max(heights[i], 0.0), ceiling)
        ceiling = placed[i] - apart
    lowest = min(placed.values(), default=0.0)
    return [placed[i] + max(0.0, -lowest) for i in range(len(heights))]


def _short(number: float, _: Any = None) -> str:
    """A round number in few letters."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{number / unit:,.6g}{letter}"
    return f"{number:,.6g}"


def _general(number: float, _: Any = None) -> str:
    return f"{number:g}"
