"""Numpy arrays with one row per example: conversion, stacking of examples, and checks with the path of the invalid leaf."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jdist._src.core.tree import PyTree, dtype_and_shape, has_dtype, named_leaves, one_line, short_line, supports_array
from jdist._src.data.buckets import Buckets
from jdist._src.values.array_checks import check_range

_SCALARS = (bool, int, float, complex, np.generic)
STACK_EXAMPLES = "Stack a list of examples into arrays: `jax.tree.map(lambda *x: np.stack(x), *examples)`"

_LIST = "A list is a tree with one leaf per element: write `np.asarray(x)` for an array"


def as_rows(tree: PyTree, where: str = "", advice: str = "") -> PyTree:
    """Returns a tree of arrays as numpy arrays `[row, ...]` of equal length.

    Args:
        tree: The tree.
        where: The batch, for messages: " in batch 3 of epoch 0".
        advice: The last sentence of the message for a leaf without rows.

    Raises:
        ValueError: The tree contains no arrays, or an array does not have rows, is not numeric, or has another length; the
            message names the leaf.
    """
    leaves = named_leaves("source", tree) if not isinstance(tree, Iterator) else [("source", tree)]
    if not leaves:
        raise ValueError(
            f"The data source contains no arrays{where}. Pass an array, or a tree of arrays with one row per example."
        )
    arrays = [as_numeric_array(name, leaf, where) for name, leaf in leaves]
    for (name, leaf), array in zip(leaves, arrays, strict=True):
        if array.ndim == 0 or not supports_array(leaf):
            in_list = isinstance(leaf, (bool, int, float, complex)) and name[-2:-1].isdigit()
            list_advice = f"{_LIST}, `jdist.data.pad_rows(x)` for rows of different lengths"
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)}{where}, but must be an array with one row per example. "
                f"{list_advice if in_list else advice or STACK_EXAMPLES}."
            )
        if len(array) != len(arrays[0]):
            hint = ""
            if isinstance(tree, list) and not where:
                hint = (
                    " If each element of the list is a batch, pass `batch_size=None`. If each one is an example, pad the "
                    "examples to one width, or pass `buckets`."
                )
            raise ValueError(
                f"{leaves[0][0]} has {len(arrays[0])} rows but {name} has {len(array)}{where}. All arrays must have the same "
                f"length: row i of each array is part of example i.{hint}"
            )
    return jax.tree.unflatten(jax.tree.structure(tree), arrays)


def num_rows(tree: PyTree) -> int:
    """Returns the number of rows of each leaf."""
    return len(jax.tree.leaves(tree)[0])


class ExampleStack:
    """Examples that are stacked into the rows of a batch. They are copied: a source may reuse the memory of an example.

    Args:
        where: The batch, for messages.
        buckets: The widths of examples of different width, if they are padded.
    """

    def __init__(self, where: str = "", buckets: Buckets | None = None):
        self._where, self._buckets = where, buckets
        self._treedef: Any = None
        self._names: list[str] = []
        self._columns: list[list[Any]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, example: PyTree) -> None:
        """Adds a row.

        Raises:
            ValueError: The example contains no arrays, or its structure differs from the first one.
        """
        if self._buckets is not None:
            example = self._buckets.with_lists_as_arrays(example)
        leaves, treedef = jax.tree.flatten(example)
        if self._treedef is None:
            if not leaves:
                raise ValueError(f"An example of the source contains no arrays{self._where}: {one_line(example)}.")
            self._treedef = treedef
            self._names = [name for name, _ in named_leaves("source", example)]
            self._columns = [[] for _ in leaves]
        if treedef != self._treedef:
            lists = f" {_LIST}, and pass `buckets` if its length varies." if "[" in str(treedef) else ""
            raise ValueError(
                f"Example {self._count} has the structure {short_line(treedef)}{self._where}, but the first one has "
                f"{short_line(self._treedef)}. All examples must have the same structure.{lists}"
            )
        for name, column, leaf in zip(self._names, self._columns, leaves, strict=True):
            column.append(leaf if isinstance(leaf, _SCALARS) else _copy(name, leaf, self._where))
        self._count += 1

    def stacked(self) -> PyTree:
        """Returns the rows, leaves `[example, ...]`.

        Raises:
            ValueError: A leaf is not numeric, or its shape or dtype differs between examples.
        """
        columns: Sequence[Sequence[Any]] = self._columns
        if self._buckets is not None:
            numbered = self._treedef.unflatten(range(len(columns)))
            self._buckets.check_leaves(numbered, self._where)
            paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
            columns = [self._buckets.with_equal_widths(path, columns[i]) for path, i in paths]
        pairs = zip(self._names, columns, strict=True)
        return self._treedef.unflatten([_stack_column(name, column, self._where) for name, column in pairs])


def copy_example(example: PyTree, where: str = "") -> PyTree:
    """Returns a copy of an example, in memory that its source does not reuse.

    Raises:
        ValueError: A leaf is not a numeric array.
    """
    copy = lambda path, leaf: leaf if isinstance(leaf, _SCALARS) else _copy(f"source{keystr(path)}", leaf, where)
    return jax.tree_util.tree_map_with_path(copy, example)


def _copy(name: str, leaf: Any, where: str) -> np.ndarray:
    return leaf.copy() if type(leaf) is np.ndarray else np.array(as_numeric_array(name, leaf, where))


def _stack_column(name: str, column: Sequence[Any], where: str) -> np.ndarray:
    first = column[0]
    as_numeric_array(name, first, where)
    dtypes = {leaf.dtype for leaf in column if has_dtype(leaf)}
    for number, leaf in enumerate(column):
        if np.shape(leaf) != np.shape(first):
            raise ValueError(
                f"{name} has the shape {list(np.shape(leaf))} in example {number}{where}, but {list(np.shape(first))} in the "
                "first one. Make examples of one shape in the source: pad shorter ones, cut longer ones."
            )
        if len(dtypes) > 1 and getattr(leaf, "dtype", None) != getattr(first, "dtype", None):
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)} in example {number}{where}, but {dtype_and_shape(first)} in the first one. "
                "All examples must have the same dtype."
            )
    array = as_numeric_array(name, np.stack(column), where)
    # Python numbers do not have a width, so their conversion to JAX's default dtype loses nothing to warn about.
    is_python = array.dtype.kind in "fc" and not dtypes
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) if is_python else array


def as_numeric_array(name: str, leaf: Any, where: str) -> np.ndarray:
    """Returns `leaf` as a numpy array of a dtype that JAX supports, in native byte order.

    Raises:
        ValueError: `leaf` is not such an array; the message starts with its name.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError(
            f"{name} is a MaskedArray{where}, which is not supported. Fill the masked elements: `x.filled(0)`."
        )
    if isinstance(leaf, Iterator):
        raise ValueError(
            f"{name} is a {type(leaf).__name__}{where}, not an array of numbers. A function of the step returns one batch. To "
            "read a generator, pass the generator function, without arguments, or the generator."
        )
    try:
        array = _as_numpy(leaf)
        array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, random keys, remote arrays, tensors with gradients
        raise ValueError(
            f"{name} is {type(leaf).__name__}{where}, which is not convertible to numpy: {error}"
        ) from error
    if array.dtype == object:
        raise ValueError(
            f"{name} is {dtype_and_shape(array)}{where}: its rows have different lengths, or are not numbers. Pad the rows to "
            "one length, or convert them to numbers."
        )
    is_number = bool(jnp.issubdtype(array.dtype, jnp.number)) or array.dtype == np.bool_
    # numpy counts durations as numbers; "g" and "G" are floats of more than 64 bits.
    if not is_number or array.dtype.kind in "mM" or array.dtype.char in "gG":
        raise ValueError(
            f"{name} is {dtype_and_shape(array)}{where}, a dtype that JAX does not support. Convert it to numbers, or remove "
            "it."
        )
    return array


def _as_numpy(leaf: Any) -> np.ndarray:
    """Returns `leaf` as a numpy array. Torch tensors of dtypes that numpy does not have are viewed as those of ml_dtypes."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return np.asarray(leaf)
    name = str(leaf.dtype).removeprefix("torch.")
    if name != "bfloat16" and not name.startswith("float8"):
        return np.asarray(leaf)
    bits = torch.int16 if leaf.element_size() == 2 else torch.uint8
    return leaf.view(bits).numpy().view(jnp.dtype(name))


def float64_warning(tree: PyTree) -> str | None:
    """Returns a warning that names the floats that lose precision in JAX's dtype, if any."""
    is_wide = lambda leaf: leaf.dtype.kind in "fc" and leaf.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype)
    leaves = [f"{name} ({dtype_and_shape(leaf)})" for name, leaf in named_leaves("source", tree) if is_wide(leaf)]
    if not leaves:
        return None
    return (
        f"{', '.join(leaves)}: JAX converts 64-bit floats to 32 bits by default. Pass float32 arrays, or enable "
        '64-bit types: `jax.config.update("jax_enable_x64", True)`.'
    )


def check_ranges(tree: PyTree) -> None:
    """Raises ValueError if an integer is out of the range of JAX's default dtype."""
    for name, leaf in named_leaves("source", tree):
        check_range(name, leaf)


def canonicalize_dtypes(tree: PyTree) -> PyTree:
    """Returns the rows in the dtypes of JAX, which have at most 32 bits unless 64-bit types are enabled.

    Raises:
        ValueError: An integer is out of range.
    """
    if all(leaf.itemsize < 8 for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.structure(tree).unflatten(
        [_canonicalize_dtypes(name, leaf) for name, leaf in named_leaves("source", tree)]
    )


def _canonicalize_dtypes(name: str, leaf: np.ndarray) -> np.ndarray:
    if leaf.itemsize < 8:
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if leaf.dtype.kind in "iu":
        check_range(name, leaf, dtype)
        return leaf.astype(dtype, copy=False)
    with np.errstate(over="ignore"):  # as in JAX, a float out of range becomes infinite
        return leaf.astype(dtype, copy=False)


def describe_difference(expected: PyTree, tree: PyTree) -> str | None:
    """Returns the difference in structure, dtype or row shape of `tree` from `expected` as text, or None."""
    (expected_leaves, expected_structure), (leaves, structure) = jax.tree.flatten(expected), jax.tree.flatten(tree)
    if structure != expected_structure:
        return f"the structure {short_line(structure)}, expected {short_line(expected_structure)}"
    if all(a.dtype == b.dtype and a.shape[1:] == b.shape[1:] for a, b in zip(expected_leaves, leaves, strict=True)):
        return None
    for (name, a), (_, b) in zip(named_leaves("source", expected), named_leaves("source", tree), strict=True):
        if a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
            return f"{name} as {_row(b)} per row, expected {_row(a)}"
    return None


def check_same_rows(expected: PyTree, tree: PyTree, where: str) -> None:
    """Raises ValueError if the structure, dtypes or row shapes of `tree` differ from `expected`."""
    if difference := describe_difference(expected, tree):
        raise ValueError(
            f"The source yields {difference}{where}. All batches must have the same structure, dtypes and shapes."
        )


def describe_row(tree: PyTree) -> str:
    """Returns name, dtype and row shape of each leaf as text."""
    return ", ".join(f"{name} {_row(leaf)}" for name, leaf in named_leaves("source", tree))


def _row(array: np.ndarray) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape[1:]))}]"
