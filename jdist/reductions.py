"""What the replicas hold, asked from the host program.

An array on the strategy's devices is held by every replica, once each: a `PerReplica` one row a replica, a mirrored
array the same value on all. Anything else (a Python or numpy number, an array elsewhere) is held by none.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jdist._tree import PyTree, named_leaves, spec
from jdist.collectives import ReduceOp, check_dim, reducible
from jdist.mesh import mirrored_sharding
from jdist.values import PerReplica, is_distributed


def reduce(op: ReduceOp, value: PyTree, dims: tuple[int, ...], mesh: Mesh) -> PyTree:
    """One value of what all replicas hold, reduced over the replicas and over `dims` of each one's value.

    Args:
        op: The reduction. A mean is over elements, so no replica counts more than its rows.
        value: A tree of `PerReplica`, mirrored arrays and host values.
        dims: Dimensions of one replica's value, from 0 up.
        mesh: The replicas.

    Returns:
        The same tree of mirrored arrays.

    Raises:
        ValueError: There is no such dimension, or a host value has no such reduction.
        TypeError: A leaf's dtype has no such reduction.
    """

    def one(node: Any) -> Any:
        if not _is_held(node, mesh):
            return _reduce_host(op, node, mesh)
        held = _rows(node, mesh)
        for name, leaf in named_leaves("value", reducible(op, held)):
            for dim in dims:
                check_dim(name, jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), dim)
        over = (0, *(dim + 1 for dim in dims))
        return jax.tree.map(lambda x: _reduce_rows(x, op, over, mirrored_sharding(mesh)), held)

    return jax.tree.map(one, value, is_leaf=is_distributed)


def gather(value: PyTree, dim: int, mesh: Mesh) -> PyTree:
    """The values of all replicas joined along `dim`: `[..., n, ...]` a replica gives `[..., replica * n, ...]`.

    Returns:
        The same tree of mirrored arrays; host values unchanged.

    Raises:
        ValueError: A leaf has no such dimension.
    """

    def one(node: Any) -> Any:
        if not _is_held(node, mesh):
            return node
        held = _rows(node, mesh)
        for name, leaf in named_leaves("value", held):
            check_dim(name, jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), dim)
        return jax.tree.map(lambda x: _join_rows(x, dim, mirrored_sharding(mesh)), held)

    return jax.tree.map(one, value, is_leaf=is_distributed)


def local_results(value: PyTree, mesh: Mesh) -> tuple[PyTree, ...]:
    """What each replica of this process holds: a tree a replica, each on its own device. A host value is one result."""
    nodes, treedef = jax.tree.flatten(value, is_leaf=is_distributed)
    if not any(_is_held(node, mesh) for node in nodes):
        return (value,)
    columns = [_local(node, mesh) for node in nodes]
    return tuple(treedef.unflatten(row) for row in zip(*columns, strict=True))


def _is_held(node: Any, mesh: Mesh) -> bool:
    if is_distributed(node):
        return True
    return isinstance(node, jax.Array) and node.sharding.device_set == set(mesh.devices.flat)


def _rows(node: Any, mesh: Mesh) -> PyTree:
    """`[replica, ...]` leaves."""
    return node.tree if isinstance(node, PerReplica) else _repeat(node, mesh.size)


def _local(node: Any, mesh: Mesh) -> Sequence[PyTree]:
    if isinstance(node, PerReplica):
        return node.values
    count = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    if not _is_held(node, mesh):
        return [node] * count
    order = {device: i for i, device in enumerate(mesh.devices.flat)}
    return [shard.data for shard in sorted(node.addressable_shards, key=lambda shard: order[shard.device])]


def _reduce_host(op: ReduceOp, value: Any, mesh: Mesh) -> Any:
    # The mean, greatest and least of equal values is the value. A sum depends on how many there are.
    if op is not ReduceOp.SUM or mesh.size == 1:
        return value
    raise ValueError(
        f"{spec(value)} is a host value, held by none of the {mesh.size} replicas, so it has no SUM over them. Sum what "
        "`strategy.run` returned, or say what you mean: `value * strategy.num_replicas_in_sync`."
    )


@functools.partial(jax.jit, static_argnums=1)
def _repeat(x: jax.Array, times: int) -> jax.Array:
    return jnp.broadcast_to(x[None], (times, *x.shape))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _reduce_rows(x: jax.Array, op: ReduceOp, dims: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    reduction = {ReduceOp.SUM: jnp.sum, ReduceOp.MEAN: jnp.mean, ReduceOp.MAX: jnp.max, ReduceOp.MIN: jnp.min}[op]
    return lax.with_sharding_constraint(reduction(x, axis=dims), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join_rows(x: jax.Array, dim: int, sharding: NamedSharding) -> jax.Array:
    shape = (*x.shape[1 : dim + 1], x.shape[0] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return lax.with_sharding_constraint(jnp.moveaxis(x, 0, dim).reshape(shape), sharding)
