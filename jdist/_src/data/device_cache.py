"""Arrays that are stored on the devices, and their batches: `cache="device"` of `distribute_dataset`.

A batch consists of indices, which the step's program uses to gather the examples. The indices of many batches are transferred
together. Order, positions and weights are those of `jdist._src.data.batches`.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jdist._src.data.array_rows import float64_warning, to_32_bits
from jdist._src.data.batches import LocalBatch, Position
from jdist._src.data.config import InputConfig
from jdist._src.data.placement import RowPlacement
from jdist._src.data.shards import ProcessShare
from jdist._src.data.shuffle import ExampleOrder
from jdist._src.data.sources import Arrays
from jdist._src.devices.mesh import Replicas
from jdist._src.values.cached_rows import BatchGroup, BatchOffset, CachedRows, spec_of_batches
from jdist._src.values.per_replica import PerReplica

# At most `_GROUP` batches are transferred together, and with them the `_AHEAD` batches after them, so that `steps_per_call`
# successive batches are in one array.
_GROUP, _AHEAD = 1024, 16
# On CPU devices, whose memory is the host's, XLA gathers more slowly than numpy. There the host copies the examples of groups
# of at most this number of bytes. If fewer than `_FEW` batches have this number of bytes, the program gathers.
_MAX_COPIED_BYTES, _FEW = 1 << 24, 64
_local_batch = functools.partial(tuple.__new__, LocalBatch)  # as `LocalBatch._make`, in half the time


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
        self._offsets: list[BatchOffset] = []  # 0, 1, ...

    def batches(
        self, config: InputConfig, share: ProcessShare, start: Position, should_stop: Callable[[], bool]
    ) -> Generator[LocalBatch]:
        """Yields the batches from `start` on."""
        size, num_batches = config.batch_size, config.num_batches(share)
        assert size is not None and num_batches is not None
        weights = self._weights(size, share) if config.remainder == "pad" else None
        with jax.transfer_guard_host_to_device("allow"):
            group_size, copies = self._group_size(size, num_batches)
            if not self._indices:
                numbers = [np.uint32(i) for i in range(group_size)]
                self._indices = jax.device_put(numbers, self._replicas.replicated_sharding)
                self._offsets = [BatchOffset(i) for i in range(group_size)]
        sequence, first = object(), 0
        for group, indices in _with_next(_groups(config, share, start, num_batches, group_size), group_size + _AHEAD):
            with jax.transfer_guard_host_to_device("allow"):
                leaves, treedef = self._on_devices(indices, copies)
            count = len(group.examples)
            places = list(
                zip(itertools.repeat(BatchGroup(sequence, first, indices.shape[1]), count), self._offsets, strict=False)
            )
            first += count
            # A training loop draws the batches one by one, while the devices compute: little remains to be done for each.
            columns = [
                map(CachedRows, itertools.repeat(array), itertools.repeat(batches), self._indices, places)
                for array, batches in leaves
            ]
            rows = list(map(treedef.unflatten, zip(*columns, strict=False)))
            weights_of_batches = itertools.repeat(None) if weights is None else map(weights, group.examples)
            positions = [Position(group.epoch, group.first + i, size, start.shards) for i in range(1, count + 1)]
            batches = zip(rows, weights_of_batches, group.examples, positions, itertools.repeat(None), strict=False)
            yield from map(_local_batch, batches)

    def _weights(self, size: int, share: ProcessShare) -> Callable[[int], PerReplica]:
        """Returns a function that returns the weights of a batch with a number of examples, on the devices."""
        place = RowPlacement(self._replicas, share)
        shape = share.num_replicas, share.rows_per_replica(size)
        full_weights: PerReplica | None = None

        def weights(examples: int) -> PerReplica:
            nonlocal full_weights
            if examples == size and full_weights is not None and not full_weights.tree.is_deleted():
                return full_weights
            slots = np.arange(math.prod(shape)).reshape(shape)
            with jax.transfer_guard_host_to_device("allow"):
                placed = PerReplica(place((slots < examples).astype(np.float32)))
            full_weights = placed if examples == size else full_weights
            return placed

        return weights

    def _group_size(self, batch_size: int, num_batches: int) -> tuple[int, bool]:
        """Returns the number of batches in a group, and whether the host copies their examples.

        The arrays of all groups have one shape, which a smaller last group of an epoch would not fill: the groups have almost
        equal sizes.
        """
        bytes_per_batch = batch_size * sum(leaf.nbytes // len(leaf) for leaf in self._arrays())
        largest = min(_GROUP, _MAX_COPIED_BYTES // max(1, bytes_per_batch) - _AHEAD)
        is_on_cpu = self._replicas.mesh.devices.flat[0].platform == "cpu"
        copies = is_on_cpu and largest >= min(_FEW, num_batches)
        size = -(-num_batches // max(1, -(-num_batches // (largest if copies else _GROUP))))
        return size, copies

    def _arrays(self) -> list[np.ndarray]:
        """Returns the arrays with the dtypes that they have on the devices."""
        if not self._host_leaves:
            arrays = self._source.tree
            if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
                if warning := float64_warning(arrays):
                    self._warn(warning)
                arrays = to_32_bits(arrays)
            self._host_leaves = jax.tree.leaves(arrays)
        return self._host_leaves

    def _on_devices(self, indices: np.ndarray, copies: bool) -> tuple[list[tuple[jax.Array | None, jax.Array]], Any]:
        """Returns `array` and `batches` of `CachedRows` for each leaf, and the treedef.

        Args:
            indices: The indices of the examples, `[replica, batch, row]`.
            copies: Whether the host copies the examples.

        Raises:
            ValueError: The arrays do not fit in the memory of a device.
        """
        replicas, treedef = self._replicas, jax.tree.structure(self._source.tree)
        if replicas.batch_axes:  # there is one replica, with the rows of all parts of the batch
            indices = indices.swapaxes(0, 1).reshape(1, indices.shape[1], -1)
        spec = replicas.batch_sharding((len(indices), indices.shape[2])).spec
        sharding = NamedSharding(replicas.mesh, spec_of_batches(spec))
        if copies:
            examples = jax.device_put([_take(array, indices) for array in self._arrays()], sharding)
            return [(None, batches) for batches in examples], treedef
        if not self._leaves:
            _check_memory(sum(array.nbytes for array in self._arrays()), replicas)
            self._leaves = jax.device_put(self._arrays(), replicas.replicated_sharding)
        device_indices = jax.device_put(indices, sharding)
        return [(leaf, device_indices) for leaf in self._leaves], treedef


def _take(array: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns the rows of `array` in memory that is aligned to 64 bytes: XLA uses it on CPU devices without a copy."""
    shape = (*indices.shape, *array.shape[1:])
    num_bytes = math.prod(shape) * array.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    rows = memory[start : start + num_bytes].view(array.dtype).reshape(shape)
    return array.take(indices, axis=0, out=rows, mode="clip")  # with "raise", numpy would fill a buffer first


class _Group(NamedTuple):
    """Successive batches of an epoch.

    Attributes:
        epoch: The epoch.
        first: The number of the first of the batches in the epoch.
        examples: The number of examples in each batch.
        indices: The indices of their examples, `[replica, batch, row]`.
    """

    epoch: int
    first: int
    examples: list[int]
    indices: np.ndarray


def _with_next(groups: Iterator[_Group], size: int) -> Iterator[tuple[_Group, np.ndarray]]:
    """Yields each group, and its indices with those of the batches after it: `size` in all, `[replica, batch, row]`."""
    upcoming: collections.deque[_Group] = collections.deque()
    while True:
        while sum(len(group.examples) for group in upcoming) < size and (group := next(groups, None)) is not None:
            upcoming.append(group)
        if not upcoming:
            return
        joined = np.concatenate([group.indices for group in upcoming], axis=1)[:, :size]
        indices = np.zeros((len(joined), size, joined.shape[2]), np.uint32)
        indices[:, : joined.shape[1]] = joined
        yield upcoming.popleft(), indices


def _groups(
    config: InputConfig, share: ProcessShare, start: Position, num_batches: int, group_size: int
) -> Iterator[_Group]:
    """Yields the batches of a single process from `start` on: `num_batches` in each epoch, at most `group_size` in a group."""
    size, count = config.batch_size, config.num_examples(share)
    assert size is not None and count is not None
    shape = share.num_replicas, share.rows_per_replica(size)
    order = ExampleOrder(count, config.shuffle, config.seed)
    for epoch in itertools.count(start.epoch) if config.epochs is None else range(start.epoch, config.epochs):
        indices = order.epoch(epoch)[: num_batches * size].astype(np.uint32)
        examples = [size] * num_batches
        if rest := len(indices) % size:
            # Padding repeats the first example of its batch.
            indices = np.concatenate([indices, np.repeat(indices[-rest], size - rest)])
            examples[-1] = rest
        rows = indices.reshape(num_batches, size)
        if padding := math.prod(shape) - size:
            rows = np.concatenate([rows, np.repeat(rows[:, :1], padding, axis=1)], axis=1)
        rows = rows.reshape(num_batches, *shape).swapaxes(0, 1)
        for first in range(start.batch if epoch == start.epoch else 0, num_batches, group_size):
            group = slice(first, first + group_size)
            yield _Group(epoch, first, examples[group], rows[:, group])


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
