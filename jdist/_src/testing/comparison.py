"""Bitwise comparisons of trees: between two trees, and between the copies that the devices hold."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, one_line
from jdist._src.debug.copies import start_comparison
from jdist._src.values.base import DistributedValues
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.sharded import Sharded

# pytest leaves the frames of this module out of the traceback of a failed assertion.
__tracebackhide__ = operator.methodcaller("errisinstance", AssertionError)


def assert_bitwise_equal(actual: PyTree, expected: PyTree) -> None:
    """Raises AssertionError unless two trees have the same structure, dtypes, shapes and bits.

    NaNs with the same bits are equal; 0.0 and -0.0 differ. Of an array that spans several processes, each process compares
    the parts on its own devices.

    Args:
        actual: A tree of arrays, numbers, random keys and distributed values.
        expected: The tree to compare with, for example from a run on other devices.

    Raises:
        AssertionError: The trees differ. The message names the first differing leaf, the index of its first differing element,
            both values, and their distance in ULPs (units in the last place) if they are floats.

    Example:
        >>> a = {"w": jnp.array([1.0, 2.0])}
        >>> jdist.testing.assert_bitwise_equal(a, {"w": np.array([1.0, 2.0], np.float32)})
        >>> jdist.testing.assert_bitwise_equal(a, {"w": jnp.array([1.0, 2.0000002])})
        Traceback (most recent call last):
        AssertionError: The trees differ at ['w'] float32[2]: element [1] is 2.0 ...
    """
    structure, expected_structure = jax.tree.structure(actual), jax.tree.structure(expected)
    if structure != expected_structure:
        raise AssertionError(f"The trees have different structures: {structure}, expected {expected_structure}.")
    for (path, leaf), other in zip(named_leaves("", actual), jax.tree.leaves(expected), strict=True):
        name = path or "the root"
        leaf, other = _as_array(leaf), _as_array(other)
        if dtype_and_shape(leaf) != dtype_and_shape(other):
            raise AssertionError(
                f"The trees differ at {name}: {dtype_and_shape(leaf)}, expected {dtype_and_shape(other)}."
            )
        for (start, part), (_, other_part) in zip(_local_parts(leaf), _local_parts(other), strict=True):
            if difference := describe_difference(part, other_part, start):
                raise AssertionError(f"The trees differ at {name} {dtype_and_shape(leaf)}: {difference}")


def assert_replicated(tree: PyTree) -> None:
    """Raises AssertionError unless the copies of each leaf have the same bits on every device that holds them.

    Of a sharded leaf, the devices that hold the same part are compared. With several processes, all of them call this
    function, and the copies are also compared between the processes.

    Args:
        tree: A tree of arrays on devices, as a step returns its state; `jdist.Mirrored` and `jdist.Sharded` values too.

    Raises:
        AssertionError: Copies differ, or a leaf has one value per replica (`jdist.PerReplica`, `jdist.SyncOnRead`). The message
            names the leaf, the devices, and the first differing element with its distance in ULPs.
        TypeError: A leaf is not a JAX array.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> jdist.testing.assert_replicated(strategy.put({"w": np.ones(3, np.float32)}))
        >>> jdist.testing.assert_replicated(
        ...     {"w": strategy.put(jdist.PerReplica(np.ones((2, 3), np.float32)))}
        ... )
        Traceback (most recent call last):
        AssertionError: ['w'] is not replicated: it is a PerReplica(float32[2,3]), ...
    """
    _check_no_varying_values(tree)
    leaves = [(path or "the root", _as_device_array(path, leaf)) for path, leaf in named_leaves("", tree)]
    problems = [problem for path, leaf in leaves if (problem := _describe_copies(path, leaf))]
    if jax.process_count() > 1:
        problems += _differences_between_processes(leaves)  # on every process, before any of them raises
    if problems:
        raise AssertionError(problems[0])


def describe_difference(actual: np.ndarray, expected: np.ndarray, start: Sequence[int] = ()) -> str:
    """Returns a sentence about the first element of two arrays whose bits differ; "" if none do.

    Args:
        actual: An array.
        expected: An array of the same dtype and shape.
        start: The index of the first element in the complete array; zeros if empty.
    """
    bits, expected_bits = (np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8) for array in (actual, expected))
    differs = (bits != expected_bits).any(axis=1).reshape(actual.shape)
    if not differs.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(differs)[0])
    index = [i + offset for i, offset in zip(first, start or (0,) * len(first), strict=True)]
    distance = _ulps(actual[first], expected[first])
    ulps = "" if distance is None else f" ({distance} ULP{'s' * (distance != 1)})"
    count = f"{int(differs.sum())} of {differs.size} elements differ."
    return f"element {index} is {actual[first]!s} and should be {expected[first]!s}{ulps}. {count}"


def _ulps(actual: Any, expected: Any) -> int | None:
    """Returns the number of floats from one to the other; None for integers, complex numbers and NaN."""
    if (
        not np.issubdtype(actual.dtype, np.floating)
        and actual.dtype.kind != "V"
        or actual != actual
        or expected != expected
    ):
        return None
    size = actual.dtype.itemsize

    def position(value: Any) -> int:
        # The bits of floats in ascending order are integers in ascending order, except for the sign bit.
        bits = int(np.asarray(value).view(f"u{size}"))
        magnitude = bits & ((1 << (8 * size - 1)) - 1)
        return -magnitude if bits >> (8 * size - 1) else magnitude

    return abs(position(actual) - position(expected))


def _as_array(leaf: Any) -> Any:
    """Returns the array of a leaf: the data of a random key, a numpy array for a number."""
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(leaf)


def _as_device_array(path: str, leaf: Any) -> jax.Array:
    if not isinstance(leaf, jax.Array):
        raise TypeError(
            f"{path or 'The tree'} is {dtype_and_shape(leaf)} on the host. Pass arrays that are on devices."
        )
    return _as_array(leaf)


def _local_parts(array: Any) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yields the parts of an array that this process can read, each with the index of its first element."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        yield (), np.asarray(array)
        return
    for shard in array.addressable_shards:
        yield tuple(each.start or 0 for each in shard.index), np.asarray(shard.data)


def _check_no_varying_values(tree: PyTree) -> None:
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, DistributedValues))
    for path, node in nodes:
        if isinstance(node, DistributedValues) and not isinstance(node, (Mirrored, Sharded)):
            name = jax.tree_util.keystr(path) or "The value"
            raise AssertionError(f"{name} is not replicated: it is a {one_line(node)}, one value per replica.")


def _describe_copies(name: str, leaf: jax.Array) -> str:
    """Returns a sentence about the first device of this process whose copy differs from another copy; "" if none does."""
    first_copies: dict[str, Any] = {}
    for shard in leaf.addressable_shards:
        first = first_copies.setdefault(str(shard.index), shard)
        start = tuple(each.start or 0 for each in shard.index)
        if difference := describe_difference(np.asarray(shard.data), np.asarray(first.data), start):
            return (
                f"{name} {dtype_and_shape(leaf)} is not replicated: {shard.device} and {first.device} hold different "
                f"copies. On {shard.device}, {difference}"
            )
    return ""


def _differences_between_processes(leaves: Sequence[tuple[str, jax.Array]]) -> list[str]:
    """Returns a sentence per replicated leaf whose bits differ between the processes. A collective of all processes."""
    replicated = [(name, leaf) for name, leaf in leaves if leaf.is_fully_replicated and not leaf.is_fully_addressable]
    differences = start_comparison([leaf for _, leaf in replicated]).differences()
    different = {difference.leaf for _, difference in differences}
    return [
        f"{name} {dtype_and_shape(leaf)} is not replicated: its bits differ between the processes."
        for number, (name, leaf) in enumerate(replicated)
        if f"[{number}]" in different
    ]
