"""`RayExecutor`: workers and servers are actors of a Ray cluster.

A call of a step makes one call of each server that the worker reads, which applies the updates before it and returns the
parameters, and one call of the worker. The results of a worker go to the servers without passing through the host program,
unless they are small. Ray keeps the order of the calls of each server, so the order in which this module makes them is the
order of the updates.
"""

import collections
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jdist._src.parameter_server.closure_queue import WorkerLostError
from jdist._src.parameter_server.executor import Executor, StepCall
from jdist._src.parameter_server.exported_parts import from_numbers, to_host, to_numbers
from jdist._src.parameter_server.ray_actors import Update
from jdist._src.parameter_server.ray_cluster import RayCluster
from jdist._src.parameter_server.ray_programs import RayBinding, RayProgram, bind, make_program, num_read
from jdist._src.parameter_server.step_parts import StepParts
from jdist._src.parameter_server.storage import LeafStorage, Shard, joined, rows_of
from jdist._src.parameter_server.update_history import RequestedUpdate, Snapshot, StoredLeaf, UpdateHistory

_MAX_RECOVERIES = 10  # in one request
_LOG = logging.getLogger("jdist")


class _Work(NamedTuple):
    """The results of a worker, as objects.

    Attributes:
        binding: The parts of the step, and the leaves that they use.
        output_shapes: The shape and dtype of each output.
        outputs: The outputs, and whether all values are finite.
        sent: For each node with servers, the message with the values for them, or None.
    """

    binding: RayBinding
    output_shapes: Sequence[jax.ShapeDtypeStruct]
    outputs: Any
    sent: Sequence[Any]


class RayExecutor(Executor):
    """Workers and servers in processes of a Ray cluster.

    Mutable: it holds the updates that were not sent yet, and the history that restores a lost server.

    Args:
        cluster: Starts the actors.
        host_sharding: The sharding of values that are read.
        tests_finite: Whether workers test the values that they send.
        restores_servers: Whether a lost server is restored.
    """

    def __init__(self, cluster: RayCluster, host_sharding: Sharding, *, tests_finite: bool, restores_servers: bool):
        super().__init__(cluster.num_workers, cluster.num_servers, host_sharding, tests_finite)
        self._cluster = cluster
        self._history = UpdateHistory(self.num_servers) if restores_servers else None
        self._leaves: dict[int, weakref.ref[LeafStorage]] = {}
        self._removed: collections.deque[tuple[int, Sequence[Shard]]] = collections.deque()
        self._numbers = itertools.count()
        self._programs: dict[int, tuple[StepParts, RayProgram]] = {}
        self._bindings: dict[tuple[int, ...], RayBinding] = {}
        self._num_updates = [0] * self.num_servers
        self._unsent: list[list[RequestedUpdate]] = [[] for _ in range(self.num_servers)]
        # By server: the binding, and the message that is still valid.
        self._read_messages: dict[int, tuple[int, Any]] = {}
        self._is_flushed = True

    def worker_pids(self) -> Sequence[int]:
        """See `Executor.worker_pids`."""
        return self._cluster.worker_pids()

    def store(self, value: Any, shards: tuple[Shard, ...]) -> LeafStorage:
        """See `Executor.store`."""
        value = jnp.asarray(value)
        storage = LeafStorage(value.shape, value.dtype, shards, [])
        self._set(storage, value)
        return storage

    def replace(self, storage: LeafStorage, value: Any, shards: tuple[Shard, ...]) -> None:
        """See `Executor.replace`."""
        number = storage.arrays[0][0]
        del self._leaves[number]
        self._removed.append((number, storage.shards))
        storage.shards = shards
        self._set(storage, value)
        self._remove_leaves()

    def read(self, storage: LeafStorage) -> jax.Array:
        """See `Executor.read`."""
        self._send_updates()
        arrays = self._get(lambda: self._read_objects(storage, num_read(storage.shards)))
        values = [from_numbers(x, storage.dtype) for x in jax.device_put(arrays, self._host_sharding, may_alias=False)]
        return jax.device_put(joined(values, storage.shards), self._host_sharding)

    def prepare(self, call: StepCall) -> None:
        """See `Executor.prepare`."""
        self._remove_leaves()
        self._binding(call)

    def start(self, worker: int, call: StepCall, num_in_progress: int) -> tuple[_Work, None]:
        """See `Executor.start`."""
        binding = self._binding(call)
        inputs = [np.asarray(to_numbers(x), dtype) for x, dtype in zip(call.inputs, binding.input_dtypes, strict=True)]
        ids = [inputs[i] for i in call.parts.looked_up_inputs]
        messages = [self._exchange(server, binding, ids) for server in range(self.num_servers)]
        num_sent = binding.program.worker.num_sent
        run = self._cluster.workers[worker].run.options(num_returns=1 + sum(map(bool, num_sent)))
        results = run.remote(binding.program.number, num_in_progress, inputs, *filter(None, messages))
        outputs, *others = results if any(num_sent) else [results]
        rest = iter(others)
        sent = [next(rest) if count else None for count in num_sent]
        return _Work(binding, call.parts.output_shapes, outputs, sent), None

    def wait_for_any(self, works: Sequence[_Work], *, timeout: float | None) -> int | None:
        """See `Executor.wait_for_any`."""
        return self._cluster.wait_for_any([work.outputs for work in works], timeout)

    def results(self, work: _Work) -> tuple[list[Any], bool]:
        """See `Executor.results`."""
        try:
            outputs, is_finite = self._cluster.get(work.outputs)
        except Exception as error:
            if not self._cluster.is_loss(error):
                raise
            raise WorkerLostError(self._recover()) from error
        dtypes = [shape.dtype for shape in work.output_shapes]
        return [from_numbers(x, dtype) for x, dtype in zip(outputs, dtypes, strict=True)], is_finite

    def apply(self, work: _Work, call: StepCall, staleness: int) -> None:
        """See `Executor.apply`. The update is sent with the next call of its server."""
        for server, part in enumerate(work.binding.program.servers):
            if part.update is None:
                continue
            self._num_updates[server] += 1
            update = Update(self._num_updates[server], work.binding.number, staleness)
            requested = RequestedUpdate(update, work.sent[work.binding.program.nodes[server]])
            self._unsent[server].append(requested)
            if self._history is not None:
                self._history.add_update(server, requested)

    def flush(self) -> None:
        """See `Executor.flush`."""
        self._send_updates()
        if not self._is_flushed:
            self._get(lambda: [server.check.remote() for server in self._cluster.servers])
            self._is_flushed = True

    def add_snapshot(self, step: int, storages: Sequence[LeafStorage], read: Callable[[], Sequence[Any]]) -> None:
        """See `Executor.add_snapshot`.

        Raises:
            ValueError: The servers store leaves of another state.
        """
        if self._history is None:
            return
        self._remove_leaves()
        numbers = [storage.arrays[0][0] for storage in storages]
        if others := self._leaves.keys() - set(numbers):
            raise ValueError(
                f"The servers store {len(others)} leaves that are not in the state of this step, so its checkpoint cannot "
                "restore a lost server. With `snapshots`, train one state at a time: put all values into one tree, and delete "
                "states that are not used any more."
            )
        self._history.add_snapshot(Snapshot(step, numbers, read))

    def _set(self, storage: LeafStorage, value: Any) -> None:
        number = next(self._numbers)
        storage.arrays = [(number, array_index) for array_index in range(len(storage.shards))]
        objects = [self._cluster.put(to_host(rows_of(value, shard))) for shard in storage.shards]
        for shard, key, value_object in zip(storage.shards, storage.arrays, objects, strict=True):
            self._cluster.servers[shard.server].set.remote(key, value_object)
        if self._history is not None:
            self._history.add_leaf(number, StoredLeaf(storage.shards, storage.arrays, objects))
        # The garbage collector may run in any thread at any time, so it only notes that the leaf is removed.
        removed = number, storage.shards
        self._leaves[number] = weakref.ref(storage, lambda _: self._removed.append(removed))

    def _binding(self, call: StepCall) -> RayBinding:
        """Returns the parts of a step with the leaves of a call. The actors receive them once."""
        key = id(call.parts), *(storage.arrays[0][0] for storage in call.storages)
        if key not in self._bindings:
            if id(call.parts) not in self._programs:
                number, platform, nodes = len(self._programs), self._cluster.platform, self._cluster.server_nodes
                program = make_program(number, call, platform, nodes, tests_finite=self._tests_finite)
                self._cluster.load(program)
                self._programs[id(call.parts)] = call.parts, program
            _, program = self._programs[id(call.parts)]
            self._bindings[key] = bind(len(self._bindings), program, call)
            self._cluster.bind(self._bindings[key])
        return self._bindings[key]

    def _exchange(self, server: int, binding: RayBinding, looked_up_inputs: list[Any]) -> Any:
        """Requests the unsent updates of a server and the message with the arrays that a worker reads; returns this message."""
        uses = binding.servers[server]
        if not uses.read and not uses.tables:
            self._send_updates_to(server)
            return None
        if uses.tables:
            return self._request(server, binding.number, looked_up_inputs)
        if self._unsent[server] or self._read_messages.get(server, (None, None))[0] != binding.number:
            self._read_messages[server] = binding.number, self._request(server, binding.number, None)
        return self._read_messages[server][1]

    def _send_updates(self) -> None:
        for server in range(self.num_servers):
            self._send_updates_to(server)

    def _send_updates_to(self, server: int) -> None:
        if self._unsent[server]:
            self._request(server, None, None)

    def _request(self, server: int, binding: int | None, looked_up_inputs: list[Any] | None) -> Any:
        requests, self._unsent[server] = self._unsent[server], []
        if requests:
            self._read_messages.pop(server, None)
        self._is_flushed = False
        updates, values = [one.update for one in requests], [one.values for one in requests]
        return self._cluster.servers[server].exchange.remote(updates, binding, looked_up_inputs, *values)

    def _read_objects(self, storage: LeafStorage, count: int) -> list[Any]:
        pairs = list(zip(storage.shards, storage.arrays, strict=True))[:count]
        return [self._cluster.servers[shard.server].get.remote(key) for shard, key in pairs]

    def _remove_leaves(self) -> None:
        """Removes the arrays of leaves that do not exist any more."""
        if not self._removed:
            return
        keys: list[list[Any]] = [[] for _ in range(self.num_servers)]
        while self._removed:
            number, shards = self._removed.popleft()
            self._leaves.pop(number, None)
            for array_index, shard in enumerate(shards):
                keys[shard.server].append((number, array_index))
        self._send_updates()
        for server, keys_of_server in zip(self._cluster.servers, keys, strict=True):
            server.delete.remote(keys_of_server)
        if self._history is not None:
            self._history.start_again(
                {number: self._stored_leaf(storage) for number, storage in self._storages().items()}
            )

    def _stored_leaf(self, storage: LeafStorage) -> StoredLeaf:
        return StoredLeaf(storage.shards, storage.arrays, self._read_objects(storage, len(storage.shards)))

    def _storages(self) -> dict[int, LeafStorage]:
        pairs = [(number, reference()) for number, reference in self._leaves.items()]
        return {number: storage for number, storage in pairs if storage is not None}

    def _get(self, request: Callable[[], list[Any]]) -> list[Any]:
        """Returns the values of requested objects; requests them again after a server was lost."""
        for attempt in itertools.count(1):
            try:
                return self._cluster.get(request())
            except Exception as error:
                if not self._cluster.is_loss(error) or attempt == _MAX_RECOVERIES:
                    raise
                self._recover()
        raise AssertionError

    def _recover(self) -> str:
        """Replaces the workers and servers that were lost, and returns a sentence that names them."""
        self._read_messages.clear()  # of a lost server, or lost themselves
        workers = [f"worker {index}" for index in self._cluster.replace_lost_workers()]
        servers = self._cluster.lost_servers()
        for server in servers:
            self._restore(server)
        lost = [*workers, *(f"server {server}" for server in servers)]
        return f"The process of {' and of '.join(lost) or 'an actor that it used'} has ended."

    def _restore(self, server: int) -> None:
        if self._history is None:
            raise RuntimeError(
                f"Server {server} was lost, and the values of the state with it. To continue after the loss of a server, pass "
                "`snapshots=jdist.Checkpointer(folder, every=1000)` to `ParameterServerStrategy`."
            )
        _LOG.warning("Server %d was lost. It is restored from %s.", server, self._history.describe(server))
        actor = self._cluster.replace_server(server)
        for key, value in self._history.values(server):
            actor.set.remote(key, value)
        start, requests = self._history.updates(server)
        actor.start_sequence.remote(start)
        for request in requests:
            actor.exchange.remote([request.update], None, None, request.values)
        self._unsent[server] = []  # they are part of the history
