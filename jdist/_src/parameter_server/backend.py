"""`ParameterServerBackend`: calls a step as an update of the state on servers."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.core.tree import PyTree, has_dtype
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.backend import Backend, ProgramSpec, ReplicaFunction
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.shard_map import ShardMapBackend
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, ReplicaResults, Results
from jdist._src.jaxpr.server_partition import UpdateGroup
from jdist._src.parameter_server.engine import Engine
from jdist._src.parameter_server.server_array import ServerArray
from jdist._src.parameter_server.step_parts import PartitionedStep, StepParts, compile_parts, partition_step
from jdist._src.parameter_server.storage import LeafStorage, Shard
from jdist._src.parameter_server.worker_index import in_scheduled_function
from jdist._src.strategies.one_device import OneDeviceStrategy
from jdist._src.values.base import named_values
from jdist._src.values.remote_array import materialize


class ParameterServerBackend(ShardMapBackend):
    """Runs `init` and `run` on one device, and steps on workers and servers.

    Mutable: it holds the function that was traced last. Threads may call the same step at the same time.

    Args:
        replicas: One replica, on the device of the first worker.
        engine: Runs the parts of a step.
        num_shards: From the shape and the dtype of a leaf to the number of parts along its first dimension.
        snapshots: Where the state is saved, or None.
    """

    def __init__(
        self,
        replicas: Replicas,
        engine: Engine,
        num_shards: Callable[[str, Any], int],
        snapshots: Checkpointer | None = None,
    ):
        super().__init__(replicas)
        self.engine, self._snapshots = engine, snapshots
        self._first_step = 0 if snapshots is None else snapshots.latest or 0
        self._num_shards = num_shards
        self._traced: tuple[ReplicaFunction, Any] | None = None
        self._lock = threading.RLock()  # for the traced function and the leaves of arrays
        self._leaves_of_arrays: dict[int, tuple[weakref.ref[Any], ServerArray]] = {}

    def trace(self, function: ReplicaFunction) -> Any:
        """See `Backend.trace`. Not in a `shard_map`: the parts of a step run without a mesh."""
        return Backend.trace(self, function)

    def run(self, function: ReplicaFunction, program: Any, results: ReplicaResults) -> list[PyTree]:
        """See `Backend.run`."""
        self._traced = function, program
        return super().run(function, program, results)

    def stages(self, spec: ProgramSpec) -> Sequence[Stage]:
        """See `Backend.stages`."""
        return [_ServerSteps(self, spec)] if spec.has_state else ()

    def step_call(self, traced: Callable[..., Results], name: str) -> CallFn:
        """Returns the call of a step as an update of the state on the servers.

        Args:
            traced: The function that `jax.jit` would compile.
            name: The name of the step.
        """
        cache: dict[Any, StepParts] = {}

        def call(args: Arguments) -> Results:
            state, *inputs = args
            leaves, treedef = jax.tree.flatten(state)
            input_leaves, input_treedef = jax.tree.flatten(materialize(tuple(inputs)))
            key = treedef, input_treedef, tuple(map(_aval_key, leaves)), tuple(map(_aval_key, input_leaves))
            with self._lock:
                parts = cache.get(key)
                if parts is None:
                    arguments = (
                        treedef.unflatten(map(_shape_of, leaves)),
                        *input_treedef.unflatten(map(_shape_of, input_leaves)),
                    )
                    parts = cache[key] = self._parts(traced, arguments, leaves)
                state_leaves = self._stored(leaves, parts)
            storages = [leaf.storage for leaf in state_leaves]
            if self._snapshots is not None:
                self._save_if_due(self._snapshots, treedef.unflatten(state_leaves), storages)
            outputs = self.engine.start(name, parts, storages, input_leaves, self._put_outputs)
            return treedef.unflatten(state_leaves), parts.output_tree.unflatten(outputs)

        return call

    def _save_if_due(self, snapshots: Checkpointer, state: PyTree, storages: Sequence[LeafStorage]) -> None:
        """Saves the state, after waiting for all calls, so that its step is the number of calls that it contains."""
        step = self._first_step + self.engine.num_calls
        if self.engine.num_calls == 0 or step % snapshots.every:
            return
        snapshots.save(step, state)
        like, device = jax.tree.map(_shape_of, state), self.replicas.mesh.devices.flat[0]

        def read() -> list[Any]:
            return jax.tree.leaves(snapshots.restore(OneDeviceStrategy(device), like=like, step=step).state)

        self.engine.executor.add_snapshot(step, storages, read)

    def _put_outputs(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        return jax.device_put(list(outputs), self.replicas.replicated_sharding) if outputs else []

    def _parts(self, traced: Callable[..., Any], arguments: tuple[PyTree, ...], leaves: Sequence[Any]) -> StepParts:
        shapes = jax.eval_shape(traced, *arguments)
        assert self._traced is not None
        (function, program), self._traced = self._traced, None
        names = [name for name, _ in named_values("state", arguments[0])]
        step = partition_step(function, program, self.replicas.axes[0], shapes, names)
        return compile_parts(step, self._placement(step, leaves, names), self.engine.executor.num_servers)

    def _placement(self, step: PartitionedStep, leaves: Sequence[Any], names: Sequence[str]) -> list[tuple[Shard, ...]]:
        """Returns the shards of each leaf of the state. Leaves that are on the servers keep their shards, if possible."""
        shards: list[tuple[Shard, ...]] = [()] * len(leaves)
        for number in step.partition.scalars.leaves:
            shards[number] = tuple(map(Shard, range(self.engine.executor.num_servers)))
        for group in step.partition.groups:
            placed = self._group_placement(group, leaves, step, names)
            for number in group.leaves:
                shards[number] = placed
        return shards

    def _group_placement(
        self, group: UpdateGroup, leaves: Sequence[Any], step: PartitionedStep, names: Sequence[str]
    ) -> tuple[Shard, ...]:
        stored = {leaves[number].storage.shards for number in group.leaves if isinstance(leaves[number], ServerArray)}
        if len(stored) == 1 and all(isinstance(leaves[number], ServerArray) for number in group.leaves):
            (shards,) = stored
            if group.is_elementwise or len(shards) == 1:
                return shards
        first = group.leaves[0]
        shape = step.state_shapes[first]
        if not any(step.state_shapes[number].shape for number in group.leaves):
            return (Shard(0),)
        count = self._num_shards(names[first], shape) if group.is_elementwise else 1
        return self.engine.next_shards(count, shape.shape[0] if count > 1 else None)

    def _stored(self, leaves: Sequence[Any], parts: StepParts) -> list[ServerArray]:
        """Returns the leaves of a state on the servers."""
        if not all(isinstance(leaf, ServerArray) for leaf in leaves):
            self.engine.join()  # steps in progress would change the values that are replaced here
        return [self._stored_leaf(leaf, shards) for leaf, shards in zip(leaves, parts.shards, strict=True)]

    def _stored_leaf(self, leaf: Any, shards: tuple[Shard, ...]) -> ServerArray:
        if not isinstance(leaf, ServerArray):
            return self._leaf_of_array(leaf, shards) if in_scheduled_function() else self._new_leaf(leaf, shards)
        if leaf.storage.shards != shards:
            self.engine.move(leaf.storage, shards)
        return leaf

    def _new_leaf(self, leaf: Any, shards: tuple[Shard, ...]) -> ServerArray:
        value = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        return ServerArray(self.engine.store(value, shards), self.engine.read)

    def _leaf_of_array(self, leaf: Any, shards: tuple[Shard, ...]) -> ServerArray:
        """Returns a leaf on the servers, the same one for the same array.

        Scheduled functions that call their first step at the same time pass the same array, and update one state.
        """
        if not isinstance(leaf, jax.Array):
            return self._new_leaf(leaf, shards)
        number = id(leaf)
        if number not in self._leaves_of_arrays:
            forget = lambda _: self._leaves_of_arrays.pop(number, None)
            self._leaves_of_arrays[number] = weakref.ref(leaf, forget), self._new_leaf(leaf, shards)
        return self._stored_leaf(self._leaves_of_arrays[number][1], shards)


class _ServerSteps(Stage):
    """Runs steps on workers and servers. Each step is a separate update, also where one call runs several."""

    runs_one_step = places_state = True

    def __init__(self, backend: ParameterServerBackend, spec: ProgramSpec):
        self._backend, self._spec = backend, spec

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""
        return self._backend.step_call(compiled.traced_pair, self._spec.name) if self._spec.donates else call


def _aval_key(leaf: Any) -> tuple[Any, ...]:
    return (leaf.shape, leaf.dtype) if has_dtype(leaf) else (type(leaf),)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, ServerArray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    aval = jax.typeof(leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
