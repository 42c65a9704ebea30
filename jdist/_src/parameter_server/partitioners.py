"""Partitioners: the number of shards into which a leaf of the state is divided, and the rows of each shard."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import one_line


@runtime_checkable
class Partitioner(Protocol):
    """Determines the number of shards of a leaf: a function, or an object with `__call__`.

    Example:
        >>> large_leaves = lambda shape, dtype, axis=0: (
        ...     [4 if shape[0] > 1000 else 1] + [1] * (len(shape) - 1)
        ... )
        >>> isinstance(large_leaves, jdist.Partitioner)
        True
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> Sequence[int]:
        """Returns the number of shards along each dimension of a leaf: 1 for all dimensions except `axis`."""
        ...


@dataclasses.dataclass(frozen=True)
class FixedShardsPartitioner:
    """Divides each leaf into the same number of shards, at most one per row.

    Attributes:
        num_shards: The number of shards.

    Raises:
        ValueError: `num_shards` is less than 1. When called: `axis` is not a dimension of the leaf.
        TypeError: `num_shards` is not an integer.

    Example:
        >>> partitioner = jdist.FixedShardsPartitioner(2)
        >>> partitioner((10, 3), np.float32), partitioner((1, 3), np.float32)
        ([2, 1], [1, 1])
    """

    num_shards: int

    def __post_init__(self) -> None:
        as_int("`num_shards`", self.num_shards, 1)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dimension of a leaf."""
        return _along(shape, axis, self.num_shards)


@dataclasses.dataclass(frozen=True)
class MinSizePartitioner:
    """Divides a leaf into one shard for each `min_shard_bytes` of its size, at most `max_shards`.

    The number of shards is rounded up, as in TensorFlow. Shards of equal size are then smaller than `min_shard_bytes`, but
    larger than half of it.

    Attributes:
        min_shard_bytes: The number of bytes per shard.
        max_shards: The largest number of shards. With the default, 1, leaves are not divided.

    Raises:
        ValueError: A number is less than 1. When called: `axis` is not a dimension of the leaf.
        TypeError: A number is not an integer.

    Example:
        >>> partitioner = jdist.MinSizePartitioner(max_shards=10)
        >>> partitioner((1000, 128), np.float32), partitioner((10, 128), np.float32)
        ([2, 1], [1, 1])
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        as_int("`min_shard_bytes`", self.min_shard_bytes, 1)
        as_int("`max_shards`", self.max_shards, 1)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dimension of a leaf."""
        size = math.prod(shape) * _itemsize(dtype)
        return _along(shape, axis, min(self.max_shards, _divided_up(size, self.min_shard_bytes)))


@dataclasses.dataclass(frozen=True)
class MaxSizePartitioner:
    """Divides a leaf into the smallest number of shards that do not exceed a number of bytes.

    A row is not divided: a shard of one row may be larger. Shards are also larger if `max_shards` limits their number.

    Attributes:
        max_shard_bytes: The largest size of a shard, in bytes.
        max_shards: The largest number of shards; None for any number.

    Raises:
        ValueError: A number is less than 1. When called: `axis` is not a dimension of the leaf.
        TypeError: A number is not an integer.

    Example:
        >>> (
        ...     jdist.MaxSizePartitioner(8)((6, 1), np.float32),
        ...     jdist.MaxSizePartitioner(8, max_shards=2)((6, 1), np.float32),
        ... )
        ([3, 1], [2, 1])
    """

    max_shard_bytes: int
    max_shards: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        as_int("`max_shard_bytes`", self.max_shard_bytes, 1)
        if self.max_shards is not None:
            as_int("`max_shards`", self.max_shards, 1)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dimension of a leaf."""
        num_rows = shape[_dimension(shape, axis)]
        row_bytes = math.prod(shape) // max(1, num_rows) * _itemsize(dtype)
        rows_per_shard = max(1, self.max_shard_bytes // row_bytes) if row_bytes else num_rows
        num_shards = _divided_up(num_rows, rows_per_shard) if num_rows else 1
        return _along(shape, axis, num_shards if self.max_shards is None else min(self.max_shards, num_shards))


def row_ranges(num_rows: int, num_shards: int) -> list[tuple[int, int]]:
    """Returns the first row and the row after the last of each shard. The first shards hold one row more if rows are left over.

    Example:
        >>> row_ranges(8, 3)
        [(0, 3), (3, 6), (6, 8)]
    """
    size, num_larger = divmod(num_rows, num_shards)
    starts = [i * size + min(i, num_larger) for i in range(num_shards + 1)]
    return list(zip(starts, starts[1:], strict=False))


def check_partitions(partitions: Any, shape: Sequence[int], name: str) -> int:
    """Returns the number of shards of a leaf: the first element of the result of a partitioner.

    Args:
        partitions: The result of the partitioner.
        shape: The shape of the leaf, with at least one dimension.
        name: The path of the leaf, for the message.

    Raises:
        ValueError: `partitions` is not a list of one integer per dimension, whose first is from 1 to the number of rows, and
            whose others are 1.
    """
    expected = f"[n{', 1' * (len(shape) - 1)}]"
    numbers = _as_integers(partitions)
    if numbers is None or len(numbers) != len(shape) or numbers[0] < 1 or any(number != 1 for number in numbers[1:]):
        raise ValueError(
            f"`variable_partitioner` must return a list of one integer per dimension, {expected} with n >= 1 for the leaf "
            f"{name} of shape {list(shape)}, got {one_line(partitions)}. A leaf is divided along its first dimension only."
        )
    if numbers[0] > max(1, shape[0]):
        raise ValueError(
            f"`variable_partitioner` returned {numbers[0]} shards for the leaf {name} of shape {list(shape)}, which has only "
            f"{shape[0]} rows. A shard holds at least one row: return at most {max(1, shape[0])}."
        )
    return numbers[0]


def _as_integers(values: Any) -> list[int] | None:
    if not isinstance(values, (list, tuple)) or not values or any(isinstance(value, bool) for value in values):
        return None
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        return None


def _along(shape: Sequence[int], axis: int, num_shards: int) -> list[int]:
    """Returns 1 for each dimension of `shape`, and at `axis` `num_shards`, which is at least 1 and at most one per row."""
    dimension = _dimension(shape, axis)
    return [max(1, min(num_shards, rows)) if dim == dimension else 1 for dim, rows in enumerate(shape)]


def _dimension(shape: Sequence[int], axis: int) -> int:
    """Returns `axis` as a dimension of `shape`.

    Raises:
        AxisError: `shape` does not have that dimension; a `ValueError` and an `IndexError`.
    """
    if not -len(shape) <= axis < len(shape):
        advice = "A scalar is not divided." if not shape else f"Use an axis from 0 to {len(shape) - 1}."
        raise np.exceptions.AxisError(
            f"A leaf of shape {list(shape)} cannot be divided along axis {axis}, which it does not have. {advice}"
        )
    return axis % len(shape)


def _divided_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _itemsize(dtype: Any) -> int:
    """Returns the number of bytes of an element; of random keys too, whose dtype numpy does not have."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype.itemsize if is_key else np.dtype(dtype).itemsize
