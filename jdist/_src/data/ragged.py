"""Rows of different lengths as arrays: padded with weights, or joined with their lengths."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jdist._src.core.arguments import as_int


def pad_rows(
    rows: Sequence[Any], width: int | None = None, *, fill: Any = 0, truncate: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of different lengths as one array, and the weights of its elements.

    For the ids of `jdist.lookup`: the weighted mean of the looked-up rows is `(table[ids] * weights[..., None]).sum(1) /
    weights.sum(1)[..., None]`.

    Args:
        rows: The rows, each an array or a list `[length, ...]`. A row may be empty.
        width: The width of the result; by default the length of the longest row.
        fill: The value of the padding, such as a valid id.
        truncate: Whether rows that are longer than `width` lose their last elements; otherwise they are an error.

    Returns:
        The values `[row, width, ...]`, and the weights `[row, width]`: 1 for elements of the rows, 0 for padding.

    Raises:
        ValueError: A row is longer than `width`, or the rows have different shapes after their first dimension.

    Example:
        >>> ids, weights = jdist.data.pad_rows([[4, 7], [2], []])
        >>> ids.tolist(), weights.tolist()
        ([[4, 7], [2, 0], [0, 0]], [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    """
    arrays, empty = _as_arrays(rows)
    lengths = [len(x) for x in arrays]
    longest = max(lengths, default=0)
    width = longest if width is None else as_int("`width`", width, 1)
    if longest > width and not truncate:
        raise ValueError(
            f"Row {lengths.index(longest)} has {longest} elements, but `width` is {width}. Pass a larger `width`, or "
            "`truncate=True` to drop the elements after it."
        )
    values = np.full((len(arrays), width, *empty.shape[1:]), fill, empty.dtype)
    weights = np.zeros((len(arrays), width), np.float32)
    for number, x in enumerate(arrays):
        values[number, : len(x)] = x[:width]
        weights[number, : len(x)] = 1
    return values, weights


def join_rows(rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the elements of rows of different lengths one after the other, and the lengths.

    Args:
        rows: The rows, each an array or a list `[length, ...]`. A row may be empty.

    Returns:
        The values `[element, ...]`, and the lengths `[row]`.

    Raises:
        ValueError: The rows have different shapes after their first dimension.

    Example:
        >>> values, lengths = jdist.data.join_rows([[4, 7], [2], []])
        >>> values.tolist(), lengths.tolist()
        ([4, 7, 2], [2, 1, 0])
    """
    arrays, empty = _as_arrays(rows)
    return np.concatenate([empty, *arrays]), np.array([len(x) for x in arrays], np.int32)


def _as_arrays(rows: Sequence[Any]) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the rows as arrays of one dtype, and an array without elements like them."""
    arrays = list(map(np.asarray, rows))
    filled = [x for x in arrays if x.size]  # `np.asarray([])` has a dtype of its own
    first = filled[0] if filled else np.zeros(0)
    for number, x in enumerate(arrays):
        if x.ndim == 0 or (x.size and x.shape[1:] != first.shape[1:]):
            raise ValueError(
                f"Row {number} has the shape {x.shape}, and the first row with elements {first.shape}. Rows may differ in "
                "their first dimension only."
            )
    dtype = np.result_type(*filled) if filled else first.dtype
    empty = np.zeros((0, *first.shape[1:]), dtype)
    return [x.astype(dtype) if x.size else empty for x in arrays], empty
