"""`LocalEngine`: workers and servers on the devices of one process.

The host program starts the part of a worker, which then runs on the device of the worker while the host program continues. A
call of the step applies the results of all workers that have finished, and starts the next worker; if all are busy, it waits
for one of them. Updates are applied one at a time, and all servers apply them in the same order, so that the state has one
version.
"""

import collections
import pathlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from jdist._src.core.tree import PyTree
from jdist._src.parameter_server import staleness
from jdist._src.parameter_server.event_log import open_log
from jdist._src.parameter_server.partitioners import row_ranges
from jdist._src.parameter_server.step_parts import StepParts
from jdist._src.parameter_server.storage import LeafStorage, Shard, joined, to_arrays


class WorkerProgress(NamedTuple):
    """The progress of a worker.

    Attributes:
        updates: The number of its updates that were applied.
        version: The version of the state that it has read last; -1 before the first step.
        staleness: The staleness of its last update; 0 before the first.
    """

    updates: int = 0
    version: int = -1
    staleness: int = 0


class _InProgress(NamedTuple):
    """A worker in progress.

    Attributes:
        worker: The number of the worker.
        version: The version of the state that it read.
        call: The number of the call of a step, from 0.
        name: The name of the step.
        parts: The parts of the step.
        storages: The leaves of the state, alive as long as an update of them is in progress.
        sent: Its values for each server.
        outputs: Its outputs.
    """

    worker: int
    version: int
    call: int
    name: str
    parts: StepParts
    storages: Sequence[LeafStorage]
    sent: list[list[jax.Array]]
    outputs: list[jax.Array]

    def is_done(self) -> bool:
        results: Any = self._last_results()
        return all(x.is_ready() for x in results)

    def wait(self) -> None:
        jax.block_until_ready(self._last_results())

    def _last_results(self) -> list[jax.Array]:
        """Returns one result: all results of a program are ready together."""
        results = [*(x for row in self.sent for x in row), *self.outputs]
        return results[-1:]


class LocalEngine:
    """Starts workers, and applies their results.

    Mutable: it holds the workers in progress and the version of the state. Threads may call it at the same time.

    Args:
        workers: The device of each worker.
        servers: The device of each server.
        home: Where values that are read are placed.
        max_staleness: The maximum staleness of an update, or None.
        record: The file for the order of the events, or None.
    """

    def __init__(
        self,
        workers: Sequence[jax.Device],
        servers: Sequence[jax.Device],
        home: Sharding,
        max_staleness: int | None,
        record: pathlib.Path | None,
    ):
        self.workers, self.servers, self._home, self._bound = workers, servers, home, max_staleness
        self._lock = threading.RLock()
        self._idle = list(range(len(workers)))
        self._in_progress: list[_InProgress] = []  # in the order of the versions that they read
        self._version = self._calls = self._next_server = 0
        self._counts: collections.Counter[int] = collections.Counter()
        self._numbers: dict[Any, jax.Array] = {}
        self._progress = [WorkerProgress() for _ in workers]
        self._log, self._replay = open_log(record, len(workers))

    def staleness_counts(self) -> dict[int, int]:
        """Returns the number of updates of each staleness that were applied."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def worker_progress(self) -> tuple[WorkerProgress, ...]:
        """Returns the progress of each worker."""
        with self._lock:
            return tuple(self._progress)

    def place(self, num_shards: int, num_rows: int | None) -> tuple[Shard, ...]:
        """Returns the shards of the next group of leaves: on the next server, or its rows on the next servers."""
        with self._lock:
            first, count = self._next_server, len(self.servers)
            self._next_server = (first + num_shards) % count
        if num_rows is None:
            return (Shard(first),)
        ranges = enumerate(row_ranges(num_rows, num_shards))
        return tuple(Shard((first + number) % count, *rows) for number, rows in ranges)

    def store(self, value: Any, shards: tuple[Shard, ...]) -> LeafStorage:
        """Returns a leaf with a copy of `value` on the servers."""
        arrays = to_arrays(value, shards, self.servers)
        return LeafStorage(value.shape, arrays[0].dtype, shards, arrays)

    def move(self, storage: LeafStorage, shards: tuple[Shard, ...]) -> None:
        """Moves a leaf to other shards, after waiting for all workers."""
        with self._lock:
            value = self.read(storage)
            storage.shards, storage.arrays = shards, to_arrays(value, shards, self.servers)

    def read(self, storage: LeafStorage) -> jax.Array:
        """Returns the value of a leaf, after waiting for all workers."""
        with self._lock:
            self.join()
            arrays = jax.device_put(storage.arrays, self._home, may_alias=False)
        return jax.device_put(joined(arrays, storage.shards), self._home)

    def start(
        self, name: str, parts: StepParts, storages: Sequence[LeafStorage], inputs: Sequence[Any], output_put: Any
    ) -> PyTree:
        """Starts a step on an idle worker, and returns its outputs, which the worker still computes.

        Raises:
            RuntimeError: A worker failed.
        """
        with self._lock:
            worker = self._next_worker(name)
            self._idle.remove(worker)
            device = self.workers[worker]
            arrays = [_on_device(storages[number].arrays, device) for number in parts.read_leaves]
            call, self._calls = self._calls, self._calls + 1
            if self._log:
                self._log.write_start(call, worker, self._version, name)
            lead = self._number(np.int32(len(self._in_progress)), device)
            try:
                pulled = self._pull(parts, storages, inputs) if parts.tables else []
                sent, outputs = parts.worker(arrays, pulled, _on_device(list(inputs), device), lead)
            except Exception as error:  # XLA runs small programs on the CPU in this thread
                self._idle.append(worker)
                raise RuntimeError(_failure(worker, call, name, error)) from error
            item = _InProgress(worker, self._version, call, name, parts, storages, sent, outputs)
            self._in_progress.append(item)
            self._progress[worker] = self._progress[worker]._replace(version=self._version)
            return output_put(outputs)

    def _pull(self, parts: StepParts, storages: Sequence[LeafStorage], inputs: Sequence[Any]) -> list[Any]:
        """Returns the rows of tables that a worker needs. They are copied, because an update changes the tables in place."""
        device = self.servers[0]
        tables = [_on_device(storages[number].arrays, device) for number in parts.tables]
        arrays = [_on_device(storages[number].arrays, device) for number in parts.read_leaves]
        return parts.pull(tables, arrays, _on_device(list(inputs), device))

    def join(self) -> None:
        """Waits for all workers, and applies their results.

        Raises:
            RuntimeError: A worker failed.
        """
        with self._lock:
            while self._in_progress:
                self._apply_next()

    def _next_worker(self, name: str) -> int:
        """Returns the worker for a call of the step `name`, after waiting until one may start."""
        if self._replay:
            while (call := self._replay.next_apply()) is not None:
                self._apply([item.call for item in self._in_progress].index(call))
            return self._replay.start(self._calls, name)
        self._apply_finished()
        while not self._idle or not staleness.may_start(len(self._in_progress), self._bound):
            self._apply_next()
        return self._idle[0]

    def _number(self, number: np.generic, device: jax.Device) -> jax.Array:
        """Returns a small number on a device, once for all calls."""
        key = number.dtype, int(number), device
        if key not in self._numbers:
            self._numbers[key] = jax.device_put(number, device)
        return self._numbers[key]

    def _apply_finished(self) -> None:
        """Applies the results of the workers that have finished, as far as the bound allows."""
        index = 0
        while index < len(self._in_progress):
            if self._in_progress[index].is_done() and self._may_apply(index):
                self._apply(index)
                index = 0
            else:
                index += 1

    def _apply_next(self) -> None:
        """Applies the results of the first worker that finishes and may be applied."""
        call = self._replay.next_apply() if self._replay else None
        if call is not None:
            self._apply([item.call for item in self._in_progress].index(call))
            return
        allowed = [index for index in range(len(self._in_progress)) if self._may_apply(index)]
        done = next((index for index in allowed if self._in_progress[index].is_done()), None)
        self._apply(allowed[0] if done is None else done)

    def _may_apply(self, index: int) -> bool:
        versions = [item.version for item in self._in_progress]
        return staleness.may_apply(index, versions, self._version, self._bound)

    def _apply(self, index: int) -> None:
        item = self._in_progress.pop(index)
        self._idle.append(item.worker)
        try:
            item.wait()
        except Exception as error:
            raise RuntimeError(_failure(item.worker, item.call, item.name, error)) from error
        for number, server in enumerate(item.parts.servers):
            if not server.changed:
                continue
            device = self.servers[number]
            stored = lambda keys: [item.storages[leaf].arrays[place] for leaf, place in keys]
            values = _on_device(item.sent[number], device)
            reused = [*stored(server.donated), *(values[i] for i in server.donated_values)]
            others = [*stored(server.kept), *(values[i] for i in server.kept_values)]
            age = self._number(np.float32(self._version - item.version), device)
            new = server.run(reused, others, age)
            for (leaf, place), array in zip(server.changed, new, strict=True):
                item.storages[leaf].arrays[place] = array
        if self._log:
            self._log.write_apply(item.call)
        age, progress = self._version - item.version, self._progress[item.worker]
        self._progress[item.worker] = progress._replace(updates=progress.updates + 1, staleness=age)
        self._counts[age] += 1
        self._version += 1


def _on_device(arrays: list[Any], device: jax.Device) -> list[Any]:
    """Returns `arrays` on a device; itself if they are there, because `jax.device_put` takes longer to find that."""
    is_there = all(isinstance(x, jax.Array) and x.devices() == {device} for x in arrays)
    return arrays if is_there else jax.device_put(arrays, device)


def _failure(worker: int, call: int, name: str, error: Exception) -> str:
    return (
        f"Worker {worker} failed in call {call + 1} of a step, `{name}`: {error}\n  Its update was not applied; the state "
        "contains the updates of all other calls."
    )
