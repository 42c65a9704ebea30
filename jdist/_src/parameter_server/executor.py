"""`Executor`: runs workers and servers for an `Engine`: `LocalExecutor` on devices, `RayExecutor` in other processes."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from jdist._src.parameter_server.step_parts import StepParts
from jdist._src.parameter_server.storage import LeafStorage, Shard


class StepCall(NamedTuple):
    """One call of a step.

    Attributes:
        parts: The parts of the step.
        storages: The leaves of the state.
        inputs: The other arguments, flat.
    """

    parts: StepParts
    storages: Sequence[LeafStorage]
    inputs: Sequence[Any]


class Executor(abc.ABC):
    """Runs the parts of steps on workers and servers. Only the engine calls it, one call at a time.

    Args:
        num_workers: The number of workers.
        num_servers: The number of servers.
        host_sharding: The sharding of values that are read.
        tests_finite: Whether workers test the values that they send.
    """

    def __init__(self, num_workers: int, num_servers: int, host_sharding: Sharding, tests_finite: bool):
        self.num_workers, self.num_servers = num_workers, num_servers
        self._host_sharding, self._tests_finite = host_sharding, tests_finite

    def worker_pids(self) -> Sequence[int]:
        """Returns the id of the process of each worker, 0 for this process or while it starts."""
        return [0] * self.num_workers

    @abc.abstractmethod
    def store(self, value: Any, shards: tuple[Shard, ...]) -> LeafStorage:
        """Returns a leaf with a copy of `value` on the servers."""

    @abc.abstractmethod
    def replace(self, storage: LeafStorage, value: Any, shards: tuple[Shard, ...]) -> None:
        """Replaces the value and the shards of a leaf."""

    @abc.abstractmethod
    def read(self, storage: LeafStorage) -> jax.Array:
        """Returns the value of a leaf."""

    def prepare(self, call: StepCall) -> None:  # noqa: B027  # devices of this process need no preparation
        """Prepares the workers and servers for the first call of a step with these leaves, if they need it.

        Raises:
            ValueError: They cannot run it.
        """

    @abc.abstractmethod
    def start(self, worker: int, call: StepCall, num_in_progress: int) -> tuple[Any, list[jax.Array] | None]:
        """Starts a call on a worker, with the current state.

        Args:
            worker: The number of the worker.
            call: The call.
            num_in_progress: The number of calls in progress: workers that read the same version draw different numbers.

        Returns:
            The work in progress, for the other methods; and the outputs that the worker still computes, or None if they are
            known only when the work is done.
        """

    @abc.abstractmethod
    def wait_for_any(self, works: Sequence[Any], *, timeout: float | None) -> int | None:
        """Returns the index of a work that is done, or has failed, after waiting for it.

        Args:
            works: The works. Without a limit, an executor may return one that is not done: `results` waits for it.
            timeout: The seconds to wait, or None for no limit. The result is None if no work is done in time.
        """

    @abc.abstractmethod
    def results(self, work: Any) -> tuple[list[Any], bool]:
        """Waits for a work, and returns its outputs, and whether all values for the servers are finite or were not tested.

        Raises:
            WorkerLostError: The call has to be started again.
            Exception: The step raised an error.
        """

    @abc.abstractmethod
    def apply(self, work: Any, call: StepCall, staleness: int) -> None:
        """Applies the results of a work to the state."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Waits until all updates are applied, if an update can fail.

        Raises:
            RuntimeError: An update failed.
        """

    def add_snapshot(  # noqa: B027  # servers of this process end with it
        self, step: int, storages: Sequence[LeafStorage], read: Callable[[], Sequence[Any]]
    ) -> None:
        """Adds a checkpoint of the state, from which lost servers may be restored, if servers can be lost.

        Args:
            step: Its step.
            storages: The leaves that it contains, with all updates that were applied.
            read: Returns their values, after waiting until it is written.
        """
