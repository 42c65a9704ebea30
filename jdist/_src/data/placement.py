"""Transfer of the rows of a batch to the devices of their replicas."""

from typing import Any

import jax
import numpy as np

from jdist._src.core.tree import PyTree
from jdist._src.data.shards import ProcessShare
from jdist._src.devices.mesh import Replicas
from jdist._src.values.batch_layout import BatchLayout, LeafLayout
from jdist._src.values.per_replica import PerReplica


class RowPlacement:
    """Transfers the rows that a process holds to the devices; faster than `jax.device_put`, see benchmarks/input.py.

    Args:
        replicas: The replicas.
        share: The part of each batch that this process holds.
    """

    def __init__(self, replicas: Replicas, share: ProcessShare):
        self._replicas, self._share = replicas, share
        self._slots = {part: slot for slot, part in enumerate(share.replicas)}
        self._sharding = replicas.per_replica_sharding
        self._blocks: dict[int, slice] = {}  # by the first replica of a device: its rows in the local array
        if not replicas.batch_axes:
            for (index,) in self._sharding.addressable_devices_indices_map((replicas.size,)).values():  # pyright: ignore
                start, stop, _ = index.indices(replicas.size)
                self._blocks[start] = slice(self._slots[start], self._slots[start] + stop - start)

    def __call__(self, local: np.ndarray) -> jax.Array:
        """Returns `[replica, row, ...]` on the devices, given `[local replica, row, ...]`; the transfer may be running."""
        if self._replicas.batch_axes:
            return self._split_replica(local)
        blocks = self._blocks
        shape = (self._replicas.size, *local.shape[1:])
        return jax.make_array_from_callback(
            shape,
            self._sharding,
            lambda index: local[blocks[index[0].start or 0]],  # pyright: ignore
        )

    def batch(self, rows: PyTree) -> PyTree:
        """Returns a batch on the devices, given leaves `[local replica, row, ...]`."""
        return jax.tree.map(lambda leaf: PerReplica(self(leaf)), rows)

    def weights(self, weights: np.ndarray) -> PerReplica:
        """Returns the weights of a batch on the devices, given `[local replica, row]`."""
        return PerReplica(self(weights))

    def _split_replica(self, local: np.ndarray) -> jax.Array:
        """Returns the rows `[1, row, ...]` of one replica that spans several devices."""
        if local.ndim == 1:  # a scalar for the replica
            return jax.device_put(local, self._sharding)
        part_rows = local.shape[1]
        shape = (1, self._share.num_replicas * part_rows, *local.shape[2:])

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[1].indices(shape[1])
            first = self._slots[start // part_rows] * part_rows + start % part_rows
            return local.reshape(-1, *shape[2:])[None, first : first + stop - start]

        return jax.make_array_from_callback(shape, self._replicas.batch_sharding(shape), shard)


class LayoutPlacement:
    """Transfers the rows that a process holds to the devices, as a layout specifies.

    Args:
        layout: The layout.
        share: The part of each batch that this process holds, by `layout_share`.
    """

    def __init__(self, layout: BatchLayout, share: ProcessShare):
        self._layout, self._share = layout, share
        self._slots = {part: slot for slot, part in enumerate(share.replicas)}

    def batch(self, rows: PyTree) -> PyTree:
        """Returns a batch on the devices, given leaves `[local part, row, ...]`."""
        leaves, treedef = jax.tree.flatten(rows)
        return treedef.unflatten(map(self._place, self._layout.leaves(self._global_shapes(rows)), leaves))

    def weights(self, weights: np.ndarray) -> Any:
        """Returns the weights of a batch on the devices, given `[local part, row]`."""
        return self._place(self._layout.weights(self._global_shapes(weights).shape), weights)

    def specs(self, shapes: PyTree, are_weights: bool = False) -> PyTree:
        """Returns the shapes of a batch on the devices, given shapes `[local part, row, ...]`."""
        shapes = self._global_shapes(shapes)
        layouts = [self._layout.weights(shapes.shape)] if are_weights else self._layout.leaves(shapes)
        leaves, treedef = jax.tree.flatten(shapes)
        pairs = zip(layouts, leaves, strict=True)
        return treedef.unflatten(
            [leaf.wrap(jax.ShapeDtypeStruct(leaf.shape, x.dtype, sharding=leaf.sharding)) for leaf, x in pairs]
        )

    def _global_shapes(self, rows: PyTree) -> PyTree:
        """Returns the shapes of the leaves of the global batch, `[batch, ...]`."""
        parts = self._share.num_replicas
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((parts * x.shape[1], *x.shape[2:]), x.dtype), rows)

    def _place(self, leaf: LeafLayout, local: np.ndarray) -> Any:
        part_rows, is_complete = local.shape[1], len(self._slots) == self._share.num_replicas
        # Rows of some parts only: the stored array is split along its dimension of parts, or of rows, as the parts are.
        is_by_part = leaf.split_dim == 0 and not is_complete
        stored = local if is_by_part else leaf.stored(local.reshape(-1, *local.shape[2:]))
        dim, size = (0, 1) if is_by_part else (int(leaf.is_per_replica), part_rows)

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            if is_complete:
                return stored[index]
            start, stop, _ = index[dim].indices(leaf.shape[dim])
            first = self._slots[start // size] * size + start % size
            return stored[(*index[:dim], slice(first, first + stop - start), *index[dim + 1 :])]

        return leaf.wrap(jax.make_array_from_callback(leaf.shape, leaf.sharding, block))
