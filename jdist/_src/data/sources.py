"""The two kinds of sources: examples with an index, and streams of elements."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.tree_util import keystr

from jdist._src.core.tree import PyTree, has_dtype, named_leaves, supports_array
from jdist._src.data.array_rows import ExampleStack, as_numeric_array, as_rows, check_ranges
from jdist._src.data.buckets import Buckets
from jdist._src.data.shuffle import ExampleOrder
from jdist._src.values.base import is_distributed


@dataclasses.dataclass(frozen=True)
class Stream:
    """Elements read sequentially, from the beginning in each epoch.

    Attributes:
        start: Returns an iterator of the elements of an epoch, given the epoch and the index of the first element.
        are_batches: Whether the elements are batches, not examples.
        batch_size: The number of examples per batch, where the source reports it.
        reuses_buffers: Whether the source may overwrite the memory of earlier batches.
        endless: Whether the stream is infinite, and so without a partial batch.
        repeatable: Whether an epoch that is read again has the same order.
        reads_ahead: Whether the source reads ahead with its own threads or processes.
        one_shot: If the stream can be read only once, its class and the advice to pass another one; for messages.
        advice: The last sentence of the message for a batch whose leaves do not have rows.
    """

    start: Callable[[int, int], Iterator[Any]]
    are_batches: bool
    batch_size: int | None = None
    reuses_buffers: bool = False
    endless: bool = False
    repeatable: bool = True
    reads_ahead: bool = False
    one_shot: tuple[str, str] | None = None
    advice: str = "If it is an example, not a batch, pass the number of examples per batch: `batch_size=64`"


class Arrays:
    """Arrays in host memory, with one row per example."""

    def __init__(self, tree: PyTree):
        arrays = as_rows(tree)
        check_ranges(arrays)  # checked on all rows, because this process may not read the invalid ones
        self._arrays, self._treedef = jax.tree.flatten(arrays)

    def __len__(self) -> int:
        return len(self._arrays[0])

    @property
    def tree(self) -> PyTree:
        """The arrays, leaves `[example, ...]`."""
        return self._treedef.unflatten(self._arrays)

    def take(self, indices: np.ndarray, where: str) -> PyTree:
        """Returns the rows at `indices`, leaves `[example, ...]`, in new memory."""
        return self._treedef.unflatten([array.take(indices, axis=0) for array in self._arrays])


class Examples:
    """A sequence that returns one example per index."""

    def __init__(self, sequence: Any, buckets: Buckets | None = None):
        self._sequence, self._buckets = sequence, buckets

    def __len__(self) -> int:
        return len(self._sequence)

    def take(self, indices: np.ndarray, where: str) -> PyTree:
        """Returns the stacked examples at `indices`."""
        stack = ExampleStack(where, self._buckets)
        for index in indices.tolist():
            example = self._sequence[index]
            if example is None:
                raise ValueError(
                    f"Example {index} is None{where}. If a `grain.MapDataset` filters examples, `to_iter_dataset()` skips them."
                )
            stack.add(example)
        return stack.stacked()


class Columns:
    """A Hugging Face dataset or a table, which returns several examples per call."""

    def __init__(self, dataset: Any, buckets: Buckets | None = None):
        self._dataset, self._buckets = dataset, buckets

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, indices: np.ndarray, where: str) -> PyTree:
        """Returns the examples at `indices`, by column."""
        columns = self._dataset[indices.tolist()]
        columns = columns_as_arrays(columns, where)
        return as_rows(columns if self._buckets is None else self._buckets.as_arrays(columns), where)


Indexed: TypeAlias = Arrays | Examples | Columns  # examples with an index


class Table:
    """Arrays with one row per example, some of them object arrays of rows of different widths; a data set of `Columns`."""

    def __init__(self, tree: PyTree):
        self._tree = jax.tree.map(np.asarray, tree)
        self._lengths = {name: len(leaf) for name, leaf in named_leaves("source", self._tree)}
        if len(set(self._lengths.values())) > 1:
            raise ValueError(f"All arrays of the source must have the same length, got {self._lengths}.")

    def __len__(self) -> int:
        return next(iter(self._lengths.values()))

    def __getitem__(self, indices: list[int]) -> PyTree:
        return jax.tree.map(lambda array: array[indices], self._tree)


def columns_as_arrays(columns: PyTree, where: str = "") -> PyTree:
    """Returns the columns of a Hugging Face data set as arrays: some formats return a column as a list of values."""
    if not isinstance(columns, dict):
        return columns
    return {name: _column(f"source[{name!r}]", c, where) if isinstance(c, list) else c for name, c in columns.items()}


def lists_as_columns(table: PyTree, where: str = "") -> PyTree:
    """Returns a table with arrays for lists of values: `{"tokens": [[1, 2], [3]], "label": [0, 1]}`.

    Lists that are a tree of arrays with one row per example stay as they are.
    """
    if isinstance(table, (list, Iterator)):
        return table
    pairs, treedef = jax.tree_util.tree_flatten_with_path(table, is_leaf=lambda node: isinstance(node, list))
    values = [_first_value(column) if isinstance(column, list) else None for _, column in pairs]
    firsts = [value for value in values if value is not None]
    if not firsts or not jax.tree_util.all_leaves(firsts):
        return table
    leaves = jax.tree.leaves(table)
    are_rows = 0 not in map(np.ndim, firsts) and all(supports_array(x) and np.ndim(x) > 0 for x in leaves)
    if are_rows and len(set(map(len, leaves))) == 1:
        return table
    columns = [
        column if value is None else _column(f"source{keystr(path)}", column, where)
        for (path, column), value in zip(pairs, values, strict=True)
    ]
    return treedef.unflatten(columns)


def _first_value(column: list[Any]) -> Any:
    """Returns the first value of a list, or of lists in it; None if there is none."""
    values = (_first_value(value) if isinstance(value, list) else value for value in column)
    return next((value for value in values if value is not None), None)


def _column(name: str, values: list[Any], where: str) -> np.ndarray:
    """Returns a list of values as an array, or as an object array if their shapes differ."""
    arrays = [as_numeric_array(name, value, where) for value in values]
    if not has_dtype(_first_value(values)):  # Python numbers do not have a width: they get JAX's default one
        arrays = [x.astype(jax.dtypes.canonicalize_dtype(x.dtype)) if x.dtype.kind in "fc" else x for x in arrays]
    if len({array.shape for array in arrays}) < 2:
        return np.stack(arrays)
    column = np.empty(len(arrays), object)
    column[:] = arrays
    return column


def is_list_of_examples(source: Any, buckets: Buckets | None) -> bool:
    """Returns whether `source` is a list of examples, such as `[{"x": x, "y": 3}, ...]`: the first one cannot be a batch.

    A list of arrays is a tree of arrays, and trees whose leaves all have the same number of rows may be batches. With
    `buckets` both are examples if the width is their only dimension.
    """
    if not isinstance(source, list) or len(set(map(type, source))) != 1 or isinstance(source[0], Iterator):
        return False
    first = source[0] if buckets is None else buckets.with_lists_as_arrays(source[0])
    leaves = jax.tree.leaves(first, is_leaf=is_distributed)
    if isinstance(first, list) or not leaves or any(map(is_distributed, leaves)):
        return False
    shapes = set(map(np.shape, leaves))
    if buckets is not None and max(map(len, shapes)) == 1:
        return not is_ragged(source) and (is_tree(first) or all(np.ndim(array) == 1 for array in source))
    return is_tree(first) and (() in shapes or len({shape[0] for shape in shapes}) > 1)


def is_ragged(source: PyTree) -> bool:
    """Returns whether `source` contains an object array, such as one of rows of different widths."""
    return any(isinstance(leaf, np.ndarray) and leaf.dtype == object for leaf in jax.tree.leaves(source))


def is_tree(source: Any) -> bool:
    """Returns whether `source` is a tree of leaves, and not a leaf itself."""
    if isinstance(source, Iterator):  # JAX warns about iterators as leaves
        return False
    treedef = jax.tree.structure(source)
    return not (treedef.num_leaves == treedef.num_nodes == 1)


def indexed_batches(get: Callable[[int], PyTree], order: ExampleOrder) -> Stream:
    """Returns a stream of the batches that `get` returns by index, in the given order."""
    return Stream(lambda epoch, first: map(get, order.epoch(epoch)[first:].tolist()), True, reuses_buffers=True)


def with_row_dimension(source: Stream) -> Stream:
    """Returns a stream of batches of one row each, given a stream of values of any shape."""

    def as_batch(element: Any) -> PyTree:
        leaves, treedef = jax.tree.flatten(element)
        names = [name for name, _ in named_leaves("source", element)]
        return treedef.unflatten([as_numeric_array(n, x, "")[None] for n, x in zip(names, leaves, strict=True)])

    return dataclasses.replace(source, start=lambda epoch, first: _Mapped(as_batch, source.start(epoch, first)))


class _Mapped:
    """An iterator of `fn` of the elements of another one, which reports the position of that one."""

    def __init__(self, fn: Callable[[Any], Any], iterator: Iterator[Any]):
        self._fn, self._iterator = fn, iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._fn(next(self._iterator))

    def __getattr__(self, name: str) -> Any:  # `get_state`, `set_state` and `close`, if the iterator has them
        return getattr(self._iterator, name)
