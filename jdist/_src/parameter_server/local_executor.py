"""`LocalExecutor`: workers and servers on the devices of one process.

The host program starts the part of a worker, which then runs on the device of the worker while the host program continues.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jdist._src.parameter_server.executor import Executor, StepCall
from jdist._src.parameter_server.storage import LeafStorage, Shard, joined, to_arrays


class _Work(NamedTuple):
    """The arrays that a worker computes.

    Attributes:
        number: The number of the work.
        sent: Its values for each server.
        outputs: Its outputs.
        is_finite: Whether all values for the servers are finite, or None if this is not tested.
    """

    number: int
    sent: list[list[jax.Array]]
    outputs: list[jax.Array]
    is_finite: jax.Array | None

    def last_results(self) -> list[Any]:
        """Returns one result: all results of a program are ready together."""
        return [*(x for values in self.sent for x in values), *self.outputs][-1:]


class LocalExecutor(Executor):
    """Workers and servers on the devices of this process.

    Mutable: it caches small numbers on the devices, and holds old parameters whose memory gradients reuse.

    Args:
        workers: The device of each worker.
        servers: The device of each server.
        host_sharding: The sharding of values that are read.
        tests_finite: Whether workers test the values that they send.
    """

    def __init__(
        self,
        workers: Sequence[jax.Device],
        servers: Sequence[jax.Device],
        host_sharding: Sharding,
        *,
        tests_finite: bool,
    ):
        super().__init__(len(workers), len(servers), host_sharding, tests_finite)
        self.workers, self.servers = workers, servers
        self._numbers: dict[Any, jax.Array] = {}
        self._in_progress: set[int] = set()  # the works
        self._num_works = 0
        # New memory of some megabytes costs more than the computation: the system clears it page by page.
        self._reuses_memory = len({*workers, *servers}) == 1
        self._unused: list[tuple[frozenset[int], jax.Array]] = []  # with the works that may read them

    def store(self, value: Any, shards: tuple[Shard, ...]) -> LeafStorage:
        """See `Executor.store`."""
        arrays = to_arrays(value, shards, self.servers)
        return LeafStorage(value.shape, arrays[0].dtype, shards, arrays)

    def replace(self, storage: LeafStorage, value: Any, shards: tuple[Shard, ...]) -> None:
        """See `Executor.replace`."""
        storage.shards, storage.arrays = shards, to_arrays(value, shards, self.servers)

    def read(self, storage: LeafStorage) -> jax.Array:
        """See `Executor.read`."""
        arrays = jax.device_put(storage.arrays, self._host_sharding, may_alias=False)
        return jax.device_put(joined(arrays, storage.shards), self._host_sharding)

    def start(self, worker: int, call: StepCall, num_in_progress: int) -> tuple[_Work, list[jax.Array]]:
        """See `Executor.start`."""
        device, parts = self.workers[worker], call.parts
        arrays = [_on_device(call.storages[number].arrays, device) for number in parts.read_leaves]
        number = self._number(np.int32(num_in_progress), device)
        pulled = self._pull(call) if parts.tables else []
        reused = self._reused(parts.reused, device)
        sent, outputs = parts.worker(reused, arrays, pulled, _on_device(list(call.inputs), device), number)
        is_finite = all_finite(sent) if self._tests_finite else None
        self._num_works += 1
        self._in_progress.add(self._num_works)
        return _Work(self._num_works, sent, outputs, is_finite), outputs

    def wait_for_any(self, works: Sequence[_Work], *, timeout: float | None) -> int | None:
        """See `Executor.wait_for_any`. Does not wait: all works run on devices of this process, which `results` waits for."""
        done = (i for i, work in enumerate(works) if all(x.is_ready() for x in work.last_results()))
        return next(done, None if timeout == 0 else 0)

    def results(self, work: _Work) -> tuple[list[Any], bool]:
        """See `Executor.results`."""
        self._in_progress.discard(work.number)
        jax.block_until_ready(work.last_results())
        return work.outputs, work.is_finite is None or bool(work.is_finite)

    def apply(self, work: _Work, call: StepCall, staleness: int) -> None:
        """See `Executor.apply`."""
        for number, server in enumerate(call.parts.servers):
            if not server.changed:
                continue
            device = self.servers[number]
            stored = lambda keys: [call.storages[leaf].arrays[array_index] for leaf, array_index in keys]
            values = _on_device(work.sent[number], device)
            reused = [*stored(server.donated), *(values[i] for i in server.donated_values)]
            others = [*stored(server.kept), *(values[i] for i in server.kept_values)]
            new = server.run(reused, others, self._number(np.float32(staleness), device))
            for key, array in zip(server.changed, new, strict=True):
                self._replace_array(call.storages, key, array, is_donated=key in server.donated)

    def flush(self) -> None:
        """See `Executor.flush`. An update on the devices of this process raises its error where its results are read."""
        self._unused.clear()

    def _pull(self, call: StepCall) -> list[Any]:
        """Returns the rows of tables that a worker needs. They are copied, because an update changes the tables in place."""
        device = self.servers[0]
        tables = [_on_device(call.storages[number].arrays, device) for number in call.parts.tables]
        return call.parts.pull(tables, _on_device(list(call.inputs), device))

    def _replace_array(
        self, storages: Sequence[LeafStorage], key: tuple[int, int], array: jax.Array, *, is_donated: bool
    ) -> None:
        leaf, array_index = key
        arrays = storages[leaf].arrays
        if self._reuses_memory and not is_donated:
            self._unused.append((frozenset(self._in_progress), arrays[array_index]))
        arrays[array_index] = array

    def _reused(self, shapes: Sequence[jax.ShapeDtypeStruct], device: jax.Device) -> list[jax.Array]:
        """Returns arrays whose memory a worker reuses: parameters that were replaced, and that no work reads any more."""
        if not self._reuses_memory:
            return []
        free: dict[Any, list[jax.Array]] = {}
        for readers, array in self._unused:
            if readers.isdisjoint(self._in_progress):
                free.setdefault((array.shape, array.dtype), []).append(array)
        self._unused = [item for item in self._unused if not item[0].isdisjoint(self._in_progress)]
        pools = [free.get((shape.shape, shape.dtype)) for shape in shapes]
        return [
            pool.pop() if pool else jax.device_put(np.empty(shape.shape, shape.dtype), device, may_alias=False)
            for pool, shape in zip(pools, shapes, strict=True)
        ]

    def _number(self, number: np.generic, device: jax.Device) -> jax.Array:
        """Returns a small number on a device, once for all calls."""
        key = number.dtype, int(number), device
        if key not in self._numbers:
            self._numbers[key] = jax.device_put(number, device)
        return self._numbers[key]


@jax.jit
def all_finite(arrays: Any) -> jax.Array:
    """Returns whether all floating-point numbers of a tree are finite."""
    floats = [x for x in jax.tree.leaves(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats] or [jnp.bool_(True)]).all()


def _on_device(arrays: list[Any], device: jax.Device) -> list[Any]:
    """Returns `arrays` on a device. Unchanged if all of them are on it: `jax.device_put` takes longer to find that."""
    is_on_device = all(isinstance(x, jax.Array) and x.devices() == {device} for x in arrays)
    return arrays if is_on_device else jax.device_put(arrays, device)
