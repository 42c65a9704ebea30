"""The HTML page of a `Plan`: its tables, and a chart of the memory of one device. The module of this class imports this one."""

import html
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jdist._src.core.atomic_files import replace_atomically
from jdist._src.core.html_page import html_page
from jdist._src.core.paths import as_path
from jdist._src.core.rendering import html_of
from jdist._src.plan.tables import WIDTH, overview_tables, plan_notes, size_name, size_tables
from jdist._src.strategies.description import size_text

_PARTS = {  # the colors of the report's charts
    "parameters": "--loss",
    "optimizer": "--metric-1",
    "inputs": "--metric-0",
    "outputs": "--metric-3",
    "activations": "--metric-2",
    "temporaries": "--metric-4",
    "code": "--muted",
}
_ROW, _BAR, _LEFT, _CHART = 34, 20, 110, 620


def write_page(plan: Any, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes the page of a plan atomically, and returns its path."""
    path = as_path(path)
    sections = {"Overview": html_of(overview_tables(plan), WIDTH), "Memory of one device": memory_chart(plan.sizes)}
    sections |= {size_name(size): html_of(size_tables(size), WIDTH) for size in plan.sizes}
    text = html_page(f"Plan of {plan.step}", [note for note in [plan_notes(plan)] if note], sections)
    with replace_atomically(path) as new:
        new.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def memory_chart(sizes: Sequence[Any]) -> str:
    """Returns an SVG chart: one bar per number of devices, divided by the contents of the memory, with the limit."""
    largest = max(max(size.memory.total, size.memory.limit or 0) for size in sizes) or 1
    scale = _CHART / largest
    rows = [_bar(size, i * _ROW, scale) for i, size in enumerate(sizes)]
    used = [part for part in _PARTS if any(getattr(size.memory, part) for size in sizes)]
    legend = [
        f'<rect x="{_LEFT + i * 105}" y="{len(sizes) * _ROW + 6}" width="10" height="10" fill="var({_PARTS[part]})"/>'
        f'<text x="{_LEFT + i * 105 + 14}" y="{len(sizes) * _ROW + 15}">{part}</text>'
        for i, part in enumerate(used)
    ]
    height = len(sizes) * _ROW + 28
    return (
        f'<svg role="img" aria-label="Memory of one device" viewBox="0 0 {_LEFT + _CHART + 100} {height}" width="100%" '
        f'font-family="sans-serif" font-size="12" fill="currentColor">{"".join(rows)}{"".join(legend)}</svg>'
    )


def _bar(size: Any, y: int, scale: float) -> str:
    parts, x = [], float(_LEFT)
    for part, color in _PARTS.items():
        width = getattr(size.memory, part) * scale
        title = f"{part}: {size_text(getattr(size.memory, part))}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="var({color})"><title>{title}</title></rect>'
        )
        x += width
    total = f"{size_text(size.memory.total)}{'' if size.fits is not False else ', does not fit'}"
    parts.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{html.escape(total)}</text>')
    if size.memory.limit:
        limit = _LEFT + size.memory.limit * scale
        parts.append(
            f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="{y - 4}" y2="{y + _BAR + 4}" stroke="var(--bad)" stroke-width="2">'
            f"<title>limit: {size_text(size.memory.limit)}</title></line>"
        )
    return f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{size.devices:,} devices</text>{"".join(parts)}'
