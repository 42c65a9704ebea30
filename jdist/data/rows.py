"""What a source gives, as arrays with one row an example that a device can hold; what is no such array is refused here."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._tree import PyTree, named_leaves, spec

# What JAX makes of 64 bits unless it is told to keep them.
_NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}


def as_rows(tree: PyTree, where: str = "") -> PyTree:
    """A tree of things that are arrays, as numpy arrays `[row, ...]` that agree in how many rows they have.

    Raises:
        ValueError: There are no arrays, one has no rows or no numbers, or they differ in length; the message names the leaf.
    """
    leaves = named_leaves("source", tree)
    if not leaves:
        raise ValueError(
            f"The data source has no arrays{where}. Pass an array, or a tree of arrays with one row an example."
        )
    arrays = [_numbers(name, leaf, where) for name, leaf in leaves]
    for (name, leaf), array in zip(leaves, arrays, strict=True):
        if array.ndim == 0 or not hasattr(leaf, "__array__"):
            raise ValueError(
                f"{name} is {spec(leaf)}{where}: an array with one row an example is needed. A list of examples is given as "
                "`grain.MapDataset.source(examples)`."
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


def stacked(examples: Sequence[PyTree], where: str = "") -> PyTree:
    """One row for each example, leaves `[example, ...]`.

    Raises:
        ValueError: The examples differ in structure, or in a leaf's shape; or a leaf has no numbers.
    """
    treedef = jax.tree.structure(examples[0])
    if treedef.num_leaves == 0:
        raise ValueError(f"An example of the source has no arrays{where}, it is {examples[0]!r}.")
    columns: list[list[Any]] = []
    for number, example in enumerate(examples):
        leaves, structure = jax.tree.flatten(example)
        if structure != treedef:
            raise ValueError(
                f"Example {number} has the structure {structure}{where}, and the first one {treedef}. Give every example the "
                "same one."
            )
        columns.append(leaves)
    names = [name for name, _ in named_leaves("source", examples[0])]
    arrays = [_column(name, column, where) for name, column in zip(names, zip(*columns, strict=True), strict=True)]
    return jax.tree.unflatten(treedef, arrays)


def _column(name: str, column: Sequence[Any], where: str) -> np.ndarray:
    shapes = [np.shape(leaf) for leaf in column]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"{name} has the shape {list(shape)} in example {number}{where}, and {list(shapes[0])} in the first one. Make "
                "the examples of one shape in the source: pad what is shorter, cut what is longer."
            )
    array = _numbers(name, np.stack([np.asarray(leaf) for leaf in column]), where)
    # A Python number has no width that it could lose.
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) if type(column[0]) is float else array


def _numbers(name: str, leaf: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(leaf)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # no array, ragged, a random key, on another process, needs gradients
        raise ValueError(f"{name} is {type(leaf).__name__}{where}, which is no numpy array: {error}") from error
    if array.dtype == object:
        raise ValueError(
            f"{name} is {spec(array)}{where}, rows of different length or no numbers. Pad the rows to one length, or turn "
            "what they hold into numbers."
        )
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
        raise ValueError(
            f"{name} is {spec(array)}{where}, which no device holds. Turn it into numbers first, or leave it out."
        )
    return array


def wide_floats(tree: PyTree) -> list[str]:
    """The leaves that lose digits where JAX keeps 32 bits, in words."""
    wide = (np.dtype(np.float64), np.dtype(np.complex128))
    return [f"{name} ({spec(leaf)})" for name, leaf in named_leaves("source", tree) if leaf.dtype in wide]


def check_range(tree: PyTree) -> None:
    """Raises ValueError if JAX keeps 32 bits, and a whole number does not fit."""
    for name, leaf in named_leaves("source", tree):
        if leaf.size and leaf.dtype.kind in "iu" and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            _narrow(name, np.array([leaf.min(), leaf.max()]))


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
    narrow = array.astype(kind)
    lost = array[narrow != array]
    if lost.size:
        raise ValueError(
            f"{name} holds {lost[0]}, which {kind} does not. Make the numbers smaller, or let JAX keep 64 bits: "
            '`jax.config.update("jax_enable_x64", True)`.'
        )
    return narrow


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


def kind(tree: PyTree) -> str:
    """Structure, dtypes and shapes of a row, in words."""
    return ", ".join(f"{name} {_row(leaf)}" for name, leaf in named_leaves("source", tree))


def _row(array: np.ndarray) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape[1:]))}]"
