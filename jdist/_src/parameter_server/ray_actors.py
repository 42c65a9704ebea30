"""The Ray actors of a worker and of a server. Each runs in a separate process; `RayExecutor` calls them.

An actor runs its calls in the order in which the host program makes them. So all servers apply updates in one order, and a
value that is read contains the updates that were requested before.
"""

import dataclasses
import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jdist._src.parameter_server.exported_parts import load_part
from jdist._src.parameter_server.worker_index import Worker, call_function, running_on

Key: TypeAlias = tuple[int, int]  # the number of a stored leaf, and of its array


class MissingUpdateError(RuntimeError):
    """A server did not receive an update, so its state is not complete."""


class ActorProcess(NamedTuple):
    """The process of an actor.

    Attributes:
        platform: The platform of its devices.
        jax_version: The version of JAX.
        pid: The id of the process.
        node: The address of the node.
    """

    platform: str
    jax_version: str
    pid: int
    node: str


class WorkerPart(NamedTuple):
    """The part of a worker. The operands of its program are the arrays of its messages, and the number of calls in progress.

    Attributes:
        data: The exported program.
        order: For each operand except for the last, its number in the arrays of the inputs and of the messages of the servers.
        num_outputs: The number of outputs, which are the first results. The next result is whether all values are finite.
        num_sent: For each node with servers, the number of values for them, which are the other results.
    """

    data: bytes
    order: Sequence[int]
    num_outputs: int
    num_sent: Sequence[int]


class ServerPart(NamedTuple):
    """The part of a server.

    Attributes:
        update: The exported program of the update, or None. Its operands are stored arrays, the values of a worker, and the
            staleness.
        changed: The operands that its results replace.
        received: The first of the values that a worker sends to the node of this server, and the number after the last.
        look_up: The exported program that returns rows of tables, or None. Its operands are stored arrays, and inputs.
    """

    update: bytes | None
    changed: Sequence[int]
    received: tuple[int, int]
    look_up: bytes | None


class ServerBinding(NamedTuple):
    """The stored arrays that a step uses on a server.

    Attributes:
        part: The number of the `ServerPart`.
        updated: The operands of its update.
        read: The arrays that a worker reads.
        tables: The arrays whose rows it looks up: the operands of the program that looks them up.
    """

    part: int
    updated: Sequence[Key]
    read: Sequence[Key]
    tables: Sequence[Key]


class Update(NamedTuple):
    """A request for an update of a server.

    Attributes:
        sequence: Its number, from 1, of all updates of this server.
        binding: The number of the `ServerBinding`.
        staleness: The staleness.
    """

    sequence: int
    binding: int
    staleness: int


@dataclasses.dataclass(frozen=True)
class CellReference:
    """A placeholder of a per-worker value in the arguments of a scheduled function.

    Attributes:
        number: The number of the value.
        make: The function that creates it, as an object of Ray.
    """

    number: int
    make: Any


class _Actor:
    """The process of a worker or of a server.

    Args:
        settings: Settings of JAX.
    """

    def __init__(self, settings: Mapping[str, Any]):
        _configure(settings)

    def process(self) -> ActorProcess:
        """Returns the process."""
        address = importlib.import_module("ray.util").get_node_ip_address()
        return ActorProcess(jax.default_backend(), jax.__version__, os.getpid(), address)


class WorkerActor(_Actor):
    """A worker. Mutable: it holds the parts of steps, and the values of scheduled functions."""

    def __init__(self, settings: Mapping[str, Any]):
        super().__init__(settings)
        self._parts: dict[int, tuple[WorkerPart, Any]] = {}
        self._cells: dict[int, Any] = {}

    def load(self, number: int, part: WorkerPart) -> None:
        """Stores the part of a step."""
        self._parts[number] = part._replace(data=b""), load_part(part.data)

    def run(self, number: int, num_in_progress: int, *messages: list[np.ndarray]) -> Any:
        """Runs the part of a step.

        Args:
            number: The number of the part.
            num_in_progress: The number of calls in progress.
            *messages: The inputs, and the messages of the servers that it reads.

        Returns:
            The outputs and whether all values are finite, and then the message for each node whose servers receive values.
        """
        part, program = self._parts[number]
        arrays = [x for message in messages for x in message]
        results = program(*(arrays[i] for i in part.order), np.int32(num_in_progress))
        values = iter(results[part.num_outputs + 1 :])
        sent = [to_message(itertools.islice(values, count)) for count in part.num_sent if count]
        outputs = to_message(results[: part.num_outputs]), bool(results[part.num_outputs])
        return (outputs, *sent) if sent else outputs

    def call(
        self, worker: Worker, fn: Callable[..., Any], args: Any, kwargs: Any, name: str, settings: Mapping[str, Any]
    ) -> Any:
        """Runs a scheduled function.

        Args:
            worker: This worker.
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            name: Its name, for messages.
            settings: Settings of JAX.
        """
        with running_on(worker):
            _configure(settings)
            args, kwargs = jax.tree.map(self._resolved, (args, kwargs))
            return call_function(fn, args, kwargs, name)

    def cell(self, number: int) -> Any:
        """Returns a value that `call` has created."""
        return self._cells[number]

    def _resolved(self, leaf: Any) -> Any:
        if not isinstance(leaf, CellReference):
            return leaf
        if leaf.number not in self._cells:
            make = importlib.import_module("ray").get(leaf.make)
            self._cells[leaf.number] = make()
        return self._cells[leaf.number]


class ServerActor(_Actor):
    """A server. Mutable: it holds the arrays of the state, the parts of steps, and the number of updates."""

    def __init__(self, settings: Mapping[str, Any]):
        super().__init__(settings)
        self._arrays: dict[Key, jax.Array] = {}
        self._parts: dict[int, tuple[ServerPart, Any, Any]] = {}
        self._bindings: dict[int, ServerBinding] = {}
        self._num_updates = 0
        self._error: Exception | None = None

    def check(self) -> None:
        """Raises the error of an update."""
        if self._error is not None:
            raise self._error

    def load(self, number: int, part: ServerPart) -> None:
        """Stores the part of a step."""
        update = None if part.update is None else load_part(part.update, part.changed)
        look_up = None if part.look_up is None else load_part(part.look_up)
        self._parts[number] = part._replace(update=None, look_up=None), update, look_up

    def bind(self, number: int, binding: ServerBinding) -> None:
        """Stores which arrays a step uses."""
        self._bindings[number] = binding

    def set(self, key: Key, value: np.ndarray) -> None:
        """Stores an array."""
        self._arrays[key] = jax.numpy.array(value)  # a copy: updates reuse its memory

    def get(self, key: Key) -> np.ndarray:
        """Returns an array."""
        self.check()
        return np.asarray(self._arrays[key])

    def delete(self, keys: Sequence[Key]) -> None:
        """Deletes arrays."""
        for key in keys:
            self._arrays.pop(key, None)

    def start_sequence(self, num_updates: int) -> None:
        """Sets the number of updates that the stored arrays contain."""
        self._num_updates = num_updates

    def exchange(
        self, updates: Sequence[Update], binding: int | None, inputs: list[np.ndarray] | None, *values: list[np.ndarray]
    ) -> list[np.ndarray] | None:
        """Applies updates, and returns the message for a worker that reads.

        Args:
            updates: The updates.
            binding: The number of the `ServerBinding` of the worker, or None.
            inputs: Inputs of the step, for the rows of tables that it looks up.
            *values: The message with the values for each update.
        """
        self.check()
        try:
            for update, values_of_update in zip(updates, values, strict=True):
                self._apply(update, values_of_update)
        except Exception as error:
            self._error = error
            raise
        return None if binding is None else self._read(self._bindings[binding], inputs)

    def _apply(self, update: Update, values: list[np.ndarray]) -> None:
        if update.sequence <= self._num_updates:
            return  # Ray may run a call more than once
        if update.sequence != self._num_updates + 1:
            raise MissingUpdateError(
                f"The server has received update {update.sequence} after update {self._num_updates}: the updates between "
                "them are lost."
            )
        binding = self._bindings[update.binding]
        part, program, _ = self._parts[binding.part]
        received = values[slice(*part.received)]
        new = program(*(self._arrays[key] for key in binding.updated), *received, np.float32(update.staleness))
        self._arrays.update(zip((binding.updated[i] for i in part.changed), new, strict=True))
        self._num_updates = update.sequence

    def _read(self, binding: ServerBinding, inputs: list[np.ndarray] | None) -> list[np.ndarray]:
        arrays = [self._arrays[key] for key in binding.read]
        if inputs is not None:
            _, _, look_up = self._parts[binding.part]
            arrays += look_up(*(self._arrays[key] for key in binding.tables), *inputs)
        return to_message(arrays)


def to_message(arrays: Iterable[Any]) -> list[np.ndarray]:
    """Returns arrays as Ray sends them. They may share the memory of JAX arrays, which must not be donated before."""
    return [np.asarray(x) for x in arrays]


def _configure(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
