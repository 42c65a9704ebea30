"""Batches whose width varies: padding to a declared set of widths, so that few programs are compiled."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, one_line
from jdist._src.data.ragged import pad_rows


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The widths of batches whose width varies, such as the length of sentences: the sizes of dimension 1 of their leaves.

    A batch `[row, width, ...]` is padded to the smallest of the widths that is not less than its own, the same on all
    processes, so a step is compiled for at most as many shapes as there are widths. Examples of one batch may have different
    widths.

    Attributes:
        widths: The widths.
        leaves: The keys, fields or indices of the leaves that are padded: `("tokens", "mask")`. None: all leaves that have a
            dimension 1, to the same width.
        fill: The value of the padding.

    Raises:
        ValueError: `widths` is empty or not ascending, or a width is less than 1.
        TypeError: `widths` is not a sequence of integers, `leaves` is a string, or `fill` is not a number.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = lambda: (np.ones((2, width), np.int32) for width in (3, 7, 4))
        >>> for batch in strategy.distribute_dataset(
        ...     batches, batch_size=None, buckets=jdist.data.Buckets((4, 8))
        ... ):
        ...     print(batch)
        PerReplica(int32[2,1,4])
        PerReplica(int32[2,1,8])
        PerReplica(int32[2,1,4])
    """

    widths: Sequence[int]
    leaves: Collection[str | int] | None = None
    fill: Any = 0

    def __post_init__(self) -> None:
        if not isinstance(self.widths, Sequence | np.ndarray) or isinstance(self.widths, str):
            raise TypeError(
                f"`widths` must be a sequence of integers, such as `Buckets((64, 128))`, got {one_line(self.widths)}."
            )
        if np.ndim(self.fill) or np.asarray(self.fill).dtype.kind not in "biufc":
            raise TypeError(f"`fill` must be a number or a boolean, got {one_line(self.fill)}.")
        widths = tuple(as_int("`widths`", width, 1) for width in self.widths)
        object.__setattr__(self, "widths", widths)
        if not widths or list(widths) != sorted(set(widths)):
            raise ValueError(f"`widths` must be ascending, and at least one, got {list(widths)}.")
        if isinstance(self.leaves, str):
            raise TypeError(
                f"`leaves` must be a collection of names, got {one_line(self.leaves)}. Write `({one_line(self.leaves)},)`."
            )

    def check_leaves(self, tree: PyTree, where: str) -> None:
        """Raises ValueError if `leaves` selects no leaf of `tree`, an example or a batch."""
        if not any(self._selects(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]):
            names = [name for name, _ in named_leaves("source", tree)]
            others = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
            raise ValueError(
                f"`buckets` pads no leaf of the source{where}: it has no key, field or index of {list(self.leaves or ())}. Its "
                f"leaves are {', '.join(names[:5])}{others}."
            )

    def width(self, rows: PyTree, where: str) -> int:
        """Returns the smallest of the widths that `rows`, leaves `[row, width, ...]`, fit into.

        Raises:
            ValueError: No leaf is padded, or a leaf is wider than the largest width; the message names it.
        """
        widest = 0
        has_width = False
        for (name, leaf), is_padded in zip(named_leaves("source", rows), self._is_padded(rows), strict=True):
            if not is_padded:
                continue
            has_width = True
            widest = max(widest, leaf.shape[1])
            if widest > self.widths[-1]:
                raise ValueError(
                    f"{name} is {dtype_and_shape(leaf)}{where}: its dimension 1 is larger than the largest bucket of "
                    f"{list(self.widths)}. Add a width to `buckets`, or cut the examples in the source."
                )
        if not has_width:
            raise ValueError(
                f"`buckets` pads no leaf of the source{where}: {', '.join(name for name, _ in named_leaves('source', rows))}. "
                f"It pads leaves [row, width, ...]{f', of these only {list(self.leaves)}' if self.leaves else ''}."
            )
        return next(width for width in self.widths if width >= widest)

    def resized(self, rows: PyTree, width: int) -> PyTree:
        """Returns `rows` with the padded leaves cut or padded to `width`."""
        leaves, treedef = jax.tree.flatten(rows)
        pairs = zip(leaves, self._is_padded(rows), strict=True)
        return treedef.unflatten(
            [_resized(x, width, self.fill) if is_padded and x.shape[1] != width else x for x, is_padded in pairs]
        )

    def with_equal_widths(self, path: Sequence[Any], column: Sequence[Any]) -> Sequence[Any]:
        """Returns one leaf of several examples, `[width, ...]` each, padded to the largest width if the leaf is selected."""
        sizes = {np.shape(leaf)[:1] for leaf in column}
        if len(sizes) == 1 or () in sizes or not self._selects(path):
            return column
        (width,) = max(sizes)
        arrays = list(map(np.asarray, column))
        dtype = next(x.dtype for x in arrays if len(x))  # `np.asarray([])` has a dtype of its own
        arrays = [x if len(x) else x.astype(dtype) for x in arrays]
        return [_resized(x[None], width, self.fill)[0] for x in arrays]

    def with_lists_as_arrays(self, example: PyTree) -> PyTree:
        """Returns an example with each selected list of numbers, which JAX reads as a tree, as one array `[width]`."""

        def as_array(path: Sequence[Any], leaf: Any) -> Any:
            if not _is_numbers(leaf) or not self._selects(path):
                return leaf
            array = np.asarray(leaf)
            # Python floats do not have a width: they get JAX's default one.
            is_python = array.dtype.kind in "fc" and not any(isinstance(x, np.generic) for x in leaf)
            return array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) if is_python else array

        return jax.tree_util.tree_map_with_path(as_array, example, is_leaf=_is_numbers)

    def as_arrays(self, rows: PyTree) -> PyTree:
        """Returns `rows` with each selected object array of rows of different widths padded to the largest width."""

        def as_array(path: Sequence[Any], leaf: Any) -> Any:
            is_ragged = (
                isinstance(leaf, np.ndarray) and leaf.dtype == object and leaf.ndim == 1 and all(map(np.ndim, leaf))
            )
            return pad_rows(list(leaf), fill=self.fill)[0] if is_ragged and self._selects(path) else leaf

        return jax.tree_util.tree_map_with_path(as_array, rows)

    def _is_padded(self, rows: PyTree) -> list[bool]:
        """Returns for each leaf whether it is padded."""
        return [leaf.ndim > 1 and self._selects(path) for path, leaf in jax.tree_util.tree_flatten_with_path(rows)[0]]

    def _selects(self, path: Sequence[Any]) -> bool:
        """Returns whether `leaves` contains a key of `path`, or is None."""
        keys = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path)
        return self.leaves is None or any(key in self.leaves for key in keys)


def _is_numbers(value: Any) -> bool:
    """Returns whether `value` is a list of numbers, such as the ids of a sentence; it may be empty."""
    return isinstance(value, list) and all(isinstance(x, (bool, int, float, complex, np.generic)) for x in value)


def _resized(leaf: np.ndarray, width: int, fill: Any) -> np.ndarray:
    """Returns `[row, width, ...]`, cut or padded to `width`."""
    padding = [(0, max(0, width - leaf.shape[1])) if dim == 1 else (0, 0) for dim in range(leaf.ndim)]
    return np.pad(leaf[:, :width], padding, constant_values=fill)
