"""The parts of a step as programs of Ray actors, and the leaves that they use."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.tree import PyTree
from jdist._src.jaxpr.table_rows import LookedUpRows
from jdist._src.parameter_server.executor import StepCall
from jdist._src.parameter_server.exported_parts import as_sent, export_part
from jdist._src.parameter_server.local_executor import all_finite
from jdist._src.parameter_server.ray_actors import ServerBinding, ServerPart, WorkerPart
from jdist._src.parameter_server.step_parts import PulledRows, ServerUpdate, StepParts, rows_at
from jdist._src.parameter_server.storage import LeafStorage, Shard, is_split


class RayProgram(NamedTuple):
    """The parts of a step.

    Attributes:
        number: Its number on all actors.
        worker: The part of a worker.
        servers: The part of each server.
        nodes: The number of the node of each server, of the messages of a worker.
    """

    number: int
    worker: WorkerPart
    servers: Sequence[ServerPart]
    nodes: Sequence[int]


class RayBinding(NamedTuple):
    """The parts of a step, and the leaves that they use.

    Attributes:
        number: Its number on all servers.
        program: The parts.
        input_dtypes: The dtype of each input as it is sent.
        servers: For each server, the arrays that it uses.
    """

    number: int
    program: RayProgram
    input_dtypes: Sequence[np.dtype]
    servers: Sequence[ServerBinding]


def make_program(number: int, call: StepCall, platform: str, nodes: Sequence[int], *, tests_finite: bool) -> RayProgram:
    """Exports the parts of a step.

    Args:
        number: The number of the program.
        call: A call of the step.
        platform: The platform of the workers.
        nodes: The number of the node of each server. The servers of a node receive one message.
        tests_finite: Whether workers test the values that they send.
    """
    parts, storages, inputs = call.parts, call.storages, list(map(_shape_of, call.inputs))

    def run_part(arrays: list[list[Any]], rows: list[list[Any]], inputs: list[Any], num_in_progress: Any) -> Any:
        looked_up = parts.look_up([inputs[i] for i in parts.looked_up_inputs]) if parts.tables else []
        pulled = [PulledRows(*pair) for pair in zip(looked_up, rows, strict=True)]
        return parts.worker([], arrays, pulled, inputs, num_in_progress)

    def run(
        arrays: list[list[Any]], rows: list[list[Any]], inputs: list[Any], num_in_progress: Any
    ) -> tuple[list[Any], Any, list[list[Any]]]:
        values, outputs = run_part(arrays, rows, inputs, num_in_progress)
        by_node = [values[server] for node in range(max(nodes) + 1) for server in _servers_on(node, nodes)]
        return outputs, all_finite(values) if tests_finite else jnp.bool_(True), by_node

    arguments = _worker_arguments(parts, storages, inputs)
    sent = jax.eval_shape(run_part, *arguments)[0]
    num_sent = [sum(len(sent[server]) for server in _servers_on(node, nodes)) for node in range(max(nodes) + 1)]
    order, num_outputs = _operand_order(parts, len(inputs)), len(parts.output_shapes)
    worker = WorkerPart(export_part(run, arguments, platform), order, num_outputs, num_sent)
    servers = [_server_part(server, parts, storages, inputs, sent, nodes) for server in range(len(nodes))]
    return RayProgram(number, worker, servers, nodes)


def _servers_on(node: int, nodes: Sequence[int]) -> list[int]:
    return [server for server, other in enumerate(nodes) if other == node]


def bind(number: int, program: RayProgram, call: StepCall) -> RayBinding:
    """Returns the leaves that the parts of a step use.

    Args:
        number: The number of the binding.
        program: The parts.
        call: A call of the step.
    """
    parts = call.parts
    keys_of = lambda places: [call.storages[leaf].arrays[array_index] for leaf, array_index in places]
    bindings = [
        ServerBinding(
            part=program.number,
            updated=keys_of(_updated_places(update)),
            read=keys_of(_places_on(server, parts, parts.read_leaves)),
            tables=keys_of(_places_on(server, parts, parts.tables)),
        )
        for server, update in enumerate(parts.servers)
    ]
    input_dtypes = [np.dtype(as_sent(_shape_of(x)).dtype) for x in call.inputs]
    return RayBinding(number, program, input_dtypes, bindings)


def num_read(shards: Sequence[Shard]) -> int:
    """Returns the number of arrays of a leaf that together are its value: one, if each is a copy."""
    return len(shards) if is_split(shards) else 1


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x if isinstance(x, jax.Array) else jnp.asarray(x))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _array_shape(storage: LeafStorage, array_index: int) -> jax.ShapeDtypeStruct:
    shard = storage.shards[array_index]
    if shard.stop is None:
        return jax.ShapeDtypeStruct(storage.shape, storage.dtype)
    return jax.ShapeDtypeStruct((shard.stop - shard.start, *storage.shape[1:]), storage.dtype)


def _places_on(server: int, parts: StepParts, leaves: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the arrays of leaves that a worker reads from a server: numbers of leaves, and of their arrays."""
    return [
        (leaf, array_index)
        for leaf in leaves
        for array_index in range(num_read(parts.shards[leaf]))
        if parts.shards[leaf][array_index].server == server
    ]


def _updated_places(update: ServerUpdate) -> list[tuple[int, int]]:
    """Returns the stored arrays that are operands of an update."""
    return [*update.donated, *update.kept]


def _worker_arguments(
    parts: StepParts, storages: Sequence[LeafStorage], inputs: list[jax.ShapeDtypeStruct]
) -> tuple[PyTree, ...]:
    """Returns the shapes of the arguments of a worker: arrays of leaves, rows of tables, inputs, the number of calls."""
    shapes_of = lambda leaf: [_array_shape(storages[leaf], i) for i in range(num_read(parts.shards[leaf]))]
    looked_up = jax.eval_shape(parts.look_up, [inputs[i] for i in parts.looked_up_inputs]) if parts.tables else []
    rows = [
        [_rows_shape(storages[leaf], one)] * num_read(parts.shards[leaf])
        for leaf, one in zip(parts.tables, looked_up, strict=True)
    ]
    return [shapes_of(leaf) for leaf in parts.read_leaves], rows, inputs, jax.ShapeDtypeStruct((), np.int32)


def _operand_order(parts: StepParts, num_inputs: int) -> list[int]:
    """Returns the number in the messages of a worker of each of its operands except for the last."""
    received: list[Any] = list(range(num_inputs))
    for server in range(len(parts.servers)):
        received += _places_on(server, parts, parts.read_leaves) + _places_on(server, parts, parts.tables)
    numbers = {item: number for number, item in enumerate(received)}
    leaves = (*parts.read_leaves, *parts.tables)
    places = [(leaf, array_index) for leaf in leaves for array_index in range(num_read(parts.shards[leaf]))]
    return [numbers[item] for item in (*places, *range(num_inputs))]


def _server_part(
    server: int,
    parts: StepParts,
    storages: Sequence[LeafStorage],
    inputs: Sequence[jax.ShapeDtypeStruct],
    sent: Sequence[list[jax.ShapeDtypeStruct]],
    nodes: Sequence[int],
) -> ServerPart:
    """Returns the part of a server.

    Args:
        server: The number of the server.
        parts: The parts of the step.
        storages: The stored leaves.
        inputs: The shapes of the inputs.
        sent: The shapes of the values of a worker for each server.
        nodes: The number of the node of each server.
    """
    start = sum(len(sent[other]) for other in _servers_on(nodes[server], nodes) if other < server)
    update, updated = parts.servers[server], _updated_places(parts.servers[server])
    tables = _places_on(server, parts, parts.tables)

    def run_update(arrays: list[Any], values: list[Any], staleness: Any) -> list[Any]:
        donated, kept = arrays[: len(update.donated)], arrays[len(update.donated) :]
        reused = [*donated, *(values[i] for i in update.donated_values)]
        return update.run(reused, [*kept, *(values[i] for i in update.kept_values)], staleness)

    def look_up(arrays: list[Any], inputs: list[Any]) -> list[Any]:
        looked_up = parts.look_up(inputs)
        ids = [looked_up[parts.tables.index(leaf)].ids for leaf, _ in tables]
        starts = [parts.shards[leaf][array_index].start for leaf, array_index in tables]
        return list(map(rows_at, arrays, ids, starts))

    shapes_of = lambda places: [_array_shape(storages[leaf], array_index) for leaf, array_index in places]
    staleness = jax.ShapeDtypeStruct((), np.float32)
    needed = [inputs[i] for i in parts.looked_up_inputs]
    return ServerPart(
        update=export_part(run_update, (shapes_of(updated), sent[server], staleness), "cpu")
        if update.changed
        else None,
        received=(start, start + len(sent[server])),
        changed=[updated.index(array) for array in update.changed],
        look_up=export_part(look_up, (shapes_of(tables), needed), "cpu") if tables else None,
    )


def _rows_shape(storage: LeafStorage, looked_up: LookedUpRows) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(looked_up.ids), *storage.shape[1:]), storage.dtype)
