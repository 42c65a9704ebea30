"""Collectives of replica functions over explicit mesh axes, applied to trees.

Without axes there is one replica, and every function here is the identity. `jdist._src.replica.context` defines the public
collectives, which pass the mesh axes of the replica function that is being traced.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jdist._src.collectives.cross_device_ops import (
    Axes,
    CommunicationOptions,
    CrossDeviceOps,
    all_reduce_packed,
    num_replicas_along,
)
from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, one_line
from jdist._src.jaxpr.marks import MEAN_MARK, SUM_MARK
from jdist._src.values.array_checks import check_range, check_value
from jdist._src.values.base import is_distributed
from jdist._src.values.reduce_op import ReduceOp, check_reducible
from jdist._src.values.replica_rows import Shape
from jdist._src.values.row_slices import RowSlices, is_row_slices


def all_reduce_tree(
    op: ReduceOp, tree: PyTree, axes: Axes, ops: CrossDeviceOps, options: CommunicationOptions
) -> PyTree:
    """Returns the leaves of `tree`, `[...]`, reduced over the replicas element by element; replicated.

    `RowSlices` stay `RowSlices`: the rows of all replicas, or all rows of the table where that is less to send.
    """
    check_unwrapped(tree)
    nodes, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_row_slices)
    named = [("value" + jax.tree_util.keystr(path), node) for path, node in nodes]
    for name, node in named:
        check_reducible(op, name, node.rows if is_row_slices(node) else node)
        if not is_row_slices(node):
            check_range(name, node)
    to_send = [_to_send(op, name, node, axes) for name, node in named]
    sums = [_marked(op, node) for node in to_send if not is_row_slices(node)]
    if axes:
        sums = all_reduce_packed(_SENT_AS.get(op, op), sums, axes, ops, options)
    totals = iter([_divided(op, x, axes) for x in sums])
    return treedef.unflatten(
        [
            _gather_row_slices(op, node, axes) if is_row_slices(sent) else _like(node, next(totals))
            for (_, node), sent in zip(named, to_send, strict=True)
        ]
    )


def all_gather_tree(tree: PyTree, axis: int, axes: Axes) -> PyTree:
    """Returns the leaves of all replicas concatenated along dimension `axis`: `[..., n, ...]` to `[..., replica * n, ...]`.

    Raises:
        ValueError: A leaf does not have the dimension; the message names the leaf.
        TypeError: `axis` is not an integer, or `tree` contains `RowSlices`.
    """
    check_unwrapped(tree)
    check_no_row_slices("all_gather", tree)
    axis = axis_argument(axis)
    leaves, treedef = _arrays(tree)
    dims = [normalize_axis(name, leaf, axis) for name, leaf in named_leaves("value", tree)]
    return treedef.unflatten([_all_gather(leaf, dim, axes) for leaf, dim in zip(leaves, dims, strict=True)])


def reduce_scatter_tree(op: ReduceOp, tree: PyTree, axis: int, axes: Axes) -> PyTree:
    """Returns one shard per replica of the reduced leaves: `[..., n, ...]` to `[..., n / replica, ...]` along dimension `axis`.

    Raises:
        ValueError: `op` is neither SUM nor MEAN, a leaf does not have the dimension, or the number of replicas does not divide
            it; the message names the leaf.
        TypeError: `axis` is not an integer, the dtype of a leaf does not support the reduction, or `tree` contains `RowSlices`.
    """
    check_unwrapped(tree)
    check_no_row_slices("reduce_scatter", tree)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"`reduce_scatter` supports 'SUM' and 'MEAN', got {op.name!r}. For {op.name}, slice the result of `all_reduce`."
        )
    axis = axis_argument(axis)
    leaves, treedef = jax.tree.flatten(tree)
    shards = []
    for name, leaf in named_leaves("value", tree):
        check_reducible(op, name, leaf)
        check_range(name, leaf)
        dim = normalize_axis(name, leaf, axis)
        size, count = jnp.shape(leaf)[dim], num_replicas_along(axes)
        if size % count:
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)}: dimension {dim} has {size} elements, which {count} replicas do not divide "
                f"evenly. Pad it to a multiple of {count}, or pass another `axis`."
            )
        shards.append(_divided(op, _reduce_scatter(_marked(op, leaf), dim, axes), axes))
    return treedef.unflatten(shards)


def broadcast_tree(tree: PyTree, axes: Axes, ops: CrossDeviceOps, options: CommunicationOptions) -> PyTree:
    """Returns the leaves of replica 0, `[...]` of any dtype; replicated."""
    check_unwrapped(tree)
    leaves, treedef = _arrays(tree)
    if not axes:
        return treedef.unflatten(leaves)
    is_first = lax.axis_index(axes) == 0
    # A sum with zeros from all other replicas; booleans and keys are sent as integers.
    masked = [jnp.where(is_first, bits, jnp.zeros_like(bits)) for bits in map(_to_bits, leaves)]
    sums = all_reduce_packed(ReduceOp.SUM, masked, axes, ops, options)
    return treedef.unflatten([_from_bits(x, leaf) for x, leaf in zip(sums, leaves, strict=True)])


def stack_replicas(tree: PyTree, axes: Axes) -> PyTree:
    """Returns the leaves of all replicas stacked along a new first dimension: `[...]` to `[replica, ...]`; replicated."""
    leaves, treedef = _arrays(tree)
    return treedef.unflatten([_all_gather(leaf[None], 0, axes) for leaf in leaves])


def all_to_all_rows(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns `[replica, ...]` with row `i` received from replica `i`, which sent its row for this replica."""
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x


def check_unwrapped(tree: PyTree) -> None:
    """Raises TypeError if `tree` contains distributed values."""
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        if is_distributed(node):
            raise TypeError(
                f"{one_line(node)} is a distributed value, but collectives take the plain arrays of one replica. Pass it to a "
                "replica function (`strategy.run(fn, (value,))`), or use `strategy.reduce` or `strategy.gather`."
            )


def check_no_row_slices(name: str, tree: PyTree) -> None:
    """Raises TypeError if `tree`, an argument of the collective `name`, contains `RowSlices`."""
    if any(map(is_row_slices, jax.tree.leaves(tree, is_leaf=is_row_slices))):
        raise TypeError(
            f"`{name}` does not support RowSlices. Pass the table (`value.dense()`), or its rows and indices as arrays "
            "(`value.rows`, `value.indices`)."
        )


def axes_argument(axis: int | Sequence[int] | None) -> Shape:
    """Returns the argument `axis` of a reduction as a tuple of dimensions, which may be negative.

    Raises:
        TypeError: It is neither None, nor an integer, nor a sequence of integers.
    """
    if axis is None:
        return ()
    dims = axis if isinstance(axis, Sequence) and not isinstance(axis, str) else (axis,)
    try:
        return tuple(as_int("`axis`", dim) for dim in dims)
    except TypeError:
        raise TypeError(
            "`axis` must be a dimension of one replica's value (an integer), a sequence of dimensions, or None, got "
            f"{one_line(axis)}."
        ) from None


def axis_argument(axis: int) -> int:
    """Returns the argument `axis` of a gather or a scatter as a dimension, which may be negative.

    Raises:
        TypeError: It is not an integer.
    """
    try:
        return as_int("`axis`", axis)
    except TypeError:
        raise TypeError(
            f"`axis` must be a dimension of one replica's value, an integer, got {one_line(axis)}. A scalar does not have a "
            "dimension: add one, `x[None]`, and use `axis=0`."
        ) from None


def normalize_axes(name: str, leaf: Any, dims: Shape) -> Shape:
    """Returns the dimensions `dims` of `leaf` as nonnegative numbers.

    Raises:
        ValueError: `leaf` does not have one of the dimensions, or one is named twice.
    """
    normalized = tuple(normalize_axis(name, leaf, dim) for dim in dims)
    if len(set(normalized)) < len(normalized):
        raise ValueError(f"`axis` names a dimension of {name} ({dtype_and_shape(leaf)}) twice: {dims}. Name each once.")
    return normalized


def normalize_axis(name: str, leaf: Any, dim: int) -> int:
    """Returns the dimension `dim` of `leaf` as a nonnegative number; raises ValueError if `leaf` does not have it."""
    rank = jnp.ndim(leaf)
    if not -rank <= dim < rank:
        valid = f"Its dimensions are 0 to {rank - 1}, or -{rank} to -1" if rank else "It is a scalar"
        raise ValueError(
            f"{name} is {dtype_and_shape(leaf)}: it does not have dimension {dim}. {valid}; `axis` counts the dimensions of "
            "one replica's value."
        )
    return dim % rank


def _arrays(tree: PyTree) -> tuple[list[jax.Array], Any]:
    """Returns the leaves of `tree` as arrays, and its structure. Raises TypeError or ValueError for an invalid leaf."""
    for name, leaf in named_leaves("value", tree):
        check_value(name, leaf)
    leaves, treedef = jax.tree.flatten(tree)
    return [jnp.asarray(leaf) for leaf in leaves], treedef


def _all_gather(x: jax.Array, dim: int, axes: Axes) -> jax.Array:
    if not x.size:  # XLA cannot gather or scatter an empty dimension
        return jnp.zeros(_with_size(x, dim, x.shape[dim] * num_replicas_along(axes)), x.dtype)
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _reduce_scatter(x: jax.Array, dim: int, axes: Axes) -> jax.Array:
    if not x.size:
        return jnp.zeros(_with_size(x, dim, x.shape[dim] // num_replicas_along(axes)), x.dtype)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def _with_size(x: jax.Array, dim: int, size: int) -> Shape:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _marked(op: ReduceOp, leaf: Any) -> jax.Array:
    """Returns `leaf` as it is sent. It is marked for the analyses, except for host numbers: counts, replicated on purpose."""
    to_send = leaf if isinstance(leaf, jax.Array) and op is ReduceOp.SUM else _summable(op, jnp.asarray(leaf))
    mark = _MARKS.get(op) if isinstance(leaf, jax.Array) else None
    return checkpoint_name(to_send, mark) if mark else to_send


def _summable(op: ReduceOp, x: jax.Array) -> jax.Array:
    """Converts integers to float for MEAN, under every strategy: their sum could overflow."""
    return x.astype(jnp.float32) if op is ReduceOp.MEAN and jnp.issubdtype(x.dtype, jnp.integer) else x


def _divided(op: ReduceOp, total: jax.Array, axes: Axes) -> jax.Array:
    return total / num_replicas_along(axes) if op is ReduceOp.MEAN and axes else total


def _to_send(op: ReduceOp, name: str, node: Any, axes: Axes) -> Any:
    """Returns `node`, or for `RowSlices` the dense table where an all-reduce of it sends less."""
    if not is_row_slices(node):
        return node
    node._check(name)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise TypeError(
            f"{name} is RowSlices, whose {op.name} over the replicas would include the zeros between the rows. Use SUM or "
            "MEAN, or reduce the table: `value.dense()`."
        )
    rows, indices = jnp.asarray(node.rows), jnp.asarray(node.indices)
    # A ring sends each number of the table twice for an all-reduce, and the rows of all replicas once for a gather.
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    gathered_bytes = num_replicas_along(axes) * len(rows) * (row_bytes + indices.dtype.itemsize)
    return node.dense() if axes and gathered_bytes > 2 * node.num_rows * row_bytes else node


def _gather_row_slices(op: ReduceOp, slices: RowSlices, axes: Axes) -> RowSlices:
    rows = _divided(op, _summable(op, jnp.asarray(slices.rows)), axes)
    rows, indices = all_gather_tree((rows, jnp.asarray(slices.indices)), 0, axes)
    return RowSlices(rows, indices, slices.num_rows)


def _like(node: Any, total: jax.Array) -> Any:
    """Returns `total` as `RowSlices` of all rows if `node` is `RowSlices`."""
    return RowSlices(total, jnp.arange(node.num_rows), node.num_rows) if is_row_slices(node) else total


def _to_bits(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x


def _from_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
    return bits.astype(like.dtype)


_MARKS = {ReduceOp.SUM: SUM_MARK, ReduceOp.MEAN: MEAN_MARK}
_SENT_AS = {ReduceOp.MEAN: ReduceOp.SUM}
