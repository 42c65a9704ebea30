"""What the replicas hold, asked from the host program.

An array on the strategy's devices is held by every replica, once each: a wrapped one as its wrapper says, a mirrored array
the same value on all. Anything else (a Python or numpy number, an array elsewhere) is held by none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jdist._src.collectives.ops import check_no_row_slices, normalize_axes, normalize_axis, stack_replicas
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.devices.mesh import Replicas
from jdist._src.replica.context import in_replica_function, merge_call_axes
from jdist._src.values.arrays import (
    Shape,
    Shapes,
    check_array,
    check_not_leaked,
    check_range,
    is_device_array,
    join_rows,
    reduce_rows,
)
from jdist._src.values.base import is_distributed
from jdist._src.values.device_put import check_same_devices, check_wrapper
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.reduce_op import ReduceOp, check_reducible
from jdist._src.values.row_slices import RowSlices, is_row_slices

_OPERATIONS = {ReduceOp.SUM: jnp.sum, ReduceOp.MEAN: jnp.mean, ReduceOp.MAX: jnp.max, ReduceOp.MIN: jnp.min}


def reduce(op: ReduceOp, value: PyTree, dims: Shape, replicas: Replicas) -> PyTree:
    """One value of what all replicas hold, reduced over the replicas and over `dims` of each one's value.

    Args:
        op: The reduction. A mean is over elements, so no replica counts more than its rows.
        value: A tree of wrapped values, mirrored arrays, `RowSlices` and host values.
        dims: Dimensions of one replica's value; a negative one counts from the last.
        replicas: Which replicas.

    Returns:
        The same tree of mirrored arrays; of a host value, a host value.

    Raises:
        ValueError: There is no such dimension, the replicas' shapes do not fit, or a host value has no such reduction.
        TypeError: A leaf's dtype has no such reduction.
    """

    def held(name: str, rows: jax.Array, shapes: Shapes | None) -> jax.Array:
        own = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
        check_reducible(op, name, own)
        return reduce_rows(op, name, rows, shapes, normalize_axes(name, own, dims), _everywhere(rows, replicas))

    def host(name: str, value: Any) -> Any:
        check_reducible(op, name, value)
        if op is ReduceOp.SUM and replicas.size > 1:
            raise ValueError(
                f"{name} is {dtype_and_shape(value)}, a host value, held by none of the {replicas.size} replicas, so it has no SUM over "
                "them. Sum what `strategy.run` returned, or say what you mean: `value * strategy.num_replicas_in_sync`."
            )
        normalize_axes(name, value, dims)
        if op is not ReduceOp.SUM and dims and not np.size(value):
            raise ValueError(f"{name} is {dtype_and_shape(value)}, empty, and nothing has no {op.name}.")
        if op is ReduceOp.MEAN and np.asarray(value).dtype.kind in "iu":
            value = np.asarray(value).astype(np.float32)[()]
        # The mean, greatest and least over the replicas of one value is the value.
        if not dims:
            return value
        check_range(name, value)
        return _OPERATIONS[op](jnp.asarray(value), axis=dims)

    def sparse(name: str, slices: RowSlices) -> RowSlices:
        check_reducible(op, name, slices.rows.tree if is_distributed(slices.rows) else slices.rows)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN) or dims:
            raise TypeError(
                f"{name} is RowSlices, of which there is a SUM and a MEAN over the replicas, element by element. For others "
                "take the table: `value.dense()`, in the replica function."
            )
        if not _is_held(slices.rows, replicas):
            host(name, slices.rows)
            return slices
        _check_slices(name, slices, replicas)
        rows, indices = gather((slices.rows, slices.indices), 0, replicas)
        return RowSlices(rows / replicas.size if op is ReduceOp.MEAN else rows, indices, slices.num_rows)

    return _map_leaves(held, host, sparse, value, replicas)


def gather(value: PyTree, dim: int, replicas: Replicas) -> PyTree:
    """The values of all replicas joined along `dim`: `[..., n, ...]` a replica gives `[..., replica * n, ...]`.

    Returns:
        The same tree of mirrored arrays; host values unchanged.

    Raises:
        ValueError: A leaf has no such dimension, or the replicas' shapes differ along another.
    """
    check_no_row_slices("gather", value)

    def held(name: str, rows: jax.Array, shapes: Shapes | None) -> jax.Array:
        check_array(name, rows)
        own = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
        return join_rows(name, rows, shapes, normalize_axis(name, own, dim), _everywhere(rows, replicas))

    return _map_leaves(held, lambda name, value: value, lambda name, value: value, value, replicas)


def local_results(value: PyTree, replicas: Replicas) -> tuple[PyTree, ...]:
    """What each replica of this process holds: a tree a replica, each on its own device. A host value is one result."""
    nodes, treedef = jax.tree.flatten(value, is_leaf=is_distributed)
    if not any(_is_held(node, replicas) for node in nodes):
        return (value,)
    for name, leaf in named_leaves("value", [node.tree for node in nodes if is_distributed(node)]):
        if is_device_array(leaf):
            check_same_devices(name, leaf, replicas.mesh)
    columns = [_local(node, replicas) for node in nodes]
    return tuple(treedef.unflatten(row) for row in zip(*columns, strict=True))


def _is_held(node: Any, replicas: Replicas) -> bool:
    if is_distributed(node):
        return True
    if isinstance(node, core.Tracer):  # in the function of a `merge_call`, every replica has it
        return in_replica_function()
    return isinstance(node, jax.Array) and node.sharding.device_set == set(replicas.mesh.devices.flat)


def _map_leaves(
    held: Callable[[str, jax.Array, Shapes | None], Any],
    host: Callable[[str, Any], Any],
    sparse: Callable[[str, RowSlices], Any],
    value: PyTree,
    replicas: Replicas,
) -> PyTree:
    """`held` of the name, the rows and the true shapes of each leaf that the replicas hold, `host` of each other leaf."""

    def one(name: str, node: Any) -> Any:
        if is_row_slices(node):
            return sparse(name, node)
        check_not_leaked(name, node)
        if not _is_held(node, replicas):
            return host(name, node)
        wrapper = _wrapped(node, replicas)
        check_wrapper(name, wrapper, replicas)
        check_range(name, wrapper.tree)
        rows = wrapper.rows(replicas.size)
        if is_device_array(rows):
            check_same_devices(name, rows, replicas.mesh)
        return held(name, rows, wrapper._leaf_shapes()[0] if isinstance(wrapper, PerReplica) else None)

    value = jax.tree.map(_leaf_by_leaf, value, is_leaf=is_distributed)
    nodes, treedef = jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda x: is_distributed(x) or is_row_slices(x)
    )
    return treedef.unflatten([one("value" + jax.tree_util.keystr(path), node) for path, node in nodes])


def _leaf_by_leaf(node: Any) -> PyTree:
    """The tree of a wrapper with each leaf in a wrapper of its own, so that `RowSlices` within are seen."""
    if not is_distributed(node):
        return node
    if not isinstance(node, PerReplica) or node.shapes is None:
        return jax.tree.map(node._with_tree, node.tree)
    leaves, treedef = jax.tree.flatten(node.tree)
    pairs = zip(leaves, node.shapes, strict=True)
    return treedef.unflatten([PerReplica(leaf, (shapes,)) for leaf, shapes in pairs])


def _check_slices(name: str, slices: RowSlices, replicas: Replicas) -> None:
    """Raises if the indices do not lie beside the rows, one each, on every replica."""
    rows, indices = (_own_shapes(node, replicas) for node in (slices.rows, slices.indices))
    if [shape[:1] for shape in rows] != indices:
        raise ValueError(
            f"{name} is RowSlices with rows {rows[0]} and indices {indices[:1]}: on each replica there is one index a row. "
            "Place both: `strategy.put(value)`."
        )
    numbers = slices.indices.tree if is_distributed(slices.indices) else slices.indices
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise TypeError(
            f"{name} is RowSlices with indices of {dtype_and_shape(numbers)}: rows are counted in integers."
        )


def _wrapped(node: Any, replicas: Replicas) -> Any:
    if is_distributed(node):
        return node
    if isinstance(node, core.Tracer) and replicas.size == 1:
        # The argument of a `merge_call`. What it becomes has to be proved mirrored on one replica as on several.
        return PerReplica(stack_replicas(node, merge_call_axes()))
    return Mirrored(node)


def _own_shapes(node: Any, replicas: Replicas) -> list[Shape]:
    """The shape that each replica holds; none of a host value."""
    if not _is_held(node, replicas):
        return []
    if not is_distributed(node):
        return [node.shape] * replicas.size
    if isinstance(node, PerReplica) and node.shapes:
        return list(node.shapes[0])
    return [jax.eval_shape(lambda: node.rows(replicas.size)).shape[1:]] * replicas.size


def _everywhere(rows: jax.Array, replicas: Replicas) -> Any:
    """Where a result lies: on every device, and nowhere yet if it is traced."""
    return None if isinstance(rows, core.Tracer) else replicas.whole


def _local(node: Any, replicas: Replicas) -> Sequence[PyTree]:
    count = len(replicas.local)
    if is_distributed(node):
        leaves = jax.tree.leaves(node.tree)
        # What has no leaves, or is on no device yet, is the same for all.
        alike = not leaves or (isinstance(node, Mirrored) and not all(map(is_device_array, leaves)))
        if isinstance(node, Mirrored) and not alike:
            copies = zip(*(_copies(leaf, replicas) for leaf in leaves), strict=True)
            return [jax.tree.unflatten(jax.tree.structure(node.tree), copy) for copy in copies]
        return [node.tree] * count if alike else node.values
    if not _is_held(node, replicas):
        return [node] * count
    if isinstance(node, core.Tracer):
        return [stack_replicas(node, merge_call_axes())[0]] if replicas.size == 1 else [node] * count
    return _copies(node, replicas)


def _copies(x: jax.Array, replicas: Replicas) -> Sequence[jax.Array]:
    """What each replica of this process holds of a mirrored array."""
    if replicas.split:
        return [x]
    held = {shard.device: shard.data for shard in x.addressable_shards}
    return [held[device] for device in replicas.local.values()]
