"""Arrays that are stored on the devices, and their batches: `cache="device"` of `distribute_dataset`.

A program gathers the examples of a group of batches when one of them is read; only indices are transferred. Order, positions
and weights are those of `jdist._src.data.batches`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._src.data.array_rows import canonicalize_dtypes, float64_warning
from jdist._src.data.batches import LocalBatch, Position
from jdist._src.data.config import InputConfig
from jdist._src.data.placement import RowPlacement
from jdist._src.data.shards import ProcessShare
from jdist._src.data.shuffle import ExampleOrder
from jdist._src.data.sources import Arrays
from jdist._src.devices.mesh import Replicas
from jdist._src.values.per_replica import PerReplica, unread
from jdist._src.values.unread_rows import BatchGroup, StackedRows, UnreadRows

# The largest numbers of batches that one program makes: as arrays of each batch, or stacked. A program with arrays of each
# batch takes long to compile. One program makes fewer, but at least one, if they have more bytes on all devices together.
_MAX_GROUP, _MAX_STACKED, _MAX_BYTES = 32, 256, 1 << 26


class DeviceCache:
    """The arrays of a data set on the devices, transferred when the first batch is read.

    Args:
        config: The source, which consists of arrays, and its options.
        replicas: The replicas. Each of their devices stores all arrays.
    """

    def __init__(self, config: InputConfig, replicas: Replicas):
        assert isinstance(config.source, Arrays)
        self._source, self._warn, self._replicas = config.source, config.warn, replicas
        self._leaves: list[jax.Array] = []
        self._indices: dict[int, jax.Array] = {}  # the results of `placed_index`

    def batches(
        self, config: InputConfig, share: ProcessShare, start: Position, should_stop: Callable[[], bool]
    ) -> Generator[LocalBatch]:
        """Yields the batches from `start` on."""
        size, num_batches = config.batch_size, config.num_batches(share)
        assert size is not None and num_batches is not None
        weights = self._weights(size, share) if config.remainder == "pad" else None
        treedef = jax.tree.structure(self._source.tree)
        self._put_arrays()
        group_size, stacked_size = self._group_size(size, num_batches), self._stacked_size(size, num_batches)
        for epoch in _epochs(config, share, start, num_batches, stacked_size):
            for first in range(start.batch if epoch.number == start.epoch else 0, num_batches, group_size):
                group = _Group(self, epoch, first, group_size)
                examples = epoch.examples[first : first + group_size]
                # Made together: Python code that runs between two steps takes about three times as long as in a loop.
                leaves = range(len(self._leaves))
                rows = [
                    treedef.unflatten([unread(UnreadRows(group, batch, leaf)) for leaf in leaves])
                    for batch in range(len(examples))
                ]
                weights_of_batches = itertools.repeat(None) if weights is None else map(weights, examples)
                positions = [Position(epoch.number, first + i + 1, size, start.shards) for i in range(len(examples))]
                batches = zip(rows, weights_of_batches, examples, positions, itertools.repeat(None), strict=False)
                yield from map(_local_batch, batches)

    def _weights(self, size: int, share: ProcessShare) -> Callable[[int], PerReplica]:
        """Returns a function that returns the weights of a batch with a number of examples, on the devices."""
        placement = RowPlacement(self._replicas, share)
        shape = share.num_replicas, share.rows_per_replica(size)
        full_weights: PerReplica | None = None

        def weights(examples: int) -> PerReplica:
            nonlocal full_weights
            if examples == size and full_weights is not None and not full_weights.tree.is_deleted():
                return full_weights
            rows = np.arange(math.prod(shape)).reshape(shape)
            with jax.transfer_guard_host_to_device("allow"):
                placed = placement.weights((rows < examples).astype(np.float32))
            full_weights = placed if examples == size else full_weights
            return placed

        return weights

    def _put_arrays(self) -> None:
        """Puts the arrays on the devices, once.

        Raises:
            ValueError: The arrays do not fit in the memory of a device.
        """
        if self._leaves:
            return
        arrays = self._source.tree
        if warning := float64_warning(arrays):
            self._warn(warning)
        leaves = jax.tree.leaves(canonicalize_dtypes(arrays))
        _check_memory(sum(array.nbytes for array in leaves), self._replicas)
        with jax.transfer_guard_host_to_device("allow"):
            self._leaves = jax.device_put(leaves, self._replicas.replicated_sharding)

    def _group_size(self, batch_size: int, num_batches: int) -> int:
        """Returns the number of batches in a group.

        The groups of an epoch have almost equal sizes, because the program gathers the same number of batches for each.
        """
        largest = max(1, min(_MAX_GROUP, _MAX_BYTES // max(1, self._bytes_per_batch(batch_size))))
        return -(-num_batches // max(1, -(-num_batches // largest)))

    def _stacked_size(self, batch_size: int, num_batches: int) -> int:
        """Returns the number of batches that are stacked, a power of 2: a step is compiled again for each number."""
        size = min(_MAX_STACKED, 1 << (num_batches - 1).bit_length())
        while size > 1 and size * self._bytes_per_batch(batch_size) > _MAX_BYTES:
            size //= 2
        return size

    def _bytes_per_batch(self, batch_size: int) -> int:
        return batch_size * sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in self._leaves)

    def gathered(self, indices: np.ndarray, group_size: int) -> list[list[jax.Array]]:
        """Returns the leaves of each batch, `[replica, row, ...]`, and of unused batches up to `group_size`.

        Args:
            indices: The indices of the examples, `[replica, batch, row]`.
            group_size: The number of batches that the program gathers.
        """
        with jax.transfer_guard_host_to_device("allow"):
            return _gather(self._leaves, *self._placed(indices, group_size))

    def stacked(self, indices: np.ndarray, group_size: int) -> list[jax.Array]:
        """Returns the same as `gathered`, as leaves `[replica, batch, row, ...]`."""
        with jax.transfer_guard_host_to_device("allow"):
            placed, mesh, group_spec, _ = self._placed(indices, group_size)
            return _gather_stacked(self._leaves, placed, mesh, group_spec)

    def _placed(self, indices: np.ndarray, group_size: int) -> tuple[jax.Array, Mesh, PartitionSpec, PartitionSpec]:
        """Returns the indices on the devices, their mesh, and the partition specs of a group and of a batch."""
        replicas = self._replicas
        group = np.zeros((len(indices), group_size, indices.shape[2]), np.uint32)
        group[:, : indices.shape[1]] = indices
        if replicas.batch_axes:  # there is one replica, with the rows of all parts of the batch
            group = group.swapaxes(0, 1).reshape(1, group_size, -1)
        spec = replicas.batch_sharding((len(group), group.shape[2])).spec
        group_spec = PartitionSpec(*spec[:1], None, *spec[1:])
        placed = jax.device_put(group, NamedSharding(replicas.mesh, group_spec))
        return placed, replicas.mesh, group_spec, spec

    def placed_index(self, index: int) -> jax.Array:
        """Returns `index` on the devices, `[]`."""
        if index not in self._indices:
            with jax.transfer_guard_host_to_device("allow"):
                self._indices[index] = jax.device_put(np.int32(index), self._replicas.replicated_sharding)
        return self._indices[index]


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _gather(
    arrays: list[jax.Array], indices: jax.Array, mesh: Mesh, group_spec: PartitionSpec, spec: PartitionSpec
) -> list[list[jax.Array]]:
    """Returns the leaves of each batch, `[replica, row, ...]`, given the indices of their rows, `[replica, batch, row]`.

    Each device gathers its own rows. The program has no collectives, so on CPU devices it may run beside a step.
    """

    def gather(arrays: list[jax.Array], indices: jax.Array) -> list[list[jax.Array]]:
        leaves = _rows(arrays, indices)
        return [[leaf[:, batch] for leaf in leaves] for batch in range(indices.shape[1])]

    in_specs = PartitionSpec(), group_spec
    return jax.shard_map(gather, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(arrays, indices)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gather_stacked(
    arrays: list[jax.Array], indices: jax.Array, mesh: Mesh, group_spec: PartitionSpec
) -> list[jax.Array]:
    """Returns the same as `_gather`, as leaves `[replica, batch, row, ...]`."""
    in_specs = PartitionSpec(), group_spec
    return jax.shard_map(_rows, mesh=mesh, in_specs=in_specs, out_specs=group_spec, check_vma=False)(arrays, indices)


def _rows(arrays: list[jax.Array], indices: jax.Array) -> list[jax.Array]:
    # JAX adds instructions for negative indices, except for those of unsigned types.
    return [array.at[indices].get(mode="promise_in_bounds") for array in arrays]


_local_batch = functools.partial(tuple.__new__, LocalBatch)  # as `LocalBatch._make`, in half the time


class _Stacked(NamedTuple):
    """Batches that were stacked.

    Attributes:
        order: The key of the epoch and the number of each batch.
        places: The first index of each batch in `order`.
        leaves: The leaves of the batches, `[replica, batch, row, ...]`.
    """

    order: list[tuple[object, int]]
    places: dict[tuple[object, int], int]
    leaves: list[jax.Array]


@dataclasses.dataclass(eq=False)
class _Epoch:
    """The batches of an epoch.

    Mutable: it holds the batches that were stacked last.

    Attributes:
        number: The number of the epoch.
        examples: The number of examples in each batch.
        indices: The indices of their examples, `[replica, batch, row]`.
        stacked_size: The number of batches that are stacked together, or more where a call takes more.
        stacked: The batches that were stacked last.
        key: Names the epoch in `stacked`, without a cycle of references, which would keep its arrays for a while.
    """

    number: int
    examples: list[int]
    indices: np.ndarray
    stacked_size: int
    stacked: _Stacked = _Stacked([], {}, [])
    key: object = dataclasses.field(default_factory=object)


class _Group(BatchGroup):
    """Successive batches of an epoch, which one program gathers when the first of them is read.

    Args:
        cache: The arrays.
        epoch: The epoch.
        first: The number of the first of the batches in the epoch.
        size: The number of batches; the last group of an epoch may have fewer.
    """

    def __init__(self, cache: DeviceCache, epoch: _Epoch, first: int, size: int):
        self._cache, self._epoch, self._first, self._size = cache, epoch, first, size

    def leaves(self, number: int) -> list[jax.Array]:
        return self._leaves[number]

    @functools.cached_property
    def _leaves(self) -> list[list[jax.Array]]:
        indices = self._epoch.indices[:, self._first : self._first + self._size]
        return self._cache.gathered(indices, self._size)

    def stacked(self, rows: Sequence[UnreadRows]) -> StackedRows | None:
        batches, leaf = [], rows[0].leaf
        for row in rows:
            group = row.group
            if not isinstance(group, _Group) or group._cache is not self._cache or row.leaf != leaf:
                return None
            batches.append((group._epoch, group._first + row.number))
        keys = [(epoch.key, number) for epoch, number in batches]
        order, places, leaves = self._epoch.stacked
        start = places.get(keys[0], 0)
        if order[start : start + len(keys)] != keys:
            # The next calls take the batches after these.
            epoch, last = batches[-1]
            following = [(epoch, number) for number in range(last + 1, len(epoch.examples))]
            size, start = max(self._epoch.stacked_size, len(batches)), 0
            batches = [*batches, *following][:size]
            order = [(epoch.key, number) for epoch, number in batches]
            places = {key: place for place, key in reversed(list(enumerate(order)))}
            indices = np.stack([epoch.indices[:, number] for epoch, number in batches], axis=1)
            leaves = self._cache.stacked(indices, size)
            self._epoch.stacked = _Stacked(order, places, leaves)
        return StackedRows(leaves[leaf], self._cache.placed_index(start))


def _epochs(
    config: InputConfig, share: ProcessShare, start: Position, num_batches: int, stacked_size: int
) -> Iterator[_Epoch]:
    """Yields the batches of a single process, `num_batches` in each epoch, from the epoch of `start` on."""
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
        yield _Epoch(epoch, examples, rows.reshape(num_batches, *shape).swapaxes(0, 1), stacked_size)


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
