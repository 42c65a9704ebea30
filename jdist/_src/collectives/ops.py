"""Collectives over named mesh axes, for values as one replica sees them.

With no axes there is one replica, and each of these is the identity. `jdist._src.replica.context` supplies the axes of the replica
function that is being traced; that is where the public words are.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jdist._src.collectives import cross_device_ops
from jdist._src.collectives.cross_device_ops import Axes, CommunicationOptions, CrossDeviceOps, num_replicas
from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.jaxpr.replication import SUM_MARK
from jdist._src.values.arrays import Shape, check_range, check_value
from jdist._src.values.base import is_distributed
from jdist._src.values.reduce_op import ReduceOp, check_reducible
from jdist._src.values.row_slices import RowSlices, is_row_slices


def all_reduce_tree(
    op: ReduceOp, tree: PyTree, axes: Axes, ops: CrossDeviceOps, options: CommunicationOptions
) -> PyTree:
    """The leaves of `tree`, `[...]`, reduced over the replicas element by element; every replica gets the result.

    `RowSlices` stay `RowSlices`: of the rows of all replicas, or of the whole table where that is less to send.
    """
    check_unwrapped(tree)
    nodes, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_row_slices)
    named = [("value" + jax.tree_util.keystr(path), node) for path, node in nodes]
    for name, node in named:
        check_reducible(op, name, node.rows if is_row_slices(node) else node)
        if not is_row_slices(node):
            check_range(name, node)
    dense = [_to_send(op, name, node, axes) for name, node in named]
    sums = [_marked(op, node) for node in dense if not is_row_slices(node)]
    if axes:
        sums = cross_device_ops.all_reduce_packed(_ADDED.get(op, op), sums, axes, ops, options)
    left = iter([_divided(op, x, axes) for x in sums])
    return treedef.unflatten(
        [
            _joined(op, given, axes) if is_row_slices(sent) else _like(given, next(left))
            for (_, given), sent in zip(named, dense, strict=True)
        ]
    )


def all_gather_tree(tree: PyTree, axis: int, axes: Axes) -> PyTree:
    """The leaves of all replicas joined along dimension `axis`: `[..., n, ...]` gives `[..., replica * n, ...]`.

    Raises:
        ValueError: A leaf has no such dimension; the message names it.
        TypeError: `axis` is not a whole number, or `RowSlices` are to be gathered.
    """
    check_unwrapped(tree)
    check_no_row_slices("all_gather", tree)
    axis = axis_argument(axis)
    leaves, treedef = _arrays(tree)
    dims = [normalize_axis(name, leaf, axis) for name, leaf in named_leaves("value", tree)]
    return treedef.unflatten([_gathered(leaf, dim, axes) for leaf, dim in zip(leaves, dims, strict=True)])


def broadcast_tree(tree: PyTree, axes: Axes, ops: CrossDeviceOps, options: CommunicationOptions) -> PyTree:
    """What replica 0 holds, handed to every replica, in leaves `[...]` of any dtype."""
    check_unwrapped(tree)
    leaves, treedef = _arrays(tree)
    if not axes:
        return treedef.unflatten(leaves)
    first = lax.axis_index(axes) == 0
    # A sum with nothing else in it: bits of booleans and keys travel as integers.
    alone = [jnp.where(first, bits, jnp.zeros_like(bits)) for bits in map(_bits, leaves)]
    sums = cross_device_ops.all_reduce_packed(ReduceOp.SUM, alone, axes, ops, options)
    return treedef.unflatten([_of_bits(x, leaf) for x, leaf in zip(sums, leaves, strict=True)])


def stack_replicas(tree: PyTree, axes: Axes) -> PyTree:
    """The leaves of all replicas one after the other, `[...]` to `[replica, ...]`, handed to every replica."""
    leaves, treedef = _arrays(tree)
    return treedef.unflatten([_gathered(leaf[None], 0, axes) for leaf in leaves])


def all_to_all_rows(x: jax.Array, axes: Axes) -> jax.Array:
    """`[replica, ...]` to `[replica, ...]`: row `i` goes to replica `i`, and becomes the row of the replica that it is from."""
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x


def check_no_row_slices(word: str, tree: PyTree) -> None:
    """Raises TypeError if there are `RowSlices` in `tree`."""
    if any(map(is_row_slices, jax.tree.leaves(tree, is_leaf=is_row_slices))):
        raise TypeError(
            f"`{word}` of RowSlices: to be joined, a table is whole (`value.dense()`), and its rows and indices are "
            "arrays like others (`value.rows`, `value.indices`)."
        )


def axes_argument(axis: int | Sequence[int] | None) -> Shape:
    """The dimensions that an `axis` argument names; a negative one counts from the last.

    Raises:
        TypeError: It is neither None, nor a whole number, nor a sequence of whole numbers.
    """
    if axis is None:
        return ()
    several = axis if isinstance(axis, Sequence) and not isinstance(axis, str) else (axis,)
    try:
        return tuple(as_int("`axis`", dim) for dim in several)
    except TypeError:
        raise TypeError(
            f"`axis` is a dimension of one replica's value (a whole number), several of them, or None, got {axis!r:.80}."
        ) from None


def axis_argument(axis: int) -> int:
    """The dimension to join values along, that an `axis` argument names; a negative one counts from the last.

    Raises:
        TypeError: It is not a whole number.
    """
    try:
        return as_int("`axis`", axis)
    except TypeError:
        raise TypeError(
            f"`axis` is the dimension to join the replicas' values along, a whole number, got {axis!r:.80}. Scalars have none: "
            "give each one first, `x[None]`, and join along `axis=0`."
        ) from None


def normalize_axes(name: str, leaf: Any, dims: Shape) -> Shape:
    """The dimensions `dims` of `leaf`, counted from 0.

    Raises:
        ValueError: It has no such dimension, or one is named twice.
    """
    found = tuple(normalize_axis(name, leaf, dim) for dim in dims)
    if len(set(found)) < len(found):
        raise ValueError(f"`axis` names a dimension of {name} ({dtype_and_shape(leaf)}) twice: {dims}. Name each once.")
    return found


def normalize_axis(name: str, leaf: Any, dim: int) -> int:
    """The dimension `dim` of `leaf`, counted from 0; raises ValueError if there is none."""
    rank = jnp.ndim(leaf)
    if not -rank <= dim < rank:
        there = f"Its dimensions are 0 to {rank - 1}, or -{rank} to -1" if rank else "It is a scalar"
        raise ValueError(
            f"{name} is {dtype_and_shape(leaf)}: it has no dimension {dim}. {there}; `axis` counts those of one replica's value."
        )
    return dim % rank


def _arrays(tree: PyTree) -> tuple[list[jax.Array], Any]:
    """The leaves of `tree` as arrays, and its structure; raises TypeError or ValueError, with its name, for what is none."""
    for name, leaf in named_leaves("value", tree):
        check_value(name, leaf)
    leaves, treedef = jax.tree.flatten(tree)
    return [jnp.asarray(leaf) for leaf in leaves], treedef


def _gathered(x: jax.Array, axis: int, axes: Axes) -> jax.Array:
    if not x.shape[axis]:  # XLA gathers nothing along an empty dimension, and what has no elements agrees
        return jnp.zeros(x.shape, x.dtype)
    return lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def check_unwrapped(tree: PyTree) -> None:
    """Raises TypeError if there are wrapped values in `tree`."""
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        if is_distributed(node):
            raise TypeError(
                f"{node!r} is for the host program, and collectives take one replica's plain arrays. Hand it to a replica "
                "function (`strategy.run(fn, (value,))`), or use `strategy.reduce` or `strategy.gather`."
            )


def _marked(op: ReduceOp, leaf: Any) -> jax.Array:
    """`leaf` as it is sent; a sum that the user asks for is named, but for host numbers: counts, the same on all on purpose."""
    if op is ReduceOp.SUM and isinstance(leaf, jax.Array):
        return checkpoint_name(leaf, SUM_MARK)
    return _summable(op, jnp.asarray(leaf))


def _summable(op: ReduceOp, x: jax.Array) -> jax.Array:
    """Integers of which a mean is asked as floats, under every strategy: their sum could overflow."""
    return x.astype(jnp.float32) if op is ReduceOp.MEAN and jnp.issubdtype(x.dtype, jnp.integer) else x


def _divided(op: ReduceOp, total: jax.Array, axes: Axes) -> jax.Array:
    return total / num_replicas(axes) if op is ReduceOp.MEAN and axes else total


def _to_send(op: ReduceOp, name: str, node: Any, axes: Axes) -> Any:
    """What is reduced for `node`: itself, or the table that `RowSlices` stand for where that is less to send."""
    if not is_row_slices(node):
        return node
    node.check(name)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise TypeError(
            f"{name} is RowSlices, and its {op.name} over the replicas would be one over the zeros between the rows too. "
            "SUM and MEAN have a meaning; for others take `value.dense()`."
        )
    return node.dense() if _dense_is_less(node, axes) else node


def _dense_is_less(slices: RowSlices, axes: Axes) -> bool:
    """Whether a ring sends less for an all-reduce of the table (twice each number) than for a gather of all rows."""
    rows, indices = jnp.asarray(slices.rows), jnp.asarray(slices.indices)
    row = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    joined = num_replicas(axes) * len(rows) * (row + indices.dtype.itemsize)
    return bool(axes) and joined > 2 * slices.num_rows * row


def _joined(op: ReduceOp, slices: RowSlices, axes: Axes) -> RowSlices:
    rows = _divided(op, _summable(op, jnp.asarray(slices.rows)), axes)
    rows, indices = all_gather_tree((rows, jnp.asarray(slices.indices)), 0, axes)
    return RowSlices(rows, indices, slices.num_rows)


def _like(given: Any, total: jax.Array) -> Any:
    return RowSlices(total, jnp.arange(given.num_rows), given.num_rows) if is_row_slices(given) else total


def _bits(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x


def _of_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
    return bits.astype(like.dtype)


_ADDED = {ReduceOp.MEAN: ReduceOp.SUM}
