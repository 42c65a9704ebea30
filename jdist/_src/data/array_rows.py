"""What a source gives, as arrays with one row an example that a device can hold; what is no such array is refused here."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.values.arrays import check_range

# What JAX makes of 64 bits unless it is told to keep them.
_NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}
_LIST = "A list of examples is given as `grain.MapDataset.source(examples)`"


def as_rows(tree: PyTree, where: str = "", if_not_batched: str = "") -> PyTree:
    """A tree of things that are arrays, as numpy arrays `[row, ...]` that agree in how many rows they have.

    Raises:
        ValueError: There are no arrays, one has no rows or no numbers, or they differ in length; the message names the leaf.
    """
    leaves = named_leaves("source", tree) if not isinstance(tree, Iterator) else [("source", tree)]
    if not leaves:
        raise ValueError(
            f"The data source has no arrays{where}. Pass an array, or a tree of arrays with one row an example."
        )
    arrays = [as_numbers(name, leaf, where) for name, leaf in leaves]
    for (name, leaf), array in zip(leaves, arrays, strict=True):
        if array.ndim == 0 or not hasattr(leaf, "__array__"):
            instead = if_not_batched or _LIST
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)}{where}: an array with one row an example is needed. {instead}."
            )
        if len(array) != len(arrays[0]):
            raise ValueError(
                f"{leaves[0][0]} has {len(arrays[0])} rows and {name} has {len(array)}{where}: row i of each array has to "
                "belong to example i."
            )
    return jax.tree.unflatten(jax.tree.structure(tree), arrays)


def num_rows(tree: PyTree) -> int:
    """How many rows each leaf has."""
    return len(jax.tree.leaves(tree)[0])


class Stack:
    """Examples that become the rows of a batch. They are copied as they come: a source may write into what it gave before.

    Args:
        where: Which batch, in words.
    """

    def __init__(self, where: str = ""):
        self._where = where
        self._treedef: Any = None
        self._names: list[str] = []
        self._columns: list[list[Any]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, example: PyTree) -> None:
        """One more row.

        Raises:
            ValueError: The example has no arrays, or another structure than those before.
        """
        leaves, treedef = jax.tree.flatten(example)
        if self._treedef is None:
            if not leaves:
                raise ValueError(f"An example of the source has no arrays{self._where}, it is {example!r}.")
            self._treedef = treedef
            self._names = [name for name, _ in named_leaves("source", example)]
            self._columns = [[] for _ in leaves]
        if treedef != self._treedef:
            raise ValueError(
                f"Example {self._count} has the structure {treedef}{self._where}, and the first one {self._treedef}. Give "
                "every example the same one."
            )
        for name, column, leaf in zip(self._names, self._columns, leaves, strict=True):
            column.append(leaf if isinstance(leaf, _SCALARS) else _copy(name, leaf, self._where))
        self._count += 1

    def rows(self) -> PyTree:
        """All of them, leaves `[example, ...]`.

        Raises:
            ValueError: A leaf differs in shape or dtype between them, or has no numbers.
        """
        columns = zip(self._names, self._columns, strict=True)
        return self._treedef.unflatten([_column(name, column, self._where) for name, column in columns])


def kept(example: PyTree, where: str = "") -> PyTree:
    """An example that stays as it is, whatever its source writes into what it gave.

    Raises:
        ValueError: A leaf is no array of numbers.
    """
    one = lambda path, leaf: leaf if isinstance(leaf, _SCALARS) else _copy(f"source{keystr(path)}", leaf, where)
    return jax.tree_util.tree_map_with_path(one, example)


_SCALARS = (bool, int, float, complex, np.generic)


def _copy(name: str, leaf: Any, where: str) -> np.ndarray:
    return leaf.copy() if type(leaf) is np.ndarray else np.array(as_numbers(name, leaf, where))


def _column(name: str, column: Sequence[Any], where: str) -> np.ndarray:
    like = column[0]
    as_numbers(name, like, where)
    kinds = {leaf.dtype for leaf in column if hasattr(leaf, "dtype")}
    for number, leaf in enumerate(column):
        if np.shape(leaf) != np.shape(like):
            raise ValueError(
                f"{name} has the shape {list(np.shape(leaf))} in example {number}{where}, and {list(np.shape(like))} in the "
                "first one. Make the examples of one shape in the source: pad what is shorter, cut what is longer."
            )
        if len(kinds) > 1 and getattr(leaf, "dtype", None) != getattr(like, "dtype", None):
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)} in example {number}{where}, and {dtype_and_shape(like)} in the first one. Give every example the "
                "same dtype."
            )
    array = as_numbers(name, np.stack(column), where)
    # A Python number has no width that it could lose.
    plain = array.dtype.kind in "fc" and not kinds
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) if plain else array


def as_numbers(name: str, leaf: Any, where: str) -> np.ndarray:
    """A numpy array of a dtype that devices have.

    Raises:
        ValueError: `leaf` is no such array; the message begins with its name.
    """
    if isinstance(leaf, (Iterator, np.ma.MaskedArray)):
        filled = "Fill what is masked: `x.filled(0)`"
        called = (
            "A function of the step returns one batch. To read a generator, pass the generator function, without arguments, "
            "or the generator"
        )
        instead = filled if isinstance(leaf, np.ma.MaskedArray) else called
        raise ValueError(f"{name} is a {type(leaf).__name__}{where}, and no array of numbers. {instead}.")
    try:
        array = np.asarray(leaf)
        array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # ragged, a random key, on another process, with gradients, ...
        raise ValueError(f"{name} is {type(leaf).__name__}{where}, which is no numpy array: {error}") from error
    if array.dtype == object:
        raise ValueError(
            f"{name} is {dtype_and_shape(array)}{where}, rows of different length or no numbers. Pad the rows to one length, or turn "
            "what they hold into numbers."
        )
    if not _on_devices(array.dtype):
        raise ValueError(
            f"{name} is {dtype_and_shape(array)}{where}, which no device holds. Turn it into numbers first, or leave it out."
        )
    return array


def _on_devices(dtype: np.dtype) -> bool:
    if dtype.kind in "mM" or dtype.char in "gG":  # durations, dates, and floats of more than 64 bits
        return False
    return bool(jnp.issubdtype(dtype, jnp.number)) or dtype == np.bool_


def wide_floats(tree: PyTree) -> list[str]:
    """The leaves that lose digits where JAX keeps 32 bits, in words."""
    wide = (np.dtype(np.float64), np.dtype(np.complex128))
    return [f"{name} ({dtype_and_shape(leaf)})" for name, leaf in named_leaves("source", tree) if leaf.dtype in wide]


def check_ranges(tree: PyTree) -> None:
    """Raises ValueError if JAX keeps 32 bits, and a whole number does not fit."""
    for name, leaf in named_leaves("source", tree):
        check_range(name, leaf)


def narrowed(tree: PyTree) -> PyTree:
    """The rows as JAX holds them where it keeps 32 bits.

    Raises:
        ValueError: A whole number does not fit.
    """
    if all(leaf.dtype not in _NARROW for leaf in jax.tree.leaves(tree)):
        return tree
    narrow = [_narrow(name, leaf) for name, leaf in named_leaves("source", tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), narrow)


def _narrow(name: str, array: np.ndarray) -> np.ndarray:
    kind = _NARROW.get(array.dtype)
    if kind is None:
        return array
    if kind.kind in "fc":
        with np.errstate(over="ignore"):  # as JAX does: too great becomes infinite
            return array.astype(kind)
    check_range(name, array, kind)
    return array.astype(kind)


def difference(like: PyTree, tree: PyTree) -> str | None:
    """What tells the leaf that differs in structure, dtype or shape beyond the rows, or None."""
    (before, structure), (now, found) = jax.tree.flatten(like), jax.tree.flatten(tree)
    if structure != found:
        return f"the structure {found}, and not {structure}"
    if all(a.dtype == b.dtype and a.shape[1:] == b.shape[1:] for a, b in zip(before, now, strict=True)):
        return None
    for (name, a), (_, b) in zip(named_leaves("source", like), named_leaves("source", tree), strict=True):
        if a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
            return f"{name} as {_row(b)} a row, and not {_row(a)}"
    return None


def check_alike(like: PyTree, tree: PyTree, where: str) -> None:
    """Raises ValueError if the rows of `tree` are of another structure, dtype or shape than those of `like`."""
    if told := difference(like, tree):
        raise ValueError(f"The source gives {told}{where}. Give all batches the same structure, dtypes and shapes.")


def kind(tree: PyTree) -> str:
    """Structure, dtypes and shapes of a row, in words."""
    return ", ".join(f"{name} {_row(leaf)}" for name, leaf in named_leaves("source", tree))


def _row(array: np.ndarray) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape[1:]))}]"
