"""Host-side reductions: `Strategy.reduce`, `Strategy.gather` and `Strategy.local_results`.

Every replica holds a wrapped value, as its wrapper specifies, and a copy of each replicated array on the strategy's devices. A
host value (a Python or numpy number, an array on other devices) is held by no replica.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jdist._src.collectives.ops import check_no_row_slices, normalize_axes, normalize_axis, stack_replicas
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.devices.mesh import Replicas
from jdist._src.replica.context import in_replica_function, merge_call_axes
from jdist._src.values.array_checks import check_array, check_not_leaked, check_range, is_device_array
from jdist._src.values.base import is_distributed, named_values
from jdist._src.values.device_put import check_same_devices, check_wrapper
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.reduce_op import ReduceOp, check_reducible
from jdist._src.values.replica_rows import EXTREMES, Shape, Shapes, join_rows, local_shards, reduce_rows
from jdist._src.values.row_slices import RowSlices, is_row_slices

_OPERATIONS = {ReduceOp.SUM: jnp.sum, ReduceOp.MEAN: jnp.mean, **EXTREMES}


def reduce(op: ReduceOp, value: PyTree, axes: Shape, replicas: Replicas) -> PyTree:
    """Reduces the values of all replicas, over the replicas and over `axes` of each replica's value.

    Args:
        op: The reduction. A mean is over elements, so a replica with fewer rows counts less.
        value: A tree of wrapped values, replicated arrays, `RowSlices` and host values.
        axes: Dimensions of one replica's value; a negative one counts from the last.
        replicas: The replicas of the strategy.

    Returns:
        The same tree of replicated arrays; a host value for a host value.

    Raises:
        ValueError: The dimension does not exist, the replicas' shapes do not fit, or a host value cannot be reduced so.
        TypeError: A leaf's dtype does not support the reduction.
    """

    def reduce_held(name: str, rows: jax.Array, shapes: Shapes | None) -> jax.Array:
        row = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
        check_reducible(op, name, row)
        return reduce_rows(op, name, rows, shapes, normalize_axes(name, row, axes), _sharding(rows, replicas))

    def reduce_host(name: str, value: Any) -> Any:
        check_reducible(op, name, value)
        if op is ReduceOp.SUM and replicas.size > 1:
            raise ValueError(
                f"{name} is {dtype_and_shape(value)}, a host value, held by none of the {replicas.size} replicas, so it cannot "
                "be summed over them. Sum a result of `strategy.run`, or multiply: `value * strategy.num_replicas_in_sync`."
            )
        normalize_axes(name, value, axes)
        if op is not ReduceOp.SUM and axes and not np.size(value):
            raise ValueError(f"{name} is {dtype_and_shape(value)}: cannot compute the {op.name} of an empty array.")
        if op is ReduceOp.MEAN and np.asarray(value).dtype.kind in "iu":
            value = np.asarray(value).astype(np.float32)[()]
        # The mean, maximum and minimum over the replicas of one value is the value.
        if not axes:
            return value
        check_range(name, value)
        return _OPERATIONS[op](jnp.asarray(value), axis=axes)

    def reduce_row_slices(name: str, slices: RowSlices) -> RowSlices:
        check_reducible(op, name, slices.rows.tree if is_distributed(slices.rows) else slices.rows)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN) or axes:
            raise TypeError(
                f"{name} is RowSlices, which can only be reduced by SUM or MEAN over the replicas, element by element. "
                "Otherwise convert it to the table in the replica function: `value.dense()`."
            )
        if not _is_held(slices.rows, replicas):
            reduce_host(name, slices.rows)
            return slices
        _check_row_slices(name, slices, replicas)
        rows, indices = gather((slices.rows, slices.indices), 0, replicas)
        return RowSlices(rows / replicas.size if op is ReduceOp.MEAN else rows, indices, slices.num_rows)

    return _map_leaves(reduce_held, reduce_host, reduce_row_slices, value, replicas)


def gather(value: PyTree, axis: int, replicas: Replicas) -> PyTree:
    """Concatenates the values of all replicas along `axis`: from `[..., n, ...]` per replica to `[..., replica * n, ...]`.

    Returns:
        The same tree of replicated arrays; host values unchanged.

    Raises:
        ValueError: A leaf does not have this dimension, or the replicas' shapes differ along another.
    """
    check_no_row_slices("gather", value)

    def gather_held(name: str, rows: jax.Array, shapes: Shapes | None) -> jax.Array:
        check_array(name, rows)
        row = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
        return join_rows(name, rows, shapes, normalize_axis(name, row, axis), _sharding(rows, replicas))

    return _map_leaves(gather_held, lambda name, value: value, lambda name, value: value, value, replicas)


def local_results(value: PyTree, replicas: Replicas) -> tuple[PyTree, ...]:
    """Returns one tree per replica of this process, each on the replica's device; `(value,)` for a host value."""
    nodes, treedef = jax.tree.flatten(value, is_leaf=is_distributed)
    if not any(_is_held(node, replicas) for node in nodes):
        return (value,)
    wrappers = treedef.unflatten([node if is_distributed(node) else None for node in nodes])
    for name, leaf in named_values("value", wrappers):
        if is_device_array(leaf):
            check_same_devices(name, leaf, replicas.mesh)
    columns = [_local_values(node, replicas) for node in nodes]
    return tuple(treedef.unflatten(row) for row in zip(*columns, strict=True))


def _is_held(node: Any, replicas: Replicas) -> bool:
    """Whether every replica holds a value of `node`."""
    if is_distributed(node):
        return True
    if isinstance(node, core.Tracer):  # in the function of a `merge_call`
        return in_replica_function()
    return isinstance(node, jax.Array) and node.sharding.device_set == set(replicas.mesh.devices.flat)


def _map_leaves(
    map_held: Callable[[str, jax.Array, Shapes | None], Any],
    map_host: Callable[[str, Any], Any],
    map_row_slices: Callable[[str, RowSlices], Any],
    value: PyTree,
    replicas: Replicas,
) -> PyTree:
    """Maps each leaf of `value`: one that the replicas hold by `map_held(name, rows, true shapes)`, any other by `map_host`."""

    def map_node(name: str, node: Any) -> Any:
        if is_row_slices(node):
            return map_row_slices(name, node)
        check_not_leaked(name, node)
        if not _is_held(node, replicas):
            return map_host(name, node)
        wrapper = _in_wrapper(node, replicas)
        check_wrapper(name, wrapper, replicas)
        check_range(name, wrapper.tree)
        rows = wrapper._rows(replicas.size)
        if is_device_array(rows):
            check_same_devices(name, rows, replicas.mesh)
        return map_held(name, rows, wrapper._leaf_shapes()[0] if isinstance(wrapper, PerReplica) else None)

    value = jax.tree.map(_with_wrapper_per_leaf, value, is_leaf=is_distributed)
    is_leaf = lambda node: is_distributed(node) or is_row_slices(node)
    nodes, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)
    return treedef.unflatten([map_node("value" + jax.tree_util.keystr(path), node) for path, node in nodes])


def _with_wrapper_per_leaf(node: Any) -> PyTree:
    """Returns the tree of a wrapper with one wrapper per leaf, so that `RowSlices` in it are visible."""
    if not is_distributed(node):
        return node
    if not isinstance(node, PerReplica) or node.shapes is None:
        return jax.tree.map(node._with_tree, node.tree)
    leaves, treedef = jax.tree.flatten(node.tree)
    pairs = zip(leaves, node.shapes, strict=True)
    return treedef.unflatten([PerReplica(leaf, (shapes,)) for leaf, shapes in pairs])


def _check_row_slices(name: str, slices: RowSlices, replicas: Replicas) -> None:
    """Raises an error unless every replica has one integer index per row."""
    rows, indices = (_replica_shapes(node, replicas) for node in (slices.rows, slices.indices))
    if [shape[:1] for shape in rows] != indices:
        raise ValueError(
            f"{name} is RowSlices with rows {rows[0]} and indices {indices[:1]}: each replica must have one index per row. "
            "Place both: `strategy.put(value)`."
        )
    numbers = slices.indices.tree if is_distributed(slices.indices) else slices.indices
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise TypeError(f"{name} is RowSlices with indices of {dtype_and_shape(numbers)}: indices must be integers.")


def _in_wrapper(node: Any, replicas: Replicas) -> Any:
    if is_distributed(node):
        return node
    if isinstance(node, core.Tracer) and replicas.size == 1:
        # An argument of a `merge_call`. It has to be proved replicated on one replica as on several.
        return PerReplica(stack_replicas(node, merge_call_axes()))
    return Mirrored(node)


def _replica_shapes(node: Any, replicas: Replicas) -> list[Shape]:
    """Returns the shape of each replica's value; empty for a host value."""
    if not _is_held(node, replicas):
        return []
    if not is_distributed(node):
        return [node.shape] * replicas.size
    if isinstance(node, PerReplica) and node.shapes:
        return list(node.shapes[0])
    return [jax.eval_shape(lambda: node._rows(replicas.size)).shape[1:]] * replicas.size


def _sharding(rows: jax.Array, replicas: Replicas) -> Any:
    """Returns the sharding of a result: replicated, or None if it is traced."""
    return None if isinstance(rows, core.Tracer) else replicas.replicated_sharding


def _local_values(node: Any, replicas: Replicas) -> Sequence[PyTree]:
    """Returns the value of `node` of each replica of this process."""
    count = len(replicas.local_devices)
    if is_distributed(node):
        leaves = jax.tree.leaves(node.tree)
        # A tree without leaves, or not on the devices yet, is the same object for all replicas.
        is_shared = not leaves or (isinstance(node, Mirrored) and not all(map(is_device_array, leaves)))
        if isinstance(node, Mirrored) and not is_shared:
            copies = zip(*(_copies(leaf, replicas) for leaf in leaves), strict=True)
            return [jax.tree.unflatten(jax.tree.structure(node.tree), copy) for copy in copies]
        return [node.tree] * count if is_shared else node.values
    if not _is_held(node, replicas):
        return [node] * count
    if isinstance(node, core.Tracer):
        return [stack_replicas(node, merge_call_axes())[0]] if replicas.size == 1 else [node] * count
    return _copies(node, replicas)


def _copies(x: jax.Array, replicas: Replicas) -> Sequence[jax.Array]:
    """Returns the copy of a replicated array on the device of each replica of this process."""
    if replicas.batch_axes or replicas.model_axes:
        return local_shards(x)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    return [shards[device] for device in replicas.local_devices.values()]
