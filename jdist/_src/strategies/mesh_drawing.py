"""A picture of a mesh, in lines of text."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

WIDTH = 120  # columns of text


def draw_mesh(axes: Sequence[str], ids: np.ndarray, processes: np.ndarray) -> str:
    """The devices of a mesh in rows and columns, with lines between those of different processes.

    Args:
        axes: The axes of the mesh. Two are rows and columns, one is columns; what comes before has a grid for each index.
        ids: The numbers of the devices, `[axis, ...]`. Of many, the first ones and the last are drawn.
        processes: Which process each device belongs to, likewise.

    Example:
        >>> print(picture(["host", "data"], np.arange(8).reshape(2, 4), np.repeat([[0], [1]], 4, 1)))
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
    rows, columns = _some(ids.shape[-2], 16), _some(ids.shape[-1], max(4, min(16, WIDTH // (width + 3) - 1)))
    for index in itertools.product(*(_some(size, 4) for size in ids.shape[:-2])):
        if index and None not in index:
            lines.append(", ".join(f"{axis!r} {i}" for axis, i in zip(axes, index, strict=False)))
        elif index:
            lines.append("…") if lines[-1] != "…" else None
            continue
        cell = lambda r, c, at=index: ("…", None) if None in (r, c) else (str(ids[*at, r, c]), processes[*at, r, c])
        lines += _boxed([[cell(r, c) for c in columns] for r in rows], width)
    return "\n".join(lines)


def _boxed(cells: Sequence[Sequence[tuple[str, Any]]], width: int) -> list[str]:
    """Cells, each a text and who owns it, in a box, with lines where the owners change."""
    height, across = len(cells), len(cells[0])
    owner = lambda r, c: cells[r][c][1] if 0 <= r < height and 0 <= c < across else "nobody"
    parts = lambda a, b: a != b and (None not in (a, b) or "nobody" in (a, b))  # none is an ellipsis, which is of any
    wall = lambda r, c: parts(owner(r, c - 1), owner(r, c))  # left of a cell
    roof = lambda r, c: parts(owner(r - 1, c), owner(r, c))
    lines = []
    for r in range(height + 1):
        corner = lambda c, r=r: " ╵╶└╷│┌├╴┘─┴┐┤┬┼"[
            wall(r - 1, c) + 2 * roof(r, c) + 4 * wall(r, c) + 8 * roof(r, c - 1)
        ]
        lines.append("".join(corner(c) + "─ "[not roof(r, c)] * (width + 2) * (c < across) for c in range(across + 1)))
        if r < height:
            text = [f" {cells[r][c][0]:>{width}} " for c in range(across)] + [""]
            lines.append("".join("│ "[not wall(r, c)] + text[c] for c in range(across + 1)))
    return [line for line in lines if line.strip(" │")]


def _some(size: int, most: int) -> list[int | None]:
    """The numbers below `size`; of too many, the first and the last ones, and None for the others."""
    return list(range(size)) if size <= most else [*range(most - 2), None, size - 1]
