"""Per-worker values, such as the iterators of a per-worker data set."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import jax
import numpy as np

from jdist._src.core.arguments import function_name
from jdist._src.core.tree import PyTree, describe_type
from jdist._src.data.dataset import DistributedDataset
from jdist._src.data.source_iterators import one_shot_advice
from jdist._src.parameter_server.closure_queue import result_of
from jdist._src.parameter_server.worker_index import Worker, get_current_worker_index


class WorkerCells:
    """One value per worker, created on the worker when it is first used there, and again if the worker was lost.

    Mutable. Each cell is used by the thread of its worker only. The cells of workers in other processes are empty.

    Args:
        make: Creates the value of the worker that runs it.
        num_workers: The number of workers.
        read: Returns the value of a worker in another process; None if the workers are threads of this process.
    """

    def __init__(
        self, make: Callable[[], Any], num_workers: int, read: "Callable[[WorkerCells, int], Any] | None" = None
    ):
        self.make, self._read = make, read
        self._cells: list[tuple[int, Any] | None] = [None] * num_workers
        self.futures: Sequence[Future[Any]] = ()  # of the functions that create the values ahead of their use

    def __len__(self) -> int:
        return len(self._cells)

    def get(self, worker: Worker) -> Any:
        """Returns the value of `worker`, which runs this code."""
        cell = self._cells[worker.index]
        if cell is None or cell[0] != worker.incarnation:
            cell = worker.incarnation, self.make()
            self._cells[worker.index] = cell
        return cell[1]

    def values(self) -> tuple[Any, ...]:
        """Returns the values of all workers, after waiting for their creation."""
        for future in self.futures:
            result_of(future)
        if self._read is not None:
            return tuple(self._read(self, i) for i in range(len(self)))
        return tuple(None if cell is None else cell[1] for cell in self._cells)


class PerWorkerValues:
    """One value per worker. A scheduled function receives the value of the worker that runs it.

    `ClusterCoordinator.per_worker_values(fn)` creates the values on the workers. A worker runs one function at a time, so these
    may change a value, such as a dictionary or a numpy array.

    Args:
        values: The values, in the order of the workers.

    Raises:
        ValueError: `values` is empty.
        TypeError: `values` is not a sequence.

    Example:
        >>> jdist.coordinator.PerWorkerValues([0.1, 0.2]).values
        (0.1, 0.2)
    """

    def __init__(self, values: Sequence[Any]):
        if isinstance(values, str) or not isinstance(values, (Sequence, np.ndarray, jax.Array)):
            raise TypeError(
                f"`values` must be a sequence of one value per worker, got {describe_type(values)}. For equal values, write "
                "`PerWorkerValues([value] * 4)`."
            )
        if not len(values):
            raise ValueError("`values` is empty. Pass one value per worker.")
        self._values: tuple[Any, ...] | WorkerCells = tuple(values)

    def __repr__(self) -> str:
        return f"PerWorkerValues({len(self._values)} workers)"

    @property
    def values(self) -> tuple[Any, ...]:
        """The values, in the order of the workers. Waits until the workers have created them.

        Raises:
            BaseException: The error of the function that creates a value.
        """
        return self._values.values() if isinstance(self._values, WorkerCells) else self._values


class PerWorkerIterator:
    """The iterators of a per-worker data set. A scheduled function receives the iterator of the worker that runs it.

    `iter` of the result of `ClusterCoordinator.create_per_worker_dataset` returns it.

    Example:
        >>> strategy = jdist.ParameterServerStrategy(workers=2)
        >>> coordinator = jdist.coordinator.ClusterCoordinator(strategy)
        >>> batches = iter(coordinator.create_per_worker_dataset([np.arange(3)]))
        >>> coordinator.schedule(next, (batches,)).fetch().tolist()
        [0, 1, 2]
    """

    def __init__(self, cells: WorkerCells):
        self._values = cells

    def __repr__(self) -> str:
        return f"PerWorkerIterator({len(self._values)} workers)"

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(
            "A per-worker data set is read by the workers. Pass the iterator to a scheduled function, which receives the "
            "iterator of its worker: `coordinator.schedule(step, args=(iterator,))`, with `next(iterator)` in `step`."
        )


class PerWorkerDataset:
    """A data set that each worker reads independently. `ClusterCoordinator.create_per_worker_dataset` returns it.

    Args:
        create: Returns the cells of a function that creates the value of a worker; the second argument is its name.
        source: The source, see `ClusterCoordinator.create_per_worker_dataset`.

    Example:
        >>> strategy = jdist.ParameterServerStrategy(workers=2)
        >>> coordinator = jdist.coordinator.ClusterCoordinator(strategy)
        >>> iter(coordinator.create_per_worker_dataset([np.arange(3)]))
        PerWorkerIterator(2 workers)
    """

    def __init__(self, create: Callable[[Callable[[], Any], str], WorkerCells], source: Any):
        self._create = create
        self._start = _start_function(source)
        self._name = function_name(source)

    def __repr__(self) -> str:
        return f"PerWorkerDataset({self._name})"

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._create(self._start, self._name))


def worker_values(tree: PyTree) -> list[PerWorkerValues | PerWorkerIterator]:
    """Returns the per-worker values among the leaves of `tree`."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, (PerWorkerValues, PerWorkerIterator))]


def per_worker_values(cells: WorkerCells) -> PerWorkerValues:
    """Returns the values in `cells`."""
    values = PerWorkerValues([None] * len(cells))
    values._values = cells
    return values


def num_values(leaf: PerWorkerValues | PerWorkerIterator) -> int:
    """Returns the number of workers for which `leaf` has a value."""
    return len(leaf._values)


def on_worker(tree: PyTree, worker: int, read: Callable[[WorkerCells], Any]) -> PyTree:
    """Returns `tree` with the values of a worker; `tree` itself if it contains none.

    Args:
        tree: The tree.
        worker: The index of the worker.
        read: Returns its value in cells.
    """
    if not worker_values(tree):
        return tree

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, (PerWorkerValues, PerWorkerIterator)):
            return leaf
        values = leaf._values
        return read(values) if isinstance(values, WorkerCells) else values[worker]

    return jax.tree.map(value, tree)


_SOURCES = (
    "Pass a `DistributedDataset`, a list or another iterable of batches that can be read again, or a function without "
    "arguments that returns one of them."
)


def _start_function(source: Any) -> Callable[[], Iterator[Any]]:
    """Returns the function that returns the iterator of the worker that calls it.

    Raises:
        ValueError: `source` is not supported.
    """
    if isinstance(source, DistributedDataset):
        if source.is_one_shot:
            raise ValueError(f"The data set can be read only once, and every worker reads it. {_SOURCES}")
        return lambda: iter(source.reshuffled(get_current_worker_index()))
    if kind_and_advice := one_shot_advice(source):
        kind, advice = kind_and_advice
        raise ValueError(f"The source is a {kind}, which can be read only once, and every worker reads it. {advice}")
    if isinstance(source, (str, bytes, tuple, Mapping, np.ndarray, jax.Array)):
        raise ValueError(
            f"`create_per_worker_dataset` cannot divide {describe_type(source)} into batches. Pass "
            "`strategy.distribute_dataset(arrays, batch_size)`."
        )
    if isinstance(source, Iterable):
        return lambda: iter(source)
    if not callable(source):
        raise ValueError(
            f"`create_per_worker_dataset` got {describe_type(source)}, which is not a data set. {_SOURCES}"
        )
    return lambda: _iterator_of(source)


def _iterator_of(fn: Callable[[], Any]) -> Iterator[Any]:
    batches = fn()
    if not isinstance(batches, Iterable):
        raise ValueError(
            f"`{function_name(fn)}` must return an iterable of batches, got {describe_type(batches)} on worker "
            f"{get_current_worker_index()}."
        )
    return iter(batches)
