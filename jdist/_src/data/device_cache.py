"""Arrays that are stored on the devices, and their batches: `cache="device"` of `distribute_dataset`.

A batch consists of indices, which the step's program uses to gather the examples. The indices of many batches are transferred
together. Order, positions and weights are those of `jdist._src.data.batches`.
"""

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.core.tree import PyTree
from jdist._src.data.array_rows import float64_warning, to_32_bits
from jdist._src.data.batches import LocalBatch, Position
from jdist._src.data.config import InputConfig
from jdist._src.data.placement import RowPlacement
from jdist._src.data.shards import ProcessShare
from jdist._src.data.shuffle import ExampleOrder
from jdist._src.data.sources import Arrays
from jdist._src.devices.mesh import Replicas
from jdist._src.values.cached_rows import BatchNumber, CachedRows
from jdist._src.values.per_replica import PerReplica

# The number of batches whose indices are transferred together; also the largest `steps_per_call` that gathers them together.
_GROUP = 64


class DeviceCache:
    """The arrays of a data set on the devices, transferred when the first batch is read.

    Args:
        config: The source, which consists of arrays, and its options.
        replicas: The replicas. Each of their devices stores all arrays.
    """

    def __init__(self, config: InputConfig, replicas: Replicas):
        assert isinstance(config.source, Arrays)
        self._source, self._warn, self._replicas = config.source, config.warn, replicas
        self._arrays: PyTree = None
        self._indices: list[jax.Array] = []  # 0, 1, ... on the devices

    def batches(
        self, config: InputConfig, share: ProcessShare, start: Position, should_stop: Callable[[], bool]
    ) -> Generator[LocalBatch]:
        """Yields the batches from `start` on."""
        place = RowPlacement(self._replicas, share)
        sequence, numbers = object(), itertools.count()
        full_weights: Any = None
        batches = _index_batches(config, share, start)
        upcoming = list(itertools.islice(batches, 2 * _GROUP))
        while upcoming:
            with jax.transfer_guard_host_to_device("allow"):
                leaves, treedef = self._on_devices()
                indices = self._transfer([batch.rows for batch in upcoming])
            for batch, index in zip(upcoming[:_GROUP], self._indices, strict=False):
                number = BatchNumber(sequence, next(numbers))
                rows = treedef.unflatten([CachedRows(leaf, indices, index, number) for leaf in leaves])
                weights = batch.weights
                if weights is not None:
                    is_full = batch.examples == config.batch_size
                    if not is_full or full_weights is None or full_weights.is_deleted():
                        with jax.transfer_guard_host_to_device("allow"):
                            weights = place(weights)
                        full_weights = weights if is_full else full_weights
                    weights = PerReplica(full_weights if is_full else weights)
                yield batch._replace(rows=rows, weights=weights)
            upcoming = [*upcoming[_GROUP:], *itertools.islice(batches, _GROUP)]

    def _on_devices(self) -> tuple[list[jax.Array], Any]:
        """Returns the arrays on the devices.

        Raises:
            ValueError: The arrays do not fit in the memory of a device.
        """
        if self._arrays is None:
            arrays = self._source.tree
            if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
                if warning := float64_warning(arrays):
                    self._warn(warning)
                arrays = to_32_bits(arrays)
            _check_memory(sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)), self._replicas)
            sharding = self._replicas.replicated_sharding
            self._arrays = jax.device_put(arrays, sharding)
            self._indices = jax.device_put([np.int32(i) for i in range(_GROUP)], sharding)
        return jax.tree.flatten(self._arrays)

    def _transfer(self, rows: list[np.ndarray]) -> jax.Array:
        """Returns the indices of these batches on the devices, `[2 * _GROUP, replica, row]`."""
        first = rows[0]
        indices = np.zeros((2 * _GROUP, 1, first.size) if self._replicas.batch_axes else (2 * _GROUP, *first.shape), np.int32)
        indices[: len(rows)] = np.stack(rows).reshape(len(rows), *indices.shape[1:])
        spec = self._replicas.batch_sharding(indices.shape[1:]).spec
        return jax.device_put(indices, NamedSharding(self._replicas.mesh, PartitionSpec(None, *spec)))


def _index_batches(config: InputConfig, share: ProcessShare, start: Position) -> Iterator[LocalBatch]:
    """Yields the batches of a single process, with the indices of the examples in place of their rows."""
    size, count = config.batch_size, config.num_examples(share)
    assert size is not None and count is not None
    ((_, _, rows),) = share.rows_of_shards(size, 1)
    shape = (share.num_replicas, share.rows_per_replica(size))
    full_weights = (rows < size).astype(np.float32).reshape(shape) if config.remainder == "pad" else None
    for epoch in itertools.count(start.epoch) if config.epochs is None else range(start.epoch, config.epochs):
        order = ExampleOrder(count, config.shuffle, config.seed)
        first = start.batch if epoch == start.epoch else 0
        for number, indices in enumerate(order.batches(epoch, size, first), first):
            if len(indices) < size and config.remainder != "pad":
                break
            missing = len(rows) - len(indices)
            padded = np.concatenate([indices, np.repeat(indices[:1], missing)]) if missing else indices
            weights = full_weights
            if weights is not None and len(indices) < size:
                weights = (rows < len(indices)).astype(np.float32).reshape(shape)
            position = Position(epoch, number + 1, size, start.shards)
            yield LocalBatch(padded.reshape(shape), weights, len(indices), position)


def _check_memory(num_bytes: int, replicas: Replicas) -> None:
    """Raises ValueError if a device of this process reports less free memory than `num_bytes`."""
    for device in replicas.mesh.local_devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            continue
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        if num_bytes > free:
            raise ValueError(
                f'cache="device" stores {num_bytes / 1e9:,.2f} GB on each device, and {device} has {max(0, free) / 1e9:,.2f} GB '
                "of memory left. Omit `cache`, so that batches are transferred before the steps."
            )
