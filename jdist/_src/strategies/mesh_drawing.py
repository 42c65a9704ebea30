"""Draws a mesh as lines of text."""

import itertools
from collections.abc import Sequence

import numpy as np

WIDTH = 80  # columns of text
_OUTSIDE, _ELLIPSIS = -2, -1  # in place of the index of a process
# By whether there is a line to the left, to the right, above and below.
_CORNERS = dict(zip(itertools.product((False, True), repeat=4), " ╷╵│╶┌└├╴┐┘┤─┬┴┼", strict=True))


def draw_mesh(axes: Sequence[str], ids: np.ndarray, processes: np.ndarray) -> str:
    """Draws the devices of a mesh in rows and columns, with lines between devices of different processes.

    Args:
        axes: The axes of the mesh. The last two are rows and columns, a single axis is columns. There is one grid for each
            index of the axes before.
        ids: The ids of the devices, `[axis, ...]`. Of a large mesh, the first and the last devices are drawn.
        processes: The index of each device's process, with the same shape.

    Example:
        >>> print(
        ...     draw_mesh(
        ...         ["host", "data"], np.arange(8).reshape(2, 4), np.repeat([[0], [1]], 4, 1)
        ...     )
        ... )
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
        cells = [[None if None in (r, c) else (*index, r, c) for c in columns] for r in rows]
        texts = [["…" if cell is None else str(ids[cell]) for cell in row] for row in cells]
        owners = [[_ELLIPSIS if cell is None else processes[cell] for cell in row] for row in cells]
        lines += _boxed(texts, np.array(owners), width)
    return "\n".join(lines)


def _boxed(texts: Sequence[Sequence[str]], processes: np.ndarray, width: int) -> list[str]:
    """Returns texts of cells in a box, with lines between cells of different processes, `[row, column]`."""
    padded = np.pad(processes, 1, constant_values=_OUTSIDE)
    above = np.pad(_differ(padded[:-1, 1:-1], padded[1:, 1:-1]), ((0, 0), (1, 1)))  # [row, column + 1]
    left = np.pad(_differ(padded[1:-1, :-1], padded[1:-1, 1:]), ((1, 1), (0, 0)))  # [row + 1, column]
    lines = []
    for r in range(len(texts) + 1):
        corners = zip(above[r], above[r, 1:], left[r], left[r + 1], strict=False)
        lines.append("".join(_CORNERS[corner] + ("─" if corner[1] else " ") * (width + 2) for corner in corners))
        if r < len(texts):
            cells = zip(left[r + 1], [*texts[r], ""], strict=True)
            lines.append("".join(f"{'│' if line else ' '} {text:>{width}} " for line, text in cells))
    return [line.rstrip() for line in lines if line.strip(" │")]


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns where there is a line between adjacent cells. An ellipsis has one only at the border of the box."""
    return (a != b) & (np.minimum(a, b) != _ELLIPSIS)


def _drawn_indices(size: int, most: int) -> list[int | None]:
    """Returns the indices below `size`; of more than `most`, the first and the last ones with None for the others."""
    return list(range(size)) if size <= most else [*range(most - 2), None, size - 1]
