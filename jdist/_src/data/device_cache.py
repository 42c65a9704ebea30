"""Arrays that are stored on the devices, and their batches: `cache="device"` of `distribute_dataset`.

One program gathers the examples of a group of batches; only indices are transferred. Order, positions and weights are those of
`jdist._src.data.batches`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._src.data.array_rows import float64_warning, to_32_bits
from jdist._src.data.batches import LocalBatch, Position
from jdist._src.data.config import InputConfig
from jdist._src.data.placement import RowPlacement
from jdist._src.data.shards import ProcessShare
from jdist._src.data.shuffle import ExampleOrder
from jdist._src.data.sources import Arrays
from jdist._src.devices.mesh import Replicas
from jdist._src.values.per_replica import PerReplica

# A group has at most this number of batches, and of bytes on all devices together, but at least one batch.
_GROUP, _GROUP_BYTES = 32, 1 << 26


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

    def batches(
        self, config: InputConfig, share: ProcessShare, start: Position, should_stop: Callable[[], bool]
    ) -> Generator[LocalBatch]:
        """Yields the batches from `start` on."""
        size, num_batches = config.batch_size, config.num_batches(share)
        assert size is not None and num_batches is not None
        weights = self._weights(size, share) if config.remainder == "pad" else None
        treedef = jax.tree.structure(self._source.tree)
        with jax.transfer_guard_host_to_device("allow"):
            group_size = self._group_size(size, num_batches)
        for group in _groups(config, share, start, num_batches, group_size):
            with jax.transfer_guard_host_to_device("allow"):
                leaves = self._gathered(group.indices, group_size)
            # Made together: Python code that runs between two steps takes about three times as long as in a loop.
            rows = [treedef.unflatten(map(PerReplica, batch)) for batch in leaves]
            weights_of_batches = itertools.repeat(None) if weights is None else map(weights, group.examples)
            positions = [
                Position(group.epoch, group.first + i + 1, size, start.shards) for i in range(len(group.examples))
            ]
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

    def _group_size(self, batch_size: int, num_batches: int) -> int:
        """Returns the number of batches in a group; puts the arrays on the devices.

        The groups of an epoch have almost equal sizes, because the program gathers the same number of batches for each.

        Raises:
            ValueError: The arrays do not fit in the memory of a device.
        """
        if not self._leaves:
            arrays = self._source.tree
            if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
                if warning := float64_warning(arrays):
                    self._warn(warning)
                arrays = to_32_bits(arrays)
            leaves = jax.tree.leaves(arrays)
            _check_memory(sum(array.nbytes for array in leaves), self._replicas)
            self._leaves = jax.device_put(leaves, self._replicas.replicated_sharding)
        bytes_per_batch = batch_size * sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in self._leaves)
        largest = max(1, min(_GROUP, _GROUP_BYTES // max(1, bytes_per_batch)))
        return -(-num_batches // max(1, -(-num_batches // largest)))

    def _gathered(self, indices: np.ndarray, group_size: int) -> list[list[jax.Array]]:
        """Returns the leaves of each batch, `[replica, row, ...]`, and of unused batches up to `group_size`.

        Args:
            indices: The indices of the examples, `[replica, batch, row]`.
            group_size: The number of batches that the program gathers.
        """
        replicas = self._replicas
        group = np.zeros((len(indices), group_size, indices.shape[2]), np.uint32)
        group[:, : indices.shape[1]] = indices
        if replicas.batch_axes:  # there is one replica, with the rows of all parts of the batch
            group = group.swapaxes(0, 1).reshape(1, group_size, -1)
        spec = replicas.batch_sharding((len(group), group.shape[2])).spec
        group_spec = PartitionSpec(*spec[:1], None, *spec[1:])
        placed = jax.device_put(group, NamedSharding(replicas.mesh, group_spec))
        return _gather(self._leaves, placed, replicas.mesh, group_spec, spec)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _gather(
    arrays: list[jax.Array], indices: jax.Array, mesh: Mesh, group_spec: PartitionSpec, spec: PartitionSpec
) -> list[list[jax.Array]]:
    """Returns the leaves of each batch, `[replica, row, ...]`, given the indices of their rows, `[replica, batch, row]`.

    Each device gathers its own rows. The program has no collectives, so on CPU devices it may run beside a step.
    """

    def gather(arrays: list[jax.Array], indices: jax.Array) -> list[list[jax.Array]]:
        # JAX adds instructions for negative indices, except for those of unsigned types.
        leaves = [array.at[indices].get(mode="promise_in_bounds") for array in arrays]
        return [[leaf[:, batch] for leaf in leaves] for batch in range(indices.shape[1])]

    in_specs = PartitionSpec(), group_spec
    return jax.shard_map(gather, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(arrays, indices)


_local_batch = functools.partial(tuple.__new__, LocalBatch)  # as `LocalBatch._make`, in half the time


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
