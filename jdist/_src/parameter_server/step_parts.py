"""Compiles the parts of a step: one program for a worker, and one for each server."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.core.tree import PyTree
from jdist._src.execution.backend import ReplicaFunction
from jdist._src.jaxpr import update_partition
from jdist._src.jaxpr.interpreter import Evaluator, nested_equations
from jdist._src.jaxpr.marks import KEY_MARK, STALENESS_MARK, mark_of
from jdist._src.jaxpr.replication import Input
from jdist._src.jaxpr.server_partition import (
    ServerPartition,
    UpdateGroup,
    part_for,
    split_for_servers,
)
from jdist._src.jaxpr.single_replica import eliminate_collectives
from jdist._src.jaxpr.table_rows import LookedUpRows, RowEvaluator, Table, find_tables, looked_up_rows
from jdist._src.parameter_server.storage import Shard, joined, rows_of
from jdist._src.values.base import is_distributed


class PartitionedStep(NamedTuple):
    """A traced step and its parts.

    Attributes:
        program: The program of one replica, with its constants as inputs.
        partition: The parts.
        tables: The tables whose rows a worker looks up.
        axis: The axis of the replicas, of size one.
        constants: The constants of the program.
        state: The input variables of the state.
        inputs: The input variables of the other arguments.
        state_shapes: The stored shape and dtype of each leaf of the state.
        output_shapes: The shape of each leaf of the outputs, with the dimension of the replicas.
        output_tree: The structure of the outputs.
    """

    program: Jaxpr
    partition: ServerPartition
    tables: Sequence[Table]
    axis: str
    constants: Mapping[Any, Any]
    state: Sequence[Any]
    inputs: Sequence[Any]
    state_shapes: Sequence[jax.ShapeDtypeStruct]
    output_shapes: Sequence[jax.ShapeDtypeStruct]
    output_tree: Any


class StepParts(NamedTuple):
    """The compiled parts of a step.

    Attributes:
        shards: The shards of each leaf of the state.
        read_leaves: The numbers of the leaves that a worker reads.
        tables: The numbers of the leaves whose rows it looks up.
        looked_up_inputs: The numbers of the inputs that decide which rows.
        look_up: From these inputs to the rows, for each table.
        pull: From the arrays of the tables and the inputs to the result of `look_up`, each with the values in each array.
        worker: From arrays whose memory it reuses, the arrays of the leaves, the result of `pull`, the inputs, and the number
            of steps in progress at the start, to the values for each server and the outputs.
        reused: The shapes and dtypes of the arrays whose memory it can reuse, one per gradient that becomes a parameter.
        servers: For each server, the update of its arrays.
        output_shapes: The shape and dtype of each output.
        output_tree: The structure of the outputs.
    """

    shards: Sequence[tuple[Shard, ...]]
    read_leaves: Sequence[int]
    tables: Sequence[int]
    looked_up_inputs: Sequence[int]
    look_up: Callable[[Sequence[Any]], list[LookedUpRows]]
    pull: Callable[[Sequence[Sequence[Any]], Sequence[Any]], "list[PulledRows]"]
    worker: Callable[..., tuple[list[list[jax.Array]], list[jax.Array]]]
    reused: Sequence[jax.ShapeDtypeStruct]
    servers: "Sequence[ServerUpdate]"
    output_shapes: Sequence[jax.ShapeDtypeStruct]
    output_tree: Any


class PulledRows(NamedTuple):
    """The rows of a table that a worker reads.

    Attributes:
        looked_up: The rows.
        values: Their values in each array of the table, zeros for rows that it does not contain.
    """

    looked_up: LookedUpRows
    values: list[jax.Array]


class ServerUpdate(NamedTuple):
    """The update of the arrays on one server.

    The memory of arrays that workers do not read, such as momenta, is reused for their new values. A parameter may be in use by
    a worker: its new value reuses the memory of the gradient.

    Attributes:
        changed: The arrays that it replaces: numbers of leaves, and of their arrays.
        donated: The arrays whose memory it reuses.
        kept: The arrays that it only reads.
        donated_values: The indices of the values of a worker whose memory it reuses.
        kept_values: The indices of the other values of a worker.
        run: From the donated arrays and values, the kept arrays and values, and the staleness, to the new arrays.
    """

    changed: Sequence[tuple[int, int]]
    donated: Sequence[tuple[int, int]]
    kept: Sequence[tuple[int, int]]
    donated_values: Sequence[int]
    kept_values: Sequence[int]
    run: Callable[[list[jax.Array], list[jax.Array], Any], list[jax.Array]]


class UpdateOnServer(NamedTuple):
    """The update of a group on one server.

    Attributes:
        group: The group.
        array_index: The index of the array of each of its leaves.
        shard: The rows.
    """

    group: UpdateGroup
    array_index: int
    shard: Shard


def partition_step(
    function: ReplicaFunction,
    program: Any,
    axis: str,
    shapes: tuple[PyTree, PyTree],
    names: Sequence[str],
) -> PartitionedStep:
    """Splits a traced step into the part of a worker and the updates of groups of state leaves.

    Args:
        function: The function of one replica, with its arguments.
        program: Its closed jaxpr.
        axis: The axis of the replicas.
        shapes: The shapes of the new state and of the outputs, with wrappers.
        names: The name of each leaf of the state.

    Raises:
        ValueError: A value that is stored per replica is computed from its old value by more than elementwise operations.
    """
    flat = update_partition.inline_calls(program, [(axis, 1)])
    jaxpr = jax_compat.consts_as_inputs(flat)
    constants = dict(zip(jaxpr.invars, flat.consts, strict=False))
    arguments = jaxpr.invars[len(constants) :]
    is_varying = [
        is_distributed(item) and not item._is_replicated for item in function.items for _ in jax.tree.leaves(item)
    ]
    num_state = len(names)
    inputs = [Input("", ()) for _ in constants] + [Input("", (axis,) if varies else ()) for varies in is_varying]
    partition = split_for_servers(jaxpr, inputs, (axis,), arguments[:num_state], constants)
    _check_local_values(partition, is_varying, names)
    state_shapes, output_shapes = (jax.tree.leaves(tree) for tree in shapes)
    return PartitionedStep(
        jaxpr,
        partition,
        find_tables(partition, arguments[:num_state]),
        axis,
        constants,
        arguments[:num_state],
        arguments[num_state:],
        state_shapes,
        output_shapes,
        jax.tree.structure(shapes[1]),
    )


def _check_local_values(partition: ServerPartition, is_varying: Sequence[bool], names: Sequence[str]) -> None:
    for number in partition.dependent:
        if is_varying[number]:
            raise ValueError(
                f"{names[number]} is stored per replica, and the step computes its new value from the old one by more than a "
                "sum or another elementwise operation. Under `ParameterServerStrategy` workers that run at the same time would "
                "overwrite each other's values. Make it a plain leaf that is updated behind `jdist.all_reduce`; derive random "
                "keys from the number of the step, `jdist.replica_key(jax.random.fold_in(key, step))`."
            )


def compile_parts(step: PartitionedStep, shards: Sequence[tuple[Shard, ...]], num_servers: int) -> StepParts:
    """Compiles the parts of a step for a placement of the state."""
    updates_by_server = [_updates_on(step, shards, server) for server in range(num_servers)]
    sent_values = [
        list(dict.fromkeys(x for update in updates for x in _received(step, update))) for updates in updates_by_server
    ]
    tables = [table.leaf for table in step.tables]
    inputs = set(step.partition.worker.inputs)
    read_leaves = [number for number, var in enumerate(step.state) if var in inputs and number not in tables]
    computed = {var for equation in step.partition.worker.program.eqns for var in equation.outvars}
    num_receivers = collections.Counter(value for values in sent_values for value in values)
    has_sole_receiver = {value for value, count in num_receivers.items() if count == 1 and value[0] in computed}
    servers = [
        _server_update(step, updates, received, read_leaves, [value in has_sole_receiver for value in received])
        for updates, received in zip(updates_by_server, sent_values, strict=True)
    ]
    looked_up_inputs, look_up = _look_up(step)
    return StepParts(
        shards=shards,
        read_leaves=read_leaves,
        tables=tables,
        looked_up_inputs=looked_up_inputs,
        look_up=look_up,
        pull=jax.jit(_pull(step, shards, looked_up_inputs, look_up)),
        # A value that is not used would be removed, and its memory not reused.
        worker=jax.jit(_worker(step, read_leaves, shards, sent_values), donate_argnums=0, keep_unused=True),
        reused=_reused_shapes(sent_values, servers),
        servers=servers,
        output_shapes=step.output_shapes,
        output_tree=step.output_tree,
    )


def _updates_on(step: PartitionedStep, shards: Sequence[tuple[Shard, ...]], server: int) -> list[UpdateOnServer]:
    """Returns the updates of groups that a server runs: of each group of which it stores an array that a step changes."""
    groups = [*step.partition.groups, *([step.partition.scalars] if step.partition.scalars.leaves else [])]
    return [
        UpdateOnServer(group, index, shard)
        for group in groups
        for index, shard in enumerate(shards[group.leaves[0]])
        if shard.server == server and any(_is_changed(step, number) for number in group.leaves)
    ]


def _is_changed(step: PartitionedStep, number: int) -> bool:
    return step.program.outvars[number] is not step.state[number]


def _received(step: PartitionedStep, update: UpdateOnServer) -> list[tuple[Any, Shard | None]]:
    """Returns the variables that the update of a group receives, each with its rows, or None for all of it."""
    new_values = [step.program.outvars[number] for number in update.group.leaves]
    needed = dict.fromkeys([*update.group.part.inputs, *update_partition.variables(new_values)])
    sent = [var for var in needed if var in set(step.partition.sent)]
    table = _table_of(step, update)
    is_part = update.shard.stop is not None and table is None
    keys = [(var, update.shard if is_part and jax_compat.shape_of(var) else None) for var in sent]
    return keys if table is None else [*keys, (table.var, None)]  # None: the numbers of the looked-up rows


def _table_of(step: PartitionedStep, update: UpdateOnServer) -> Table | None:
    return next((table for table in step.tables if table.leaf in update.group.leaves), None)


def _look_up(step: PartitionedStep) -> tuple[list[int], Callable[[Sequence[Any]], list[LookedUpRows]]]:
    """Returns the numbers of the inputs that decide which rows a worker looks up, and the function of these inputs."""
    part = part_for(step.partition.worker.program, [var for table in step.tables for var in table.indices])
    numbers = [number for number, var in enumerate(step.inputs) if var in part.inputs]

    def look_up(inputs: Sequence[Any]) -> list[LookedUpRows]:
        env = {**step.constants, **{step.inputs[i]: x for i, x in zip(numbers, inputs, strict=True)}}
        operands = [env[var] for var in part.inputs]
        indices = iter(eliminate_collectives(jax_compat.close_jaxpr(part.program), [step.axis], operands))
        return [
            looked_up_rows([next(indices) for _ in table.indices], jax_compat.shape_of(table.var)[0])
            for table in step.tables
        ]

    return numbers, look_up


def _pull(
    step: PartitionedStep,
    shards: Sequence[tuple[Shard, ...]],
    numbers: Sequence[int],
    look_up: Callable[[Sequence[Any]], list[LookedUpRows]],
) -> Callable[[Sequence[Sequence[Any]], Sequence[Any]], list[PulledRows]]:
    """Returns the function `StepParts.pull`, which is not compiled yet."""

    def pull(tables: Sequence[Sequence[Any]], inputs: Sequence[Any]) -> list[PulledRows]:
        pulled: list[PulledRows] = []
        for table, arrays, looked_up in zip(step.tables, tables, look_up([inputs[i] for i in numbers]), strict=True):
            pairs = zip(arrays, shards[table.leaf], strict=True)
            pulled.append(PulledRows(looked_up, [rows_at(x, looked_up.ids, shard.start) for x, shard in pairs]))
        return pulled

    return pull


def rows_at(x: jax.Array, numbers: jax.Array, start: Any) -> jax.Array:
    """Returns rows of a table, zeros for those that an array does not contain.

    Args:
        x: The array, which contains the rows from number `start`.
        numbers: The numbers of the rows in the table.
        start: The number of the first row of the array.
    """
    return x.at[_local_numbers(x, numbers, start)].get(mode="fill", fill_value=0)


def _local_numbers(x: jax.Array, numbers: jax.Array, start: Any) -> jax.Array:
    """Returns the numbers of rows within an array, and the number of its rows for rows that it does not contain."""
    local = numbers - start
    return jnp.where((local >= 0) & (local < len(x)), local, len(x))


def _worker(
    step: PartitionedStep,
    read_leaves: Sequence[int],
    shards: Sequence[tuple[Shard, ...]],
    sent_values: Sequence[Sequence[tuple[Any, Shard | None]]],
) -> Callable[..., tuple[list[list[jax.Array]], list[jax.Array]]]:
    """Returns the function `StepParts.worker`, which is not compiled yet."""
    part = step.partition.worker
    outputs = step.program.outvars[len(step.state) :]

    def worker(
        reused: Sequence[jax.Array],
        arrays: list[list[jax.Array]],
        pulled: list[PulledRows],
        inputs: list[jax.Array],
        num_in_progress: jax.Array,
    ) -> tuple[list[list[jax.Array]], list[jax.Array]]:
        del reused  # its memory is donated
        env = {**step.constants, **dict(zip(step.inputs, inputs, strict=True))}
        for number, values in zip(read_leaves, arrays, strict=True):
            env[step.state[number]] = joined(values, shards[number])
        for table, (_, (first, *others)) in zip(step.tables, pulled, strict=True):
            env[table.var] = sum(others, first)
        operands = [env[var] for var in part.inputs]
        program = jax_compat.close_jaxpr(part.program)
        if step.tables:
            evaluator = RowEvaluator(step.tables, [one.looked_up for one in pulled])
            program = _traced(evaluator, program, operands, step.axis)
        program = _traced(_KeyEvaluator(num_in_progress), program, operands, step.axis)
        env.update({table.var: one.looked_up.numbers for table, one in zip(step.tables, pulled, strict=True)})
        env.update(zip(part.outputs, eliminate_collectives(program, [step.axis], operands), strict=True))
        sent = [
            [env[var] if rows is None else rows_of(env[var], rows) for var, rows in values] for values in sent_values
        ]
        values = [atom.val if isinstance(atom, Literal) else env[atom] for atom in outputs]
        shaped = [jnp.reshape(x, shape.shape) for x, shape in zip(values, step.output_shapes, strict=True)]
        return sent, shaped

    return worker


def _reused_shapes(
    sent_values: Sequence[Sequence[tuple[Any, Shard | None]]], servers: Sequence[ServerUpdate]
) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the sent values that become parameters; random keys are small."""
    shapes: list[jax.ShapeDtypeStruct] = []
    for values, server in zip(sent_values, servers, strict=True):
        for var, rows in (values[i] for i in server.donated_values):
            shape = jax_compat.shape_of(var)
            if rows is not None and rows.stop is not None:
                shape = (rows.stop - rows.start, *shape[1:])
            if not jnp.issubdtype(var.aval.dtype, jax.dtypes.extended):
                shapes.append(jax.ShapeDtypeStruct(shape, var.aval.dtype))
    return shapes


def _traced(evaluator: Evaluator, program: Any, operands: Sequence[Any], axis: str) -> Any:
    """Returns a closed jaxpr as the evaluator runs it."""
    run = lambda *values: evaluator.run(program.jaxpr, program.consts, values)
    return jax.make_jaxpr(run, axis_env=[(axis, 1)])(*operands)


class _KeyEvaluator(Evaluator):
    """Replaces the index of the replica in `jdist.replica_key` by the number of steps in progress."""

    def __init__(self, num_in_progress: Any):
        self._num_in_progress = num_in_progress

    def enters(self, equation: Equation) -> bool:
        return any(mark_of(inner) == KEY_MARK for inner, _ in nested_equations(equation))

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        return (
            [self._num_in_progress] if mark_of(equation) == KEY_MARK else super().primitive(jaxpr, equation, operands)
        )


def _server_update(
    step: PartitionedStep,
    updates: Sequence[UpdateOnServer],
    received: Sequence[tuple[Any, Shard | None]],
    read_leaves: Sequence[int],
    has_sole_receiver: Sequence[bool],
) -> ServerUpdate:
    """Returns the update of the arrays on one server.

    Args:
        step: The step.
        updates: The updates of groups on this server.
        received: The values of a worker that it receives, each with its rows, or None for all of it.
        read_leaves: The numbers of the leaves that a worker reads.
        has_sole_receiver: For each received value, whether only this server receives it.
    """
    arrays = [(number, one.array_index) for one in updates for number in one.group.leaves]
    changed = [key for key in arrays if _is_changed(step, key[0])]
    scalars = [(number, one.shard.server) for number in step.partition.scalars.leaves for one in updates[:1]]
    donated = [key for key in changed if key[0] not in read_leaves]
    kept = [key for key in dict.fromkeys([*arrays, *scalars]) if key not in donated]
    reusable = collections.Counter(_shape_and_dtype(step.state[key[0]]) for key in changed if key[0] in read_leaves)
    donated_values, kept_values = list[int](), list[int]()
    for index, (var, _) in enumerate(received):
        kind = _shape_and_dtype(var)
        is_reused = has_sole_receiver[index] and bool(kind[0]) and reusable[kind] > 0
        reusable[kind] -= is_reused
        (donated_values if is_reused else kept_values).append(index)

    def update(reused: list[jax.Array], others: list[jax.Array], staleness: jax.Array) -> list[jax.Array]:
        stored = dict(zip([*donated, *kept], [*reused[: len(donated)], *others[: len(kept)]], strict=True))
        values = [*reused[len(donated) :], *others[len(kept) :]]
        by_key = {received[i]: x for i, x in zip([*donated_values, *kept_values], values, strict=True)}
        new: dict[tuple[int, int], Any] = {}
        for one in updates:
            env = dict(step.constants)
            env.update({var: by_key[var, rows] for var, rows in _received(step, one) if var not in step.state})
            for number in step.partition.scalars.leaves:
                env[step.state[number]] = stored[number, one.shard.server]
            env.update({step.state[number]: stored[number, one.array_index] for number in one.group.leaves})
            table = _table_of(step, one)
            rows = None if table is None else _local_numbers(env[table.var], by_key[table.var, None], one.shard.start)
            new.update(_updated(step, one, env, rows, staleness))
        return [new[key] for key in changed]

    run = jax.jit(update, donate_argnums=(0,))
    return ServerUpdate(changed, donated, kept, donated_values, kept_values, run)


def _updated(
    step: PartitionedStep, update: UpdateOnServer, env: dict[Any, Any], rows: Any, staleness: jax.Array
) -> dict[tuple[int, int], jax.Array]:
    """Returns the new arrays of a group.

    Args:
        step: The step.
        update: The update of a group on one server.
        env: The values of the variables that the update uses.
        rows: The numbers of the rows to update, `[row]`; None for all.
        staleness: The staleness of the update.
    """
    leaves, part = update.group.leaves, update.group.part
    stored = {number: env[step.state[number]] for number in leaves}
    count = None if update.shard.stop is None else update.shard.stop - update.shard.start
    if rows is not None:
        count = len(rows)
        env.update({step.state[number]: x.at[rows].get(mode="fill", fill_value=0) for number, x in stored.items()})
    results = _RowsEvaluator(count, staleness).run(part.program, (), [env[var] for var in part.inputs])
    env.update(zip(part.outputs, results, strict=True))
    new: dict[tuple[int, int], jax.Array] = {}
    for number in leaves:
        if not _is_changed(step, number):
            continue
        atom, old = step.program.outvars[number], stored[number]
        value = jnp.asarray(atom.val, old.dtype) if isinstance(atom, Literal) else env[atom]
        if rows is not None:
            value = old.at[rows].set(jnp.broadcast_to(value, (count, *old.shape[1:])), mode="drop")
        new[number, update.array_index] = jnp.reshape(value, old.shape)
    return new


def _shape_and_dtype(var: Any) -> tuple[Any, Any]:
    return jax_compat.shape_of(var), var.aval.dtype


class _RowsEvaluator(Evaluator):
    """Evaluates an update; with `num_rows`, an elementwise update on this number of rows."""

    def __init__(self, num_rows: int | None, staleness: Any):
        self._num_rows, self._staleness = num_rows, staleness

    def enters(self, equation: Equation) -> bool:
        return False

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        if mark_of(equation) == STALENESS_MARK:
            return [self._staleness]
        if self._num_rows is None or equation.primitive.name != "broadcast_in_dim":
            return super().primitive(jaxpr, equation, operands)
        shape = jax_compat.shape_of(equation.outvars[0])
        return [jnp.broadcast_to(operands[0], (self._num_rows, *shape[1:]))]
