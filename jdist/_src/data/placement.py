"""Transfer of the rows of a batch to the devices of their replicas."""

import jax
import numpy as np

from jdist._src.data.shards import ProcessShare
from jdist._src.devices.mesh import Replicas


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
        self._blocks: dict[int, slice] = {}  # by the first replica of a device: its slots
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
