"""The bounded queue of scheduled functions, and the threads that run them.

The queue records the first error of the functions, and returns functions of lost workers again.
"""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from jdist._src.core import exit_work
from jdist._src.core.background_threads import STOP_SECONDS, start_thread
from jdist._src.parameter_server.worker_index import Worker, in_scheduled_function

CAPACITY = 256 * 1024  # functions that wait for a worker, as in TensorFlow
MAX_ATTEMPTS = 10  # workers that a function, or a call of a step, may lose
_POLL_SECONDS = 0.5  # interval in which an idle worker notices the end of its coordinator
_LOG = logging.getLogger("jdist")


class CancelledError(RuntimeError):
    """A scheduled function did not run, because another one failed before. Schedule it again.

    Raised by the methods of its `RemoteValue`.
    """


class WorkerLostError(RuntimeError):
    """A worker was lost. The function, or the call of a step, that it ran had no effect, and can run on another worker."""


@dataclasses.dataclass(eq=False, slots=True)
class Closure:
    """A scheduled function with its arguments. Mutable: the queue numbers it, and counts its attempts.

    Attributes:
        run: Runs the function on a worker.
        name: Its name, for messages.
        worker: The index of the only worker that may run it; None for any.
        future: Its result or error.
        failures_before: The number of failures in the queue before it was scheduled.
        attempts: The number of workers that ran it.
    """

    run: Callable[[Worker], Any]
    name: str
    worker: int | None = None
    future: Future[Any] = dataclasses.field(default_factory=Future)
    failures_before: int = 0
    attempts: int = 0


class ClosureQueue:
    """Scheduled functions that wait for a worker, and the number of those that run.

    The first error cancels all functions that wait. It is raised once, by the next `put`, `wait` or `is_done`; functions that
    were scheduled before it and fail later report their errors to their own `RemoteValue` only. A function of one worker
    (`Closure.worker`) is not counted, not cancelled, and does not report an error here.

    Mutable, for any number of threads.
    """

    def __init__(self, capacity: int = CAPACITY):
        self._capacity = capacity
        lock = threading.Lock()
        self._lock = lock
        self._has_work, self._has_space, self._is_idle = (threading.Condition(lock) for _ in range(3))
        self._waiting: collections.deque[Closure] = collections.deque()
        self._waiting_of_worker: dict[int, collections.deque[Closure]] = collections.defaultdict(collections.deque)
        self._num_running = 0
        self._num_failures = 0
        self._failed: Future[Any] | None = None  # the first failed function, until its error is raised
        self._workers: set[int] = set()  # with a thread
        self._is_closed = self._is_released = False

    def __repr__(self) -> str:
        return f"{len(self._waiting)} waiting, {self._num_running} running"

    # The coordinator's side.

    def put(self, closure: Closure) -> None:
        """Adds a function; waits while the queue is full.

        Raises:
            BaseException: The first error of earlier functions, if it has not been raised.
            RuntimeError: The interpreter exits.
        """
        with self._lock:
            if closure.worker is None:
                self._has_space.wait_for(lambda: self._failed or self._is_closed or len(self._waiting) < self._capacity)
                self._raise_error()
            if self._is_closed:
                raise RuntimeError(
                    "A function cannot be scheduled while the interpreter exits: its workers have ended."
                )
            closure.failures_before = self._num_failures
            self._add(closure)

    def wait(self) -> None:
        """Waits until no function waits or runs.

        Raises:
            BaseException: The first error of the functions, if it has not been raised.
        """
        with self._lock:
            self._is_idle.wait_for(lambda: not self._waiting and not self._num_running)
            self._raise_error()

    def is_done(self) -> bool:
        """Returns whether no function waits or runs.

        Raises:
            BaseException: The first error of the functions, if it has not been raised.
        """
        with self._lock:
            self._raise_error()
            return not self._waiting and not self._num_running

    def attach_workers(self, num_workers: int) -> list[int]:
        """Returns the indices of the workers without a thread, which need one that calls `get` until it returns None."""
        with self._lock:
            self._is_released = False
            indices = [i for i in range(num_workers) if i not in self._workers]
            self._workers.update(indices)
            exit_work.add(self, self._finish_at_exit, "a scheduled function ran")
            return indices

    def release_workers(self) -> None:
        """Lets the threads end when no function waits. Does not block: the garbage collector may call it at any point."""
        self._is_released = True
        if self._lock.acquire(blocking=False):  # else the threads end when they poll
            self._has_work.notify_all()
            self._lock.release()

    def close(self) -> None:
        """Cancels the functions that wait, and lets the threads end."""
        with self._lock:
            self._is_closed = True
            cancelled = [*self._waiting, *(c for closures in self._waiting_of_worker.values() for c in closures)]
            self._waiting.clear()
            self._waiting_of_worker.clear()
            for condition in (self._has_work, self._has_space, self._is_idle):
                condition.notify_all()
        _cancel(cancelled, "the interpreter exits")

    def _finish_at_exit(self) -> None:
        """Cancels the functions that wait, and waits for those that run, whose errors are then printed."""
        self.close()
        with self._lock:
            self._is_idle.wait_for(lambda: not self._num_running, STOP_SECONDS)

    # The workers' side.

    def get(self, worker: int) -> Closure | None:
        """Returns the next function for a worker, waiting for it. None: the thread of the worker ends.

        It ends when no function waits, and the coordinator is deleted or has to raise an error.
        """
        with self._lock:
            while True:
                for closures in (self._waiting_of_worker.get(worker), self._waiting):
                    if closures:
                        closure = closures.popleft()
                        closure.attempts += 1
                        if closure.worker is None:
                            self._num_running += 1
                            self._has_space.notify()
                        return closure
                # An error references frames of the program. Without threads, the garbage collector can free all of them.
                if self._is_closed or self._is_released or self._failed is not None:
                    break
                self._has_work.wait(_POLL_SECONDS)
            self._workers.discard(worker)
            if not self._workers:
                exit_work.remove(self)
                if self._is_released and self._failed is not None:
                    error = self._failed.exception()
                    text = f"{type(error).__name__}: {error}"
                    _LOG.warning("A scheduled function failed, and `join` was not called after it: %s", text)
            return None

    def finish(self, closure: Closure, value: Any) -> None:
        """Sets the result of a function that `get` returned."""
        with self._lock:  # a caller that fetches the result finds the function counted as ended
            closure.future.set_result(value)
            self._end(closure)

    def fail(self, closure: Closure, error: BaseException) -> None:
        """Sets the error of a function that `get` returned. The first error cancels all functions that wait."""
        with self._lock:
            if closure.worker is None and closure.failures_before == self._num_failures:
                self._failed = closure.future
                exit_work.add(closure.future, closure.future.result, "an error was printed")
                self._num_failures += 1
                cancelled = list(self._waiting)
                self._waiting.clear()
                self._has_space.notify_all()
                _cancel(cancelled, f"`{closure.name}` failed before it ran")
            closure.future.set_exception(error)  # last, because a caller that fetches it removes the report at exit
            self._end(closure)

    def requeue(self, closure: Closure, error: WorkerLostError) -> None:
        """Returns a function of a lost worker to the front of the queue.

        It is cancelled if another function has failed since it was scheduled. It fails with `error` if it has lost
        `MAX_ATTEMPTS` workers.
        """
        if closure.attempts >= MAX_ATTEMPTS:
            error.add_note(f"`{closure.name}` is not run again: it has lost {closure.attempts} workers.")
            self.fail(closure, error)
            return
        with self._lock:
            if self._is_closed or (closure.worker is None and closure.failures_before != self._num_failures):
                _cancel([closure], "its worker was lost, and another function had failed")
            else:
                self._add(closure, first=True)
            self._end(closure)

    def _add(self, closure: Closure, first: bool = False) -> None:
        closures = self._waiting if closure.worker is None else self._waiting_of_worker[closure.worker]
        (closures.appendleft if first else closures.append)(closure)
        if closure.worker is None:
            self._has_work.notify()
        else:
            self._has_work.notify_all()  # one of them is the worker

    def _end(self, closure: Closure) -> None:
        """Counts a function that no longer runs."""
        if closure.worker is None:
            self._num_running -= 1
            if not self._num_running and not self._waiting:
                self._is_idle.notify_all()

    def _raise_error(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            result_of(failed)


def result_of(future: Future[Any]) -> Any:
    """Waits for a scheduled function, and returns its result or raises its error, which is then not printed at exit.

    Raises:
        BaseException: The error of the function.
        RuntimeError: The call is in a scheduled function, and the result is not available yet.
    """
    if not future.done():
        check_outside_scheduled_function("wait for the result of another one")
    future.exception()
    exit_work.remove(future)
    return future.result()


def check_outside_scheduled_function(action: str) -> None:
    """Raises RuntimeError in a scheduled function.

    Args:
        action: The part of the message after "cannot".
    """
    if in_scheduled_function():
        raise RuntimeError(
            f"A scheduled function cannot {action}: it occupies a worker while it waits, and the workers could wait for each "
            "other forever. Do it in the program that schedules the functions."
        )


def _cancel(closures: Sequence[Closure], reason: str) -> None:
    for closure in closures:
        message = f"`{closure.name}` was cancelled, because {reason}. Schedule it again."
        closure.future.set_exception(CancelledError(message))


def start_workers(queue: ClosureQueue, names: Sequence[str]) -> None:
    """Starts the threads that do not run yet, one per worker.

    The threads reference the queue, not its coordinator. They end when the coordinator is deleted and the queue is empty.

    Args:
        queue: The queue.
        names: The device or the process of each worker, for messages.
    """
    for index in queue.attach_workers(len(names)):
        start_thread(_run_worker, (queue, index, names[index]), name=f"jdist worker {index}", stop=queue.close)


def _run_worker(queue: ClosureQueue, index: int, name: str) -> None:
    worker = Worker(index)
    while (closure := queue.get(index)) is not None:
        worker = _run(queue, closure, worker, name)
        del closure  # an idle worker holds neither a function nor its arguments


def _run(queue: ClosureQueue, closure: Closure, worker: Worker, name: str) -> Worker:
    """Runs a function, reports its outcome, and returns the worker of the next one."""
    try:
        value = closure.run(worker)
    except WorkerLostError as error:
        queue.requeue(closure, error)
        return Worker(worker.index, worker.incarnation + 1)
    except BaseException as error:  # also SystemExit, which `join` raises where it ends the program
        note = f"Raised by the scheduled function `{closure.name}` on worker {worker.index} ({name})."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        queue.fail(closure, error)
    else:
        queue.finish(closure, value)
    return worker
