"""Arrays that are stored on the devices, and their batches: `cache="device"` of `distribute_dataset`.

A batch consists of indices, which the step's program uses to gather the examples. The indices of many batches are transferred
together. Order, positions and weights are those of `jdist._src.data.batches`.
"""

import collections
import itertools
import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

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

# The number of batches that are transferred together, and the number of batches after them that are transferred too, so that
# `steps_per_call` successive batches are in one array.
_GROUP, _AHEAD = 256, 16
# On CPU devices, whose memory is the host's, XLA gathers more slowly than numpy. There the host copies the examples of a group
# if they have at most this number of bytes.
_MAX_COPIED_BYTES = 1 << 24


class DeviceCache:
    """The arrays of a data set on the devices, transferred when the first batch is read.

    Args:
        config: The source, which consists of arrays, and its options.
        replicas: The replicas. Each of their devices stores all arrays.
    """

    def __init__(self, config: InputConfig, replicas: Replicas):
        assert isinstance(config.source, Arrays)
        self._source, self._warn, self._replicas = config.source, config.warn, replicas
        self._host_leaves: list[np.ndarray] = []
        self._leaves: list[jax.Array] = []
        self._indices: list[jax.Array] = []  # 0, 1, ... on the devices

    def batches(
        self, config: InputConfig, share: ProcessShare, start: Position, should_stop: Callable[[], bool]
    ) -> Generator[LocalBatch]:
        """Yields the batches from `start` on."""
        place = RowPlacement(self._replicas, share)
        sequence, numbers = object(), itertools.count()
        full_weights: PerReplica | None = None
        for indices, batches in _with_next(_groups(config, share, start)):
            with jax.transfer_guard_host_to_device("allow"):
                leaves, treedef = self._on_devices(indices)
            available = len(indices)
            for batch, index in zip(batches, self._indices, strict=False):
                position, examples, host_weights = batch
                number = BatchNumber(sequence, next(numbers), available)
                available -= 1
                rows = treedef.unflatten([CachedRows(array, rows, index, number) for array, rows in leaves])
                weights = full_weights if examples == config.batch_size else None
                if host_weights is not None and (weights is None or weights.tree.is_deleted()):
                    with jax.transfer_guard_host_to_device("allow"):
                        weights = PerReplica(place(host_weights))
                    full_weights = weights if examples == config.batch_size else full_weights
                yield LocalBatch(rows, weights, examples, position)

    def _on_devices(self, indices: np.ndarray) -> tuple[list[tuple[jax.Array | None, jax.Array]], Any]:
        """Returns `array` and `batches` of `CachedRows` for each leaf, given indices `[batch, replica, row]`; and the treedef.

        Raises:
            ValueError: The arrays do not fit in the memory of a device.
        """
        if not self._host_leaves:
            arrays = self._source.tree
            if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
                if warning := float64_warning(arrays):
                    self._warn(warning)
                arrays = to_32_bits(arrays)
            self._host_leaves = jax.tree.leaves(arrays)
            self._indices = jax.device_put([np.uint32(i) for i in range(_GROUP)], self._replicas.replicated_sharding)
        treedef = jax.tree.structure(self._source.tree)
        num_bytes = indices.size * sum(leaf.nbytes // len(leaf) for leaf in self._host_leaves)
        if self._replicas.mesh.devices.flat[0].platform == "cpu" and num_bytes <= _MAX_COPIED_BYTES:
            return [(None, self._transfer(leaf.take(indices, axis=0))) for leaf in self._host_leaves], treedef
        if not self._leaves:
            _check_memory(sum(leaf.nbytes for leaf in self._host_leaves), self._replicas)
            self._leaves = jax.device_put(self._host_leaves, self._replicas.replicated_sharding)
        device_indices = self._transfer(indices)
        return [(leaf, device_indices) for leaf in self._leaves], treedef

    def _transfer(self, batches: np.ndarray) -> jax.Array:
        """Returns `[batch, replica, row, ...]` on the devices."""
        if self._replicas.batch_axes:  # there is one replica, with the rows of all parts of the batch
            batches = batches.reshape(len(batches), 1, -1, *batches.shape[3:])
        spec = self._replicas.batch_sharding(batches.shape[1:]).spec
        return jax.device_put(batches, NamedSharding(self._replicas.mesh, PartitionSpec(None, *spec)))


class _IndexBatch(NamedTuple):
    """A batch without the indices of its examples.

    Attributes:
        position: The position after the batch.
        examples: The number of examples.
        weights: The weights `[replica, row]`; None unless batches are padded.
    """

    position: Position
    examples: int
    weights: np.ndarray | None


class _Group(NamedTuple):
    """At most `_GROUP` successive batches of an epoch.

    Attributes:
        indices: The indices of their examples, `[batch, replica, row]`.
        batches: The batches.
    """

    indices: np.ndarray
    batches: list[_IndexBatch]


def _with_next(groups: Iterator[_Group]) -> Iterator[_Group]:
    """Yields the groups with the indices of the batches after them appended, `[_GROUP + _AHEAD, replica, row]`."""
    size = _GROUP + _AHEAD
    upcoming: collections.deque[_Group] = collections.deque()
    while True:
        while sum(len(group.indices) for group in upcoming) < size and (group := next(groups, None)) is not None:
            upcoming.append(group)
        if not upcoming:
            return
        joined = np.concatenate([group.indices for group in upcoming])[:size]
        indices = np.zeros((size, *joined.shape[1:]), np.uint32)
        indices[: len(joined)] = joined
        yield _Group(indices, upcoming.popleft().batches)


def _groups(config: InputConfig, share: ProcessShare, start: Position) -> Iterator[_Group]:
    """Yields the batches of a single process from `start` on."""
    size, count = config.batch_size, config.num_examples(share)
    assert size is not None and count is not None
    shape = (share.num_replicas, share.rows_per_replica(size))
    slots = np.arange(math.prod(shape)).reshape(shape)
    is_padded = config.remainder == "pad"
    full_weights = (slots < size).astype(np.float32) if is_padded else None
    num_batches = -(-count // size) if is_padded else count // size
    order = ExampleOrder(count, config.shuffle, config.seed)
    for epoch in itertools.count(start.epoch) if config.epochs is None else range(start.epoch, config.epochs):
        indices = order.epoch(epoch)[: num_batches * size].astype(np.uint32)
        if rest := len(indices) % size:
            # Padding repeats the first example of its batch.
            indices = np.concatenate([indices, np.repeat(indices[-rest], size - rest)])
        rows = indices.reshape(num_batches, size)
        if padding := slots.size - size:
            rows = np.concatenate([rows, np.repeat(rows[:, :1], padding, axis=1)], axis=1)
        rows = rows.reshape(num_batches, *shape)
        for first in range(start.batch if epoch == start.epoch else 0, num_batches, _GROUP):
            numbers = range(first, min(first + _GROUP, num_batches))
            batches = [_IndexBatch(Position(epoch, i + 1, size, start.shards), size, full_weights) for i in numbers]
            if rest and numbers[-1] == num_batches - 1:
                batches[-1] = batches[-1]._replace(examples=rest, weights=(slots < rest).astype(np.float32))
            yield _Group(rows[first : first + _GROUP], batches)


def _check_memory(num_bytes: int, replicas: Replicas) -> None:
    """Raises ValueError if a device of this process reports less free memory than `num_bytes`."""
    for device in replicas.mesh.local_devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            continue
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        if num_bytes > free:
            raise ValueError(
                f'cache="device" stores {num_bytes / 1e9:,.2f} GB on each device, and {device} has '
                f"{max(0, free) / 1e9:,.2f} GB of memory left. Omit `cache`, so that batches are transferred before the steps."
            )
