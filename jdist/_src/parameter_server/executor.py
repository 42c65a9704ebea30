"""`Executor`: where the workers and the servers of an `Engine` run. `LocalExecutor` and `RayExecutor` are the two."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from jdist._src.parameter_server.step_parts import StepParts
from jdist._src.parameter_server.storage import LeafStorage, Shard


class StepInputs(NamedTuple):
    """One call of a step.

    Attributes:
        parts: The parts of the step.
        storages: The leaves of the state.
        inputs: The other arguments, flat.
    """

    parts: StepParts
    storages: Sequence[LeafStorage]
    inputs: Sequence[Any]


class StepResults(NamedTuple):
    """The results of a worker.

    Attributes:
        outputs: The outputs of the step.
        is_finite: Whether all values for the servers are finite; True if this was not tested.
    """

    outputs: list[Any]
    is_finite: bool


class Executor(Protocol):
    """Runs the parts of steps on workers and servers. Only the engine calls it, one call at a time.

    Attributes:
        num_workers: The number of workers.
        num_servers: The number of servers.
    """

    num_workers: int
    num_servers: int

    def worker_pids(self) -> Sequence[int]:
        """Returns the id of the process of each worker, 0 for this process or while it starts."""
        ...

    def store(self, value: Any, shards: tuple[Shard, ...]) -> LeafStorage:
        """Returns a leaf with a copy of `value` on the servers."""
        ...

    def replace(self, storage: LeafStorage, value: Any, shards: tuple[Shard, ...]) -> None:
        """Replaces the value and the shards of a leaf."""
        ...

    def read(self, storage: LeafStorage) -> jax.Array:
        """Returns the value of a leaf."""
        ...

    def prepare(self, call: StepInputs) -> None:
        """Prepares the workers and servers for the first call of a step with these leaves.

        Raises:
            ValueError: They cannot run it.
        """
        ...

    def start(self, worker: int, call: StepInputs, lead: int) -> tuple[Any, list[jax.Array] | None]:
        """Starts a call on a worker, with the current state.

        Args:
            worker: The number of the worker.
            call: The call.
            lead: The number of calls in progress, with which workers that read the same version draw different numbers.

        Returns:
            The work in progress, for the other methods; and the outputs that the worker still computes, or None if they are
            known only when the work is done.
        """
        ...

    def wait_for_any(self, works: Sequence[Any], *, timeout: float | None) -> int | None:
        """Returns the index of a work that is done, or has failed, after waiting for it.

        Args:
            works: The works. Without a limit, an executor may return one that is not done: `results` waits for it.
            timeout: The seconds to wait, or None for no limit. The result is None if no work is done in time.
        """
        ...

    def results(self, work: Any) -> StepResults:
        """Waits for a work, and returns its results.

        Raises:
            WorkerLostError: The call has to be started again.
            Exception: The step raised an error.
        """
        ...

    def apply(self, work: Any, call: StepInputs, staleness: int) -> None:
        """Applies the results of a work to the state."""
        ...

    def flush(self) -> None:
        """Waits until all updates are applied, if an update can fail.

        Raises:
            RuntimeError: An update failed.
        """
        ...

    def add_snapshot(self, step: int, storages: Sequence[LeafStorage], read: Callable[[], Sequence[Any]]) -> None:
        """Adds a checkpoint of the state, from which lost servers may be restored.

        Args:
            step: Its step.
            storages: The leaves that it contains, with all updates that were applied.
            read: Returns their values, after waiting until it is written.
        """
        ...
