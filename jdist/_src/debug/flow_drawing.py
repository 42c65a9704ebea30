"""Draws the inputs, collectives and results of a step as an SVG picture."""

import html
import itertools
from collections.abc import Sequence
from typing import NamedTuple

_FONT = 12  # pixels
_CHARACTER = 7.3  # pixels: the width of a monospace character
_LINE, _PADDING = 16, 8
_ROW_GAP, _COLUMN_GAP, _MARGIN = 14, 90, 16
_TOP = 64  # title and legend
_MAX_CHARACTERS = 44  # of a line of a box
_COLORS = {
    "replicated": ("#e3f1e3", "#2e7d32"),
    "varying": ("#fff0d9", "#d97706"),
    "not proved": ("#fde4e1", "#c62828"),
}


class FlowNode(NamedTuple):
    """A box of the picture.

    Attributes:
        lines: The text.
        kind: `"replicated"`, `"varying"` or `"not proved"`.
        sources: The indices of the boxes that it is computed from.
    """

    lines: tuple[str, ...]
    kind: str
    sources: tuple[int, ...] = ()


class Flow(NamedTuple):
    """The boxes of the picture.

    Attributes:
        inputs: The first boxes.
        collectives: The boxes after them.
        results: The last boxes.
    """

    inputs: tuple[FlowNode, ...]
    collectives: tuple[FlowNode, ...]
    results: tuple[FlowNode, ...]


def draw_flow(title: str, flow: Flow) -> str:
    """Returns an SVG document with the boxes in columns from left to right, and a curve from each box to those that use it."""
    nodes = [node._replace(lines=tuple(map(_cut, node.lines))) for node in itertools.chain(*flow)]
    columns = _columns(flow)
    boxes: dict[int, tuple[float, float, float, float]] = {}  # left, top, width, height
    heights = [len(node.lines) * _LINE + 2 * _PADDING for node in nodes]
    column_heights = [sum(heights[i] + _ROW_GAP for i in column) for column in columns]
    left, bottom = float(_MARGIN), _TOP + max(column_heights, default=0)
    for column, column_height in zip(columns, column_heights, strict=True):
        width = max(len(line) for i in column for line in nodes[i].lines) * _CHARACTER + 2 * _PADDING
        top = (_TOP + bottom - column_height) / 2
        for i in column:
            boxes[i] = left, top, width, heights[i]
            top += heights[i] + _ROW_GAP
        left += width + _COLUMN_GAP
    width = max(left - _COLUMN_GAP, len(title) * _CHARACTER + _MARGIN, 420) + _MARGIN
    curves = [
        _curve(boxes[source], boxes[i], nodes[source].kind)
        for i, node in enumerate(nodes)
        for source in node.sources
        if source != i
    ]
    parts = [*curves, *(_box(node, *boxes[i]) for i, node in enumerate(nodes))]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom:.0f}" viewBox="0 0 {width:.0f} '
        f'{bottom:.0f}" font-family="Menlo,Consolas,monospace" font-size="{_FONT}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{_text(_MARGIN, 22, title, "black", bold=True)}\n{_legend()}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _columns(flow: Flow) -> list[list[int]]:
    """Returns the boxes of each column: a collective is to the right of the collectives that it uses."""
    first, last = len(flow.inputs), len(flow.inputs) + len(flow.collectives)
    columns = [list(range(first))]
    remaining = {first + i: set(node.sources) - {first + i} for i, node in enumerate(flow.collectives)}
    while remaining:
        ready = [i for i, sources in remaining.items() if not sources & remaining.keys()]
        column = ready or list(remaining)  # in a loop, collectives may use the results of each other
        columns.append(column)
        remaining = {i: sources for i, sources in remaining.items() if i not in column}
    columns.append(list(range(last, last + len(flow.results))))
    return [column for column in columns if column]


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 1]}…"


def _box(node: FlowNode, left: float, top: float, width: float, height: float) -> str:
    fill, color = _COLORS[node.kind]
    texts = [
        _text(left + _PADDING, top + _PADDING + _FONT + i * _LINE, line, "black", bold=not i)
        for i, line in enumerate(node.lines)
    ]
    size = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<g><rect {size} rx="5" fill="{fill}" stroke="{color}"/>{"".join(texts)}</g>'


def _curve(source: Sequence[float], target: Sequence[float], kind: str) -> str:
    x, y = source[0] + source[2], source[1] + source[3] / 2
    end_x, end_y = target[0], target[1] + target[3] / 2
    bend = max((end_x - x) / 2, _COLUMN_GAP / 2)
    points = f"M{x:.1f},{y:.1f} C{x + bend:.1f},{y:.1f} {end_x - bend:.1f},{end_y:.1f} {end_x:.1f},{end_y:.1f}"
    return f'<path d="{points}" fill="none" stroke="{_COLORS[kind][1]}" stroke-opacity="0.6"/>'


def _legend() -> str:
    parts, left = [], float(_MARGIN)
    for kind, (fill, color) in _COLORS.items():
        parts.append(f'<rect x="{left:.1f}" y="36" width="12" height="12" fill="{fill}" stroke="{color}"/>')
        parts.append(_text(left + 18, 46, kind, "#444"))
        left += 40 + len(kind) * _CHARACTER
    return "".join(parts)


def _text(x: float, y: float, text: str, color: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}"{weight} xml:space="preserve">{html.escape(text)}</text>'
