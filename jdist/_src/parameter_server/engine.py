"""`Engine`: selects the worker of each call of a step, and applies the results of the workers.

A call of the step applies the results of all workers that have finished, and starts the next worker; if all are busy, it waits
for one of them. Updates are applied one at a time, and all servers apply them in the same order, so that the state has one
version. If a worker is lost, its call starts again on a new worker: each call is applied exactly once.
"""

import collections
import functools
import logging
import pathlib
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from jdist._src.core import exit_work
from jdist._src.core.tree import PyTree
from jdist._src.parameter_server import staleness
from jdist._src.parameter_server.closure_queue import MAX_ATTEMPTS, WorkerLostError
from jdist._src.parameter_server.event_log import UPDATES_PER_DIGEST, Replay, digest, open_log
from jdist._src.parameter_server.executor import Executor, StepCall
from jdist._src.parameter_server.partitioners import row_ranges
from jdist._src.parameter_server.server_array import OutputArray
from jdist._src.parameter_server.step_parts import StepParts
from jdist._src.parameter_server.storage import LeafStorage, Shard
from jdist._src.replica.finite import NonFinite

_LOG = logging.getLogger("jdist")


class WorkerProgress(NamedTuple):
    """The progress of a worker.

    Attributes:
        updates: The number of its updates that were applied.
        version: The version of the state that it has read last; -1 before the first step.
        staleness: The staleness of its last update; 0 before the first.
        skipped: The number of its updates that were not finite and were not applied (`non_finite="skip"`).
        restarts: The number of its calls that started again, because the worker or a server that it read was lost.
        pid: The id of its process on its node; 0 if the worker is in this process, or has not started yet.

    Example:
        >>> progress = jdist.ParameterServerStrategy(workers=2).worker_progress()
        >>> [worker.updates for worker in progress]
        [0, 0]
    """

    updates: int = 0
    version: int = -1
    staleness: int = 0
    skipped: int = 0
    restarts: int = 0
    pid: int = 0


class _RunningCall(NamedTuple):
    """A call of a step that a worker runs.

    Attributes:
        worker: The number of the worker.
        version: The version of the state that it read.
        number: The number of the call, from 0.
        name: The name of the step.
        step_call: The parts and the arguments of the call, which also keep the leaves of the state alive.
        work: The work of the worker.
        outputs: The outputs, which the worker may still compute, or the error of the call.
        attempts: The number of workers that ran the call.
    """

    worker: int
    version: int
    number: int
    name: str
    step_call: StepCall
    work: Any
    outputs: Future[Sequence[Any]]
    attempts: int


class Engine:
    """Starts calls of steps on workers, and applies their results.

    Mutable: it holds the calls in progress and the version of the state. Threads may call it at the same time.

    Args:
        executor: Runs the parts of a step.
        max_staleness: The maximum staleness of an update, or None.
        record: The file for the order of the events, or None.
        non_finite: The treatment of values of a worker that are not finite.
        num_threads: The number of threads of XLA in a worker, for `record`; None if it is not set.
        calls_per_worker: The number of calls that a worker has at a time. With 2, the next one reads the state while the worker
            computes.
    """

    def __init__(
        self,
        executor: Executor,
        max_staleness: int | None,
        record: pathlib.Path | None,
        non_finite: NonFinite,
        num_threads: str | None,
        calls_per_worker: int,
    ):
        self.executor, self._bound, self._non_finite = executor, max_staleness, non_finite
        self._lock, self._exit_key = threading.RLock(), object()
        self._calls_per_worker = calls_per_worker
        self._idle = list(range(executor.num_workers)) * calls_per_worker
        self._in_progress: list[_RunningCall] = []  # in the order of the versions that they read
        self._version = self._num_calls = self._next_server = 0
        self._counts: collections.Counter[int] = collections.Counter()
        self._progress = [WorkerProgress() for _ in range(executor.num_workers)]
        self._delayed: dict[int, tuple[str, StepCall, Future[Sequence[Any]]]] = {}  # calls that a replay starts later
        self._num_updates = 0  # with those that were skipped
        self._last_storages: Sequence[LeafStorage] = ()  # of a recorded run, the state of the last update
        self._log, self._replay = open_log(record, executor.num_workers, num_threads)
        if record is not None:  # the log needs its end
            exit_work.add(self._exit_key, self._finish, "the log of a run was written")

    @property
    def num_calls(self) -> int:
        """The number of calls that were started."""
        return self._num_calls

    def staleness_counts(self) -> dict[int, int]:
        """Returns the number of updates of each staleness that were applied."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def worker_progress(self) -> tuple[WorkerProgress, ...]:
        """Returns the progress of each worker."""
        with self._lock:
            pids = self.executor.worker_pids()
            return tuple(one._replace(pid=pid) for one, pid in zip(self._progress, pids, strict=True))

    def next_shards(self, num_shards: int, num_rows: int | None) -> tuple[Shard, ...]:
        """Returns the shards of the next group of leaves: on the next server, or its rows on the next servers."""
        with self._lock:
            first, count = self._next_server, self.executor.num_servers
            self._next_server = (first + num_shards) % count
        if num_rows is None:
            return (Shard(first),)
        ranges = enumerate(row_ranges(num_rows, num_shards))
        return tuple(Shard((first + number) % count, *rows) for number, rows in ranges)

    def store(self, value: Any, shards: tuple[Shard, ...]) -> LeafStorage:
        """Returns a leaf with a copy of `value` on the servers."""
        with self._lock:
            return self.executor.store(value, shards)

    def move(self, storage: LeafStorage, shards: tuple[Shard, ...]) -> None:
        """Moves a leaf to other shards, after waiting for all workers."""
        with self._lock:
            self.executor.replace(storage, self.read(storage), shards)

    def read(self, storage: LeafStorage) -> jax.Array:
        """Returns the value of a leaf, after waiting for all workers."""
        with self._lock:
            self.join()
            return self.executor.read(storage)

    def start(
        self,
        name: str,
        parts: StepParts,
        storages: Sequence[LeafStorage],
        inputs: Sequence[Any],
        put_outputs: Callable[[Sequence[Any]], list[jax.Array]],
    ) -> PyTree:
        """Starts a step on an idle worker, and returns its outputs, which the worker still computes.

        Raises:
            RuntimeError: A worker failed.
            ValueError: The workers cannot run the step.
        """
        with self._lock:
            step_call, outputs = StepCall(parts, storages, inputs), Future[Sequence[Any]]()
            self.executor.prepare(step_call)
            if self._replay is None:
                self._start_on(self._next_worker(), self._num_calls, name, step_call, outputs, 1)
            else:
                self._start_recorded(self._replay, name, step_call, outputs)
            self._num_calls += 1
        if outputs.done():
            return put_outputs(outputs.result())
        read = lambda index: put_outputs([self._output(outputs, index)])[0]
        return [OutputArray(spec, functools.partial(read, i)) for i, spec in enumerate(parts.output_shapes)]

    def _start_on(
        self, worker: int, number: int, name: str, step_call: StepCall, outputs: Future[Sequence[Any]], attempts: int
    ) -> None:
        if self._log:
            self._log.write(start=number, worker=worker, version=self._version, step=name)
        if self._log is None and self._replay is None:
            finish_at_exit = functools.partial(_finish, weakref.ref(self))
            exit_work.add(self._exit_key, finish_at_exit, "calls of a step were in progress")
        try:
            work, early_outputs = self.executor.start(worker, step_call, len(self._in_progress))
        except Exception as error:  # XLA runs small programs on the CPU in this thread
            raise _fail_outputs(outputs, _failure_message(worker, number, name, error)) from error
        if early_outputs is not None:
            outputs.set_result(early_outputs)
        self._idle.remove(worker)
        self._in_progress.append(_RunningCall(worker, self._version, number, name, step_call, work, outputs, attempts))
        self._progress[worker] = self._progress[worker]._replace(version=self._version)

    def join(self) -> None:
        """Waits for all workers, and applies their results.

        Raises:
            RuntimeError: A worker failed.
        """
        with self._lock:
            while self._in_progress or self._delayed:
                self._apply_next()
            self.executor.flush()
            if self._log is None and self._replay is None:
                exit_work.remove(self._exit_key)

    def _finish(self) -> None:
        """Applies the calls in progress when the program ends, and ends the log.

        Raises:
            RuntimeError: A worker failed.
        """
        errors: list[Exception] = []
        with self._lock:
            while self._in_progress or (self._replay is not None and self._replay_events(self._replay)):
                try:
                    self._apply_next()
                except Exception as error:
                    errors.append(error)
            self.executor.flush()
            if self._num_updates % UPDATES_PER_DIGEST:
                self._compare_state()
            if self._log is not None:
                self._log.write(end=self._num_updates)
            if self._replay is not None:
                self._replay.write_verdict()
        if errors:
            errors[0].add_note(f"Found at the end of the program. {len(errors)} of its last calls failed.")
            raise errors[0]

    def __del__(self) -> None:
        # The strategy and the state were dropped: of the updates in progress, only their errors are left.
        exit_work.remove(self._exit_key)
        calls = list(self._in_progress)
        while calls and (index := self.executor.wait_for_any([call.work for call in calls], timeout=0)) is not None:
            call = calls.pop(index)
            try:
                _, is_finite = self.executor.results(call.work)
                if not is_finite and self._non_finite == "stop":
                    exit_work.end_with_failure(_not_finite_message(call))
            except WorkerLostError:  # with the strategy
                continue
            except Exception as error:
                exit_work.end_with_failure(_failure_message(call.worker, call.number, call.name, error))

    def _count_update(self, call: _RunningCall) -> None:
        """Counts a call that was applied or skipped, and compares or records the state after some of them."""
        self._num_updates += 1
        if self._log is not None:
            self._log.write(apply=call.number)
        if self._log is not None or self._replay is not None:
            self._last_storages = call.step_call.storages
            if not self._num_updates % UPDATES_PER_DIGEST:
                self._compare_state()

    def _compare_state(self) -> None:
        read_leaves = lambda: map(self.executor.read, self._last_storages)
        if self._log is not None:
            self._log.write(digest=digest(read_leaves()), updates=self._num_updates)
        if self._replay is not None:
            self._replay.compare(self._num_updates, read_leaves)

    def _output(self, outputs: Future[Sequence[Any]], index: int) -> Any:
        """Returns an output of a call, after waiting for the call."""
        while not outputs.done():
            with self._lock:
                if self._in_progress or self._delayed:
                    self._apply_next()
        return outputs.result()[index]

    def _next_worker(self) -> int:
        """Returns the worker for the next call, after waiting until one may start."""
        if self._calls_per_worker == 1:
            while self._in_progress and self._apply_next(timeout=0):
                pass
        elif not self._idle:  # the next calls read the same version, which is sent once
            while len(self._idle) < self._calls_per_worker:
                self._apply_next()
        while not self._idle or not staleness.may_start(len(self._in_progress), self._bound):
            self._apply_next()
        return self._idle[0]

    def _start_recorded(self, replay: Replay, name: str, step_call: StepCall, outputs: Future[Sequence[Any]]) -> None:
        """Starts a call if the recorded run started it before the next one. It did not if the worker was lost."""
        number = self._num_calls
        self._delayed[number] = name, step_call, outputs
        try:
            self._replay_events(replay)
            if number in self._delayed:
                replay.check_start(number, name)
        except RuntimeError:
            self._delayed.pop(number, None)
            raise

    def _replay_events(self, replay: Replay) -> bool:
        """Applies and starts the calls of the program in the recorded order. Returns whether there was one."""
        has_event = False
        while (event := replay.next_event) is not None:
            if event.kind == "apply":
                replay.advance()
                self._apply([call.number for call in self._in_progress].index(event.call))
            elif event.call in self._delayed:
                name, step_call, outputs = self._delayed[event.call]
                replay.check_start(event.call, name)
                replay.advance()
                del self._delayed[event.call]
                self._start_on(event.worker, event.call, name, step_call, outputs, 1)
            else:
                break
            has_event = True
        return has_event

    def _apply_next(self, timeout: float | None = None) -> bool:
        """Applies the results of the first worker that finishes and may be applied. Returns whether there was one in time."""
        if self._replay is not None and self._replay_events(self._replay):
            return True
        allowed = [index for index in range(len(self._in_progress)) if self._may_apply(index)]
        done = self.executor.wait_for_any([self._in_progress[index].work for index in allowed], timeout=timeout)
        if done is None:
            return False
        self._apply(allowed[done])
        return True

    def _may_apply(self, index: int) -> bool:
        versions = [call.version for call in self._in_progress]
        return staleness.may_apply(index, versions, self._version, self._bound)

    def _apply(self, index: int) -> None:
        call = self._in_progress.pop(index)
        self._idle.append(call.worker)
        try:
            outputs, is_finite = self.executor.results(call.work)
        except WorkerLostError as error:
            self._start_again(call, error)
            return
        except Exception as error:
            raise _fail_outputs(call.outputs, _failure_message(call.worker, call.number, call.name, error)) from error
        if not call.outputs.done():
            call.outputs.set_result(outputs)
        if not is_finite:
            self._skip(call)
            return
        age, progress = self._version - call.version, self._progress[call.worker]
        self.executor.apply(call.work, call.step_call, age)
        self._progress[call.worker] = progress._replace(updates=progress.updates + 1, staleness=age)
        self._counts[age] += 1
        self._version += 1
        self._count_update(call)

    def _start_again(self, call: _RunningCall, error: WorkerLostError) -> None:
        progress = self._progress[call.worker]
        self._progress[call.worker] = progress._replace(restarts=progress.restarts + 1)
        if self._log:
            self._log.write(lost=call.number)
        _LOG.warning("Call %d of a step, `%s`, starts again. %s", call.number + 1, call.name, error)
        if call.attempts >= MAX_ATTEMPTS:
            message = (
                f"{_failure_message(call.worker, call.number, call.name, error)} It was started {call.attempts} times."
            )
            raise _fail_outputs(call.outputs, message) from error
        self._start_on(call.worker, call.number, call.name, call.step_call, call.outputs, call.attempts + 1)

    def _skip(self, call: _RunningCall) -> None:
        """Does not apply the results of a worker, because they are not finite."""
        progress = self._progress[call.worker]
        self._progress[call.worker] = progress._replace(skipped=progress.skipped + 1)
        self._count_update(call)  # a replay skips it too
        message = _not_finite_message(call)
        if self._non_finite == "stop":
            raise FloatingPointError(f"{message} Look at the batch of this call, the learning rate and the loss.")
        if not progress.skipped:
            _LOG.warning(
                '%s `strategy.worker_progress()[%d].skipped` counts further ones (non_finite="skip").',
                *(message, call.worker),
            )


def _finish(engine: Callable[[], Engine | None]) -> None:
    if (existing := engine()) is not None:
        existing._finish()


def _not_finite_message(call: _RunningCall) -> str:
    return (
        f"Worker {call.worker} computed values that are not finite in call {call.number + 1} of a step, `{call.name}`. "
        "Its update was not applied."
    )


def _fail_outputs(outputs: Future[Sequence[Any]], message: str) -> RuntimeError:
    """Returns the error of a call. Later reads of its outputs raise an error with this message too."""
    if not outputs.done():
        outputs.set_exception(RuntimeError(message))
    return RuntimeError(message)


def _failure_message(worker: int, number: int, name: str, error: Exception) -> str:
    return (
        f"Worker {worker} failed in call {number + 1} of a step, `{name}`: {error}\n  Its update was not applied; the state "
        "contains the updates of all other calls."
    )
