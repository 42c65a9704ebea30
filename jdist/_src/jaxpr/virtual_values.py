"""Values of virtual replicas, as the body of a `shard_map` over the devices computes with them.

V virtual replicas are assigned to N devices in order: each device has `V / N` slots, rounded up, and slot `s` of device `d`
is replica `d * slots + s`. A value that varies between replicas is a `Stacked` array `[slot, ...]`; any other value is one
array that all replicas share. Sums over the replicas are taken along one fixed tree over all V, for any N.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core.tree import PyTree


class Slots(NamedTuple):
    """The assignment of virtual replicas to the devices of a mesh.

    Attributes:
        axes: The names of all mesh axes.
        num_devices: The number of devices.
        num_replicas: The number of virtual replicas.
    """

    axes: tuple[str, ...]
    num_devices: int
    num_replicas: int

    @property
    def per_device(self) -> int:
        """The number of slots per device. The last slots are empty if the devices do not divide the replicas."""
        return -(-self.num_replicas // self.num_devices)

    @property
    def are_full(self) -> bool:
        """Whether every slot has a replica."""
        return self.num_replicas % self.num_devices == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """One value per virtual replica.

    Attributes:
        array: The values of the replicas of this device, `[slot, ...]`.
    """

    array: Any


Value: TypeAlias = Any  # `Stacked`, or an array that all replicas share


def is_stacked(node: object) -> bool:
    """Whether `node` holds one value per virtual replica."""
    return isinstance(node, Stacked)


def split_into_slots(block: PyTree, slots: Slots) -> PyTree:
    """Returns a device's block of `[replica * n, ...]` arrays as `Stacked` values `[slot, n, ...]`.

    The block holds the rows of the device's replicas if all slots are full; otherwise the rows of all replicas.
    """

    def split_leaf(leaf: jax.Array) -> Stacked:
        count = slots.per_device if slots.are_full else slots.num_replicas
        rows = leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])
        return Stacked(rows if slots.are_full else rows[_rows_of_slots(slots)])

    return jax.tree.map(split_leaf, block)


def join_slots(tree: PyTree, to_block: Callable[[PyTree], PyTree], slots: Slots) -> PyTree:
    """Returns a device's block of `[replica * n, ...]` arrays: the inverse of `split_into_slots`.

    Args:
        tree: Values of the replicas.
        to_block: Converts a leaf of one replica to its block `[n, ...]`.
        slots: The assignment of the replicas.
    """

    def join_leaf(value: Value) -> jax.Array:
        rows = jax.vmap(to_block)(slots_of(value, slots))
        if not slots.are_full:
            rows = lax.all_gather(rows, slots.axes, tiled=True)[: slots.num_replicas]
        return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])

    return jax.tree.map(join_leaf, tree, is_leaf=is_stacked)


def slots_of(value: Value, slots: Slots) -> jax.Array:
    """Returns a value as an array `[slot, ...]`."""
    if isinstance(value, Stacked):
        return value.array
    value = jnp.asarray(value)
    return jnp.broadcast_to(value[None], (slots.per_device, *value.shape))


def write_slot(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns `buffer`, `[slot, ...]`, with `value` in one slot."""
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros, also for the dtypes of random keys."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=str(jax.random.key_impl(jnp.empty((), dtype)))), shape)
    return jnp.zeros(shape, dtype)


def replica_ids(slots: Slots) -> jax.Array:
    """Returns the replica index of each slot of this device, int32 `[slot]`; `>= num_replicas` for an empty slot."""
    return lax.axis_index(slots.axes) * slots.per_device + jnp.arange(slots.per_device, dtype=jnp.int32)


def tree_fold(combine: Callable[[Any, Any], Any], value: Value, slots: Slots) -> jax.Array:
    """Returns the values of all replicas combined along the fixed tree over all of them, in the shape of one value."""
    rows = slots_of(value, slots)
    shape, dtype = rows.shape[1:], rows.dtype
    if not rows.size:
        return rows[0]
    accumulator = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
    flat = rows.reshape(slots.per_device, -1).astype(accumulator)
    # If all slots are full, each device has complete subtrees, of the largest power of two that divides `per_device`.
    subtree_size = slots.per_device & -slots.per_device if slots.are_full else 1
    subtotals = _fold_rows(combine, flat.reshape(-1, subtree_size, flat.shape[1]).swapaxes(0, 1))
    # XLA may round fused operations differently, and the fusions depend on the number of devices.
    subtotals = lax.optimization_barrier(subtotals)
    width = -(-flat.shape[1] // slots.num_devices)
    padded = jnp.pad(subtotals, ((0, 0), (0, width * slots.num_devices - flat.shape[1])))
    parts = padded.reshape(len(subtotals), slots.num_devices, width).swapaxes(0, 1)
    parts = lax.all_to_all(parts, slots.axes, 0, 0, tiled=True).reshape(-1, width)
    total = _fold_rows(combine, parts[: slots.num_replicas // subtree_size])
    total = lax.all_gather(total, slots.axes, tiled=True)[: flat.shape[1]]
    return lax.optimization_barrier(total.astype(dtype).reshape(shape))


def _fold_rows(combine: Callable[[Any, Any], Any], rows: jax.Array) -> jax.Array:
    """Combines neighbouring rows level by level; an odd last row moves up one level unchanged."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        pairs = combine(rows[0:even:2], rows[1:even:2])
        rows = pairs if even == len(rows) else jnp.concatenate([pairs, rows[even:]])
    return rows[0]


def gather_slots(value: Value, dim: int, tiled: bool, slots: Slots) -> jax.Array:
    """Returns the values of all replicas stacked along a new dimension `dim`; tiled: concatenated along the existing one."""
    rows = lax.all_gather(slots_of(value, slots), slots.axes, tiled=True)[: slots.num_replicas]
    moved = jnp.moveaxis(rows, 0, dim)
    return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :]) if tiled else moved


def scatter_slots(value: jax.Array, dim: int, tiled: bool, slots: Slots) -> Stacked:
    """Returns each replica's part of an array that is split over all replicas along `dim`."""
    shape = value.shape
    if tiled:
        value = value.reshape(*shape[:dim], slots.num_replicas, shape[dim] // slots.num_replicas, *shape[dim + 1 :])
    return Stacked(jnp.moveaxis(value, dim, 0)[_rows_of_slots(slots)])


def _rows_of_slots(slots: Slots) -> jax.Array:
    """Returns the row, of all replicas', of each slot; the last row for an empty slot."""
    return jnp.minimum(replica_ids(slots), slots.num_replicas - 1)
