"""Draws a mesh as lines of text."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

WIDTH = 80  # columns of text


def draw_mesh(axes: Sequence[str], ids: np.ndarray, processes: np.ndarray) -> str:
    """Draws the devices of a mesh in rows and columns, with lines between devices of different processes.

    Args:
        axes: The axes of the mesh. The last two are rows and columns, a single axis is columns. There is one grid for each
            index of the axes before.
        ids: The ids of the devices, `[axis, ...]`. Of a large mesh, the first and the last devices are drawn.
        processes: The index of each device's process, with the same shape.

    Example:
        >>> print(draw_mesh(["host", "data"], np.arange(8).reshape(2, 4), np.repeat([[0], [1]], 4, 1)))
        rows along 'host', columns along 'data'
        ┌───────────────┐
        │ 0   1   2   3 │
        ├───────────────┤
        │ 4   5   6   7 │
        └───────────────┘
    """
    lines = [f"rows along {axes[-2]!r}, columns along {axes[-1]!r}" if len(axes) > 1 else f"columns along {axes[-1]!r}"]
    if ids.ndim < 2:
        ids, processes = ids[None], processes[None]
    width = len(str(ids.max()))
    rows = _drawn_indices(ids.shape[-2], 16)
    columns = _drawn_indices(ids.shape[-1], max(4, min(16, WIDTH // (width + 3) - 1)))
    for index in itertools.product(*(_drawn_indices(size, 4) for size in ids.shape[:-2])):
        if index and None not in index:
            lines.append(", ".join(f"{axis!r} {i}" for axis, i in zip(axes, index, strict=False)))
        elif index:
            lines.append("…") if lines[-1] != "…" else None
            continue
        cell = lambda r, c, at=index: ("…", None) if None in (r, c) else (str(ids[*at, r, c]), processes[*at, r, c])
        lines += _boxed([[cell(r, c) for c in columns] for r in rows], width)
    return "\n".join(lines)


def _boxed(cells: Sequence[Sequence[tuple[str, Any]]], width: int) -> list[str]:
    """Returns cells, each a text and its process, in a box with lines between cells of different processes."""
    num_rows, num_columns = len(cells), len(cells[0])
    process = lambda r, c: cells[r][c][1] if 0 <= r < num_rows and 0 <= c < num_columns else "outside"
    # None is the process of an ellipsis, which has a line only at the border of the box.
    differ = lambda a, b: a != b and (None not in (a, b) or "outside" in (a, b))
    left_line = lambda r, c: differ(process(r, c - 1), process(r, c))
    top_line = lambda r, c: differ(process(r - 1, c), process(r, c))
    lines = []
    for r in range(num_rows + 1):
        corner = lambda c, r=r: " ╵╶└╷│┌├╴┘─┴┐┤┬┼"[
            left_line(r - 1, c) + 2 * top_line(r, c) + 4 * left_line(r, c) + 8 * top_line(r, c - 1)
        ]
        lines.append(
            "".join(
                corner(c) + "─ "[not top_line(r, c)] * (width + 2) * (c < num_columns) for c in range(num_columns + 1)
            )
        )
        if r < num_rows:
            text = [f" {cells[r][c][0]:>{width}} " for c in range(num_columns)] + [""]
            lines.append("".join("│ "[not left_line(r, c)] + text[c] for c in range(num_columns + 1)))
    return [line for line in lines if line.strip(" │")]


def _drawn_indices(size: int, most: int) -> list[int | None]:
    """Returns the indices below `size`; of more than `most`, the first and the last ones with None for the others."""
    return list(range(size)) if size <= most else [*range(most - 2), None, size - 1]
