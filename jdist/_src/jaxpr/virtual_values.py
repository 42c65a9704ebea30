"""What virtual replicas hold, as the devices have it: each device the values of its own replicas, one after the other."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas
from jdist._src.values.arrays import Shape
from jdist._src.values.base import is_distributed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """A value of which each virtual replica has its own.

    Attributes:
        slots: An array `[slot, ...]`: those of the replicas of this device, one after the other.
    """

    slots: Any


Value: TypeAlias = Any  # `Rows`, or an array `[...]` that all replicas share


def is_stacked(node: object) -> bool:
    """Whether `node` is a value of which each virtual replica has its own."""
    return isinstance(node, Stacked)


def replica_shapes(item: Any, replicas: Replicas) -> PyTree:
    """The shapes that one replica is given of an argument: its part `[n, ...]` of `[replica * n, ...]`, or all of it."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        whole = jax.typeof(leaf)
        shape = whole.shape if _is_shared(item) else (whole.shape[0] // replicas.size, *whole.shape[1:])
        return jax.ShapeDtypeStruct(shape, whole.dtype, weak_type=getattr(whole, "weak_type", False))

    return jax.tree.map(one, item.tree if is_distributed(item) else item)


def split_into_slots(item: Any, block: PyTree, replicas: Replicas) -> PyTree:
    """The parts of this device's replicas, of the block of `item` that the device holds: all replicas' parts, or theirs."""

    def one(leaf: jax.Array) -> Stacked:
        count = replicas.each if replicas.per_replica_axes else replicas.size
        rows = leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])
        return Stacked(
            rows if replicas.per_replica_axes else rows[jnp.minimum(replica_ids(replicas), replicas.size - 1)]
        )

    return block if _is_shared(item) else jax.tree.map(one, block)


def join_slots(placement: Any, item: PyTree, replicas: Replicas) -> PyTree:
    """What the device holds of a result, of what its replicas have: the inverse of `taken`."""

    def one(value: Value) -> jax.Array:
        rows = jax.vmap(placement.leave)(slots_of(value, replicas))
        if not replicas.per_replica_axes:
            rows = lax.all_gather(rows, replicas.mesh.axis_names, tiled=True)[: replicas.size]
        return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])

    if placement is not None and not placement.agrees:
        return jax.tree.map(one, item, is_leaf=is_stacked)
    assert not any(map(is_stacked, jax.tree.leaves(item, is_leaf=is_stacked))), "proved to be shared, and is not"
    return item


def _is_shared(item: Any) -> bool:
    return not is_distributed(item) or item.agrees


def tree_fold(add: Callable[[Any, Any], Any], value: Value, replicas: Replicas) -> jax.Array:
    """What all replicas have, `[...]`, put together by `add` along the fixed tree over all of them."""
    rows = slots_of(value, replicas)
    shape, dtype = rows.shape[1:], rows.dtype
    if not rows.size:
        return rows[0]
    axes, devices, wide = replicas.mesh.axis_names, replicas.mesh.size, jnp.promote_types(dtype, jnp.float32)
    flat = rows.reshape(replicas.each, -1).astype(wide if jnp.issubdtype(dtype, jnp.floating) else dtype)
    # Where every device has as many replicas, and a power of two of them are neighbours there, so they are in the tree.
    height = replicas.each & -replicas.each if replicas.per_replica_axes else 1
    branches = _tree(add, flat.reshape(-1, height, flat.shape[1]).swapaxes(0, 1))
    # The same on one device as on many: what XLA fuses, it may round in another way.
    branches = lax.optimization_barrier(branches)
    width = -(-flat.shape[1] // devices)
    padded = jnp.pad(branches, ((0, 0), (0, width * devices - flat.shape[1])))
    parts = padded.reshape(len(branches), devices, width).swapaxes(0, 1)
    parts = lax.all_to_all(parts, axes, 0, 0, tiled=True).reshape(-1, width)
    total = lax.all_gather(_tree(add, parts[: replicas.size // height]), axes, tiled=True)[: flat.shape[1]]
    return lax.optimization_barrier(total.astype(dtype).reshape(shape))


def gather_slots(value: Value, dim: int, tiled: bool, replicas: Replicas) -> jax.Array:
    """The values of all replicas `[...]`, side by side along a new dimension `dim`; tiled: joined along the one there is."""
    rows = lax.all_gather(slots_of(value, replicas), replicas.mesh.axis_names, tiled=True)[: replicas.size]
    moved = jnp.moveaxis(rows, 0, dim)
    return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :]) if tiled else moved


def scatter_slots(value: jax.Array, dim: int, tiled: bool, replicas: Replicas) -> jax.Array:
    """The parts of this device's replicas, `[slot, ...]`, of an array that is split over all replicas along `dim`."""
    shape = value.shape
    if tiled:
        value = value.reshape(*shape[:dim], replicas.size, shape[dim] // replicas.size, *shape[dim + 1 :])
    return jnp.moveaxis(value, dim, 0)[jnp.minimum(replica_ids(replicas), replicas.size - 1)]


def _tree(add: Callable[[Any, Any], Any], rows: jax.Array) -> jax.Array:
    """The rows of `[row, ...]`, neighbours with neighbours, level by level; what is left over at a level goes up as it is."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        pairs = add(rows[0:even:2], rows[1:even:2])
        rows = pairs if even == len(rows) else jnp.concatenate([pairs, rows[even:]])
    return rows[0]


def replica_ids(replicas: Replicas) -> jax.Array:
    """The numbers of this device's replicas, int32 `[slot]`; beyond the last one if there are fewer."""
    return lax.axis_index(replicas.mesh.axis_names) * replicas.each + jnp.arange(replicas.each, dtype=jnp.int32)


def slots_of(value: Value, replicas: Replicas) -> jax.Array:
    """A value as each of this device's replicas has it, `[slot, ...]`."""
    if isinstance(value, Stacked):
        return value.slots
    value = jnp.asarray(value)
    return jnp.broadcast_to(value[None], (replicas.each, *value.shape))


def zeros(shape: Shape, dtype: Any) -> jax.Array:
    """An array to be written to, of keys too."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=str(jax.random.key_impl(jnp.empty((), dtype)))), shape)
    return jnp.zeros(shape, dtype)


def write_slot(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """`buffer`, `[slot, ...]`, with `value` in its place."""
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)
