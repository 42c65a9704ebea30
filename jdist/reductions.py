"""What the replicas hold, asked from the host program.

An array on the strategy's devices is held by every replica, once each: a `PerReplica` one row a replica, a mirrored
array the same value on all. Anything else (a Python or numpy number, an array elsewhere) is held by none.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jdist._tree import PyTree, named_leaves, spec
from jdist.collectives import ReduceOp, check_dim, check_reducible
from jdist.flight import is_bounded, land
from jdist.mesh import mirrored_sharding
from jdist.values import PerReplica, check_place, check_rows, is_distributed, is_placed

_OPERATIONS = {ReduceOp.SUM: jnp.sum, ReduceOp.MEAN: jnp.mean, ReduceOp.MAX: jnp.max, ReduceOp.MIN: jnp.min}


def dims_of(axis: int | Sequence[int] | None) -> tuple[int, ...]:
    """The dimensions that an `axis` argument names.

    Raises:
        TypeError: It is no whole number, nor some.
        ValueError: It names one twice.
    """
    dims = () if axis is None else tuple(map(operator.index, axis if isinstance(axis, Sequence) else (axis,)))
    if len(set(dims)) < len(dims):
        raise ValueError(f"`axis` names a dimension twice: {dims}. Name each once.")
    return dims


def reduce(op: ReduceOp, value: PyTree, dims: tuple[int, ...], mesh: Mesh) -> PyTree:
    """One value of what all replicas hold, reduced over the replicas and over `dims` of each one's value.

    Args:
        op: The reduction. A mean is over elements, so no replica counts more than its rows.
        value: A tree of `PerReplica`, mirrored arrays and host values.
        dims: Dimensions of one replica's value, from 0 up.
        mesh: The replicas.

    Returns:
        The same tree of mirrored arrays; of a host value, a host value.

    Raises:
        ValueError: There is no such dimension, or a host value has no such reduction.
        TypeError: A leaf's dtype has no such reduction.
    """

    def held(name: str, rows: jax.Array) -> jax.Array:
        check_reducible(op, name, rows)
        _check_dims(name, rows, dims)
        over = (0, *(dim + 1 for dim in dims))
        return _reduce_rows(rows, op, over, mirrored_sharding(mesh))

    def host(name: str, value: Any) -> Any:
        check_reducible(op, name, value)
        if op is ReduceOp.SUM and mesh.size > 1:
            raise ValueError(
                f"{name} is {spec(value)}, a host value, held by none of the {mesh.size} replicas, so it has no SUM over "
                "them. Sum what `strategy.run` returned, or say what you mean: `value * strategy.num_replicas_in_sync`."
            )
        for dim in dims:
            check_dim(name, value, dim)
        # The mean, greatest and least over the replicas of one value is the value.
        return _OPERATIONS[op](jnp.asarray(value), axis=dims) if dims else value

    return _map_leaves(held, host, value, mesh)


def gather(value: PyTree, dim: int, mesh: Mesh) -> PyTree:
    """The values of all replicas joined along `dim`: `[..., n, ...]` a replica gives `[..., replica * n, ...]`.

    Returns:
        The same tree of mirrored arrays; host values unchanged.

    Raises:
        ValueError: A leaf has no such dimension.
    """

    def held(name: str, rows: jax.Array) -> jax.Array:
        _check_dims(name, rows, (dim,))
        return _join_rows(rows, dim, mirrored_sharding(mesh))

    return _map_leaves(held, lambda name, value: value, value, mesh)


def local_results(value: PyTree, mesh: Mesh) -> tuple[PyTree, ...]:
    """What each replica of this process holds: a tree a replica, each on its own device. A host value is one result."""
    nodes, treedef = jax.tree.flatten(value, is_leaf=is_distributed)
    if not any(_is_held(node, mesh) for node in nodes):
        return (value,)
    for name, leaf in named_leaves("value", [node.tree for node in nodes if is_distributed(node)]):
        if is_placed(leaf):
            check_place(name, leaf, mesh)
    columns = [_local(node, mesh) for node in nodes]
    return tuple(treedef.unflatten(row) for row in zip(*columns, strict=True))


def _is_held(node: Any, mesh: Mesh) -> bool:
    if is_distributed(node):
        return True
    return isinstance(node, jax.Array) and node.sharding.device_set == set(mesh.devices.flat)


def _map_leaves(
    held: Callable[[str, jax.Array], Any], host: Callable[[str, Any], Any], value: PyTree, mesh: Mesh
) -> PyTree:
    """`held` of the name and the `[replica, ...]` rows of each leaf that the replicas hold, `host` of each other."""

    def rows_of(name: str, rows: jax.Array) -> Any:
        if is_placed(rows):
            check_place(name, rows, mesh)
        result = held(name, rows)
        if is_bounded(mesh):
            land(result)
        return result

    def one(name: str, node: Any) -> Any:
        if isinstance(node, PerReplica):
            check_rows(name, node, mesh)
            results = [rows_of(*leaf) for leaf in named_leaves(name, node.tree)]
            return jax.tree.unflatten(jax.tree.structure(node.tree), results)
        return rows_of(name, _repeat(node, mesh.size)) if _is_held(node, mesh) else host(name, node)

    nodes, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_distributed)
    return treedef.unflatten([one("value" + jax.tree_util.keystr(path), node) for path, node in nodes])


def _check_dims(name: str, rows: jax.Array, dims: tuple[int, ...]) -> None:
    for dim in dims:
        check_dim(name, jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype), dim)


def _local(node: Any, mesh: Mesh) -> Sequence[PyTree]:
    if isinstance(node, PerReplica):
        return node.values
    count = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    if not _is_held(node, mesh):
        return [node] * count
    order = {device: i for i, device in enumerate(mesh.devices.flat)}
    return [shard.data for shard in sorted(node.addressable_shards, key=lambda shard: order[shard.device])]


@functools.partial(jax.jit, static_argnums=1)
def _repeat(x: jax.Array, times: int) -> jax.Array:
    return jnp.broadcast_to(x[None], (times, *x.shape))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _reduce_rows(x: jax.Array, op: ReduceOp, dims: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(_OPERATIONS[op](x, axis=dims), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join_rows(x: jax.Array, dim: int, sharding: NamedSharding) -> jax.Array:
    shape = (*x.shape[1 : dim + 1], x.shape[0] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return lax.with_sharding_constraint(jnp.moveaxis(x, 0, dim).reshape(shape), sharding)
