"""`ClusterCoordinator`: schedules functions on the workers of a `ParameterServerStrategy`."""

import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, final

import jax

from jdist._src.core.arguments import check_callable, function_name, keyword_arguments
from jdist._src.core.tree import PyTree, describe_type, named_leaves
from jdist._src.parameter_server.closure_queue import (
    Closure,
    ClosureQueue,
    check_outside_scheduled_function,
    start_workers,
)
from jdist._src.parameter_server.per_worker import (
    PerWorkerDataset,
    PerWorkerValues,
    WorkerCells,
    num_values,
    on_worker,
    per_worker_values,
    worker_values,
)
from jdist._src.parameter_server.remote_value import RemoteValue
from jdist._src.parameter_server.strategy import ParameterServerStrategy
from jdist._src.parameter_server.worker_index import Worker, call_function, running_on

_lock = threading.Lock()


class _Scheduling:
    """The queue of a strategy, and a weak reference to its coordinator. An attribute of the strategy, freed with it."""

    def __init__(self) -> None:
        self.queue = ClosureQueue()
        self.coordinator: Callable[[], ClusterCoordinator | None] = lambda: None


@final
class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`. There is one coordinator per strategy.

    `schedule` returns immediately; a worker that is idle runs the function. Workers are threads of this process: each runs one
    function at a time, with the worker's device as JAX's default device, in a copy of the context variables of the caller. The
    first call of `schedule` starts them. They end after the coordinator has been deleted.

    A function runs at least once: if its worker is lost, another worker runs it again. If a function raises an error, the
    functions that wait are cancelled, and the error is raised once, by the next call of `schedule`, `join` or `done`. After
    that, functions can be scheduled again.

    Args:
        strategy: The strategy.

    Raises:
        TypeError: `strategy` is not a `ParameterServerStrategy`.

    Example:
        >>> strategy = jdist.ParameterServerStrategy(workers=2)
        >>> coordinator = jdist.coordinator.ClusterCoordinator(strategy)
        >>> square = jax.jit(lambda x: x**2)
        >>> results = [coordinator.schedule(square, (i,)) for i in range(4)]
        >>> coordinator.join()
        >>> [int(x) for x in coordinator.fetch(results)]
        [0, 1, 4, 9]
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> "ClusterCoordinator":
        if not isinstance(strategy, ParameterServerStrategy):
            raise TypeError(
                f"`ClusterCoordinator` needs the workers of a `jdist.ParameterServerStrategy`, got {describe_type(strategy)}."
            )
        with _lock:
            scheduling: _Scheduling = vars(strategy).setdefault("_scheduling", _Scheduling())
            coordinator = scheduling.coordinator()
            if coordinator is None:
                coordinator = super().__new__(cls)
                coordinator._strategy, coordinator._queue = strategy, scheduling.queue
                scheduling.coordinator = weakref.ref(coordinator)
            return coordinator

    _strategy: ParameterServerStrategy
    _queue: ClosureQueue

    def __del__(self) -> None:
        # Not `weakref.finalize`, which would reference the queue, and with it the traceback of an error.
        self._queue.release_workers()

    def __repr__(self) -> str:
        return f"ClusterCoordinator({self._strategy.num_workers} workers; functions: {self._queue!r})"

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[PyTree] = (), kwargs: Mapping[str, PyTree] | None = None
    ) -> RemoteValue:
        """Schedules a call of `fn` on a worker, and returns its result before it is computed.

        Waits only if very many functions (262,144) wait for a worker. The arguments are not copied: do not change a numpy array
        before the function has run.

        Args:
            fn: A function, such as a function of `jax.jit`. Define it once, outside the loop, so that it is compiled once.
            args: Its positional arguments: any trees. In place of `PerWorkerValues` or the iterator of a per-worker data set it
                receives the value of its worker.
            kwargs: Its keyword arguments.

        Returns:
            The result. It may be ignored.

        Raises:
            TypeError: `fn` is not callable, `args` is not a tuple, or `kwargs` is not a mapping.
            ValueError: An argument contains a `RemoteValue`, a per-worker data set in place of its iterator, or
                `PerWorkerValues` of another number of workers.
            BaseException: The error of a function that was scheduled before, if it has not been raised. `fn` is not scheduled.
            RuntimeError: The call is in a scheduled function.
        """
        check_outside_scheduled_function("schedule another one")
        check_callable(fn)
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                f"`args` is a tuple of arguments, got {describe_type(args)}: write `schedule(fn, (value,))`."
            )
        arguments = tuple(args), keyword_arguments("schedule", kwargs)
        self._check_arguments(*arguments)
        name = function_name(fn)
        return RemoteValue(self._schedule(fn, *arguments, name), name)

    def join(self) -> None:
        """Waits until all scheduled functions have run.

        Raises:
            BaseException: The first error of the functions, if it has not been raised. The functions that had not started are
                cancelled.
            RuntimeError: The call is in a scheduled function.
        """
        check_outside_scheduled_function("wait for all others")
        self._queue.wait()

    def done(self) -> bool:
        """Returns whether all scheduled functions have run.

        Raises:
            BaseException: The first error of the functions, if it has not been raised.
        """
        return self._queue.is_done()

    def fetch(self, tree: PyTree) -> PyTree:
        """Returns `tree` with the result of each `RemoteValue` in its place, as `RemoteValue.fetch` returns it.

        Other leaves are returned unchanged.

        Raises:
            BaseException: The error of a function.
            CancelledError: A function was cancelled, because another one failed before.
        """
        return jax.tree.map(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, tree)

    def create_per_worker_dataset(self, source: Any) -> PerWorkerDataset:
        """Returns a data set that each worker reads independently, from its beginning to its end.

        `iter` of it creates one iterator per worker. Pass the result to scheduled functions; each receives the iterator of its
        worker, on which it calls `next`. If a worker is lost, its iterator starts again.

        Args:
            source: A `DistributedDataset`, which each worker reads in its own order if it is shuffled; an iterable of batches
                that can be read again; or a function without arguments, called on each worker, that returns an iterable. The
                function can select the part of its worker with `jdist.coordinator.get_current_worker_index()`.

        Raises:
            ValueError: `source` is not one of them, or can be read only once.

        Example:
            >>> strategy = jdist.ParameterServerStrategy(workers=2)
            >>> coordinator = jdist.coordinator.ClusterCoordinator(strategy)
            >>> batches = iter(coordinator.create_per_worker_dataset([np.arange(3), np.arange(4)]))
            >>> int(coordinator.schedule(lambda batches: next(batches).sum(), (batches,)).fetch())
            3
        """
        return PerWorkerDataset(self._create_cells, source)

    def per_worker_values(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Calls `fn` once on each worker, and returns the values. If a worker is lost, its value is created again.

        Args:
            fn: A function without arguments.

        Raises:
            TypeError: `fn` is not callable.
            RuntimeError: The call is in a scheduled function.

        Example:
            >>> strategy = jdist.ParameterServerStrategy(workers=2)
            >>> coordinator = jdist.coordinator.ClusterCoordinator(strategy)
            >>> counts = coordinator.per_worker_values(lambda: np.zeros((), int))
            >>> def count(number):
            ...     number += 1
            >>> for _ in range(10):
            ...     _ = coordinator.schedule(count, (counts,))
            >>> coordinator.join()
            >>> int(sum(counts.values))
            10
        """
        check_callable(fn)
        return per_worker_values(self._create_cells(fn, function_name(fn)))

    def _create_cells(self, make: Callable[[], Any], name: str) -> WorkerCells:
        """Returns one value per worker, which the workers create."""
        check_outside_scheduled_function("create per-worker values")
        cluster = self._strategy._cluster
        cells = WorkerCells(make, self._strategy.num_workers, None if cluster is None else cluster.read_cell)
        values = per_worker_values(cells)
        cells.futures = [self._schedule(_discard, (values,), {}, name, worker=i) for i in range(len(cells))]
        return cells

    def _schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        worker: int | None = None,
    ) -> Future[Any]:
        """Schedules a function, on one worker or any, and returns its future."""
        strategy, call = self._strategy, (fn, args, kwargs, name, jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
        if (cluster := strategy._cluster) is None:
            run = functools.partial(contextvars.copy_context().run, _run_on_device, strategy.worker_devices, *call)
            workers = list(map(str, strategy.worker_devices))
        else:
            run = functools.partial(cluster.call, *call)
            workers = [f"Ray actor {index}" for index in range(strategy.num_workers)]
        closure = Closure(run, name, worker)
        self._queue.put(closure)
        start_workers(self._queue, workers)
        return closure.future

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ValueError for an argument that a scheduled function cannot receive."""
        refused_types = (RemoteValue, PerWorkerDataset)
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(leaf, refused_types) for leaf in leaves):
            names = [*named_leaves("args", args), *named_leaves("kwargs", kwargs)]
            name, leaf = next((name, leaf) for name, leaf in names if isinstance(leaf, refused_types))
            advice = (
                "is a RemoteValue, which a scheduled function cannot receive. Pass its result: `value.fetch()`, or "
                "`value.get()` without a copy to the host."
                if isinstance(leaf, RemoteValue)
                else "is a per-worker data set. Call `iter` once, and pass the result: each worker continues its own iterator."
            )
            raise ValueError(f"`{name}` {advice}")
        for leaf in worker_values(leaves):
            if num_values(leaf) != self._strategy.num_workers:
                raise ValueError(
                    f"An argument has values of {num_values(leaf)} workers, but the strategy has "
                    f"{self._strategy.num_workers} workers. Pass one value per worker."
                )


def _run_on_device(
    devices: Sequence[jax.Device],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    enable_x64: bool,
    worker: Worker,
) -> Any:
    """Returns the result of a function, with the device of the worker as JAX's default device."""
    with jax.default_device(devices[worker.index]), running_on(worker), jax.enable_x64(enable_x64):  # pyright: ignore
        args, kwargs = on_worker((args, kwargs), worker.index, lambda cells: cells.get(worker))
        return call_function(fn, args, kwargs, name)


def _discard(value: Any) -> None:
    """The function that is scheduled to create the value in its argument."""
