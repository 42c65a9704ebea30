"""`UpdateHistory`: restores a server that was lost, from values of the state and the updates since then."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jdist._src.parameter_server.exported_parts import to_host
from jdist._src.parameter_server.ray_actors import Key, Update
from jdist._src.parameter_server.storage import Shard, rows_of


class RequestedUpdate(NamedTuple):
    """An update of a server.

    Attributes:
        update: The request.
        values: The values of the worker, an object.
    """

    update: Update
    values: Any


class StoredLeaf(NamedTuple):
    """A leaf of the state.

    Attributes:
        shards: The rows that each array contains.
        keys: The key of each array.
        objects: The value of each array, as an object.
    """

    shards: Sequence[Shard]
    keys: Sequence[Key]
    objects: Sequence[Any]


class Snapshot(NamedTuple):
    """A checkpoint of the state.

    Attributes:
        step: Its step.
        leaves: The numbers of its leaves, in order.
        read: Returns their values, after waiting until the checkpoint is written.
    """

    step: int
    leaves: Sequence[int]
    read: Callable[[], Sequence[Any]]


class UpdateHistory:
    """Values of the state, and the updates since then.

    The values are the newest complete checkpoint. Before the first one, and of leaves that are newer, they are objects in Ray's
    object store. Mutable: leaves, updates and checkpoints are added.

    Args:
        num_servers: The number of servers.
    """

    def __init__(self, num_servers: int):
        self._leaves: dict[int, StoredLeaf] = {}
        self._snapshot: Snapshot | None = None
        # The checkpoint that is being written, after these numbers of updates.
        self._incomplete: tuple[Snapshot, Sequence[int]] | None = None
        self._num_updates: Sequence[int] = [0] * num_servers  # that the values contain
        self._updates: list[list[RequestedUpdate]] = [[] for _ in range(num_servers)]

    def add_leaf(self, number: int, leaf: StoredLeaf) -> None:
        """Adds a leaf with a new number."""
        self._leaves[number] = leaf

    def add_update(self, server: int, requested: RequestedUpdate) -> None:
        """Adds an update of a server."""
        self._updates[server].append(requested)

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """Adds a checkpoint that is being written. The one before it is complete."""
        self._complete_snapshot()
        self._incomplete = snapshot, self._current_numbers()

    def start_again(self, leaves: Mapping[int, StoredLeaf]) -> None:
        """Starts a new history with the current values, because leaves were removed that earlier updates use."""
        self._num_updates = self._current_numbers()
        self._updates = [[] for _ in self._updates]
        self._leaves, self._snapshot, self._incomplete = dict(leaves), None, None

    def describe(self, server: int) -> str:
        """Returns a text that names the values and the number of updates that restore a server."""
        self._complete_snapshot()
        values = "its first values" if self._snapshot is None else f"the checkpoint of step {self._snapshot.step}"
        return f"{values} and {len(self._updates[server])} updates"

    def values(self, server: int) -> Iterator[tuple[Key, Any]]:
        """Returns the arrays of a server before the updates, each as an object or an array."""
        self._complete_snapshot()
        saved: Mapping[int, Any] = {}
        if self._snapshot is not None:
            saved = dict(zip(self._snapshot.leaves, self._snapshot.read(), strict=True))
        for number, leaf in self._leaves.items():
            for array_index, (shard, key) in enumerate(zip(leaf.shards, leaf.keys, strict=True)):
                if shard.server == server:
                    yield key, to_host(rows_of(saved[number], shard)) if number in saved else leaf.objects[array_index]

    def updates(self, server: int) -> tuple[int, list[RequestedUpdate]]:
        """Returns the number of updates that the values contain, and the updates after them."""
        return self._num_updates[server], self._updates[server]

    def _current_numbers(self) -> list[int]:
        return [start + len(updates) for start, updates in zip(self._num_updates, self._updates, strict=True)]

    def _complete_snapshot(self) -> None:
        if self._incomplete is None:
            return
        (self._snapshot, self._num_updates), self._incomplete = self._incomplete, None
        for number in self._snapshot.leaves:
            self._leaves[number] = self._leaves[number]._replace(objects=())
        for server, start in enumerate(self._num_updates):
            self._updates[server] = [one for one in self._updates[server] if one.update.sequence > start]
