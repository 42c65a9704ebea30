"""The worker that runs the current scheduled function."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from jdist._src.core import jax_compat


class EndOfDataError(RuntimeError):
    """A scheduled function has read its data set to the end: `next` raised `StopIteration` in the function."""


@dataclasses.dataclass(frozen=True)
class Worker:
    """A worker.

    Attributes:
        index: Its index, from 0.
        incarnation: The number of times that it was lost and replaced.
    """

    index: int
    incarnation: int = 0


_worker: ContextVar[Worker | None] = ContextVar("jdist_worker", default=None)


@contextlib.contextmanager
def running_on(worker: Worker) -> Iterator[None]:
    """Makes `worker` the worker of the functions in the block."""
    token = _worker.set(worker)
    try:
        yield
    finally:
        _worker.reset(token)


def call_function(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Returns the result of a scheduled function. Waits for its arrays: an error of the device would otherwise be lost.

    Raises:
        EndOfDataError: It raised `StopIteration`.
    """
    try:
        return jax.block_until_ready(fn(*args, **kwargs))
    except StopIteration as error:
        raise EndOfDataError(
            f"`{name}` raised StopIteration: an iterator that it reads has ended, such as the per-worker data set of worker "
            f"{get_current_worker_index()}. `next(iterator, None)` returns None at the end."
        ) from error


def in_scheduled_function() -> bool:
    """Returns whether a worker runs this code."""
    return _worker.get() is not None


def get_current_worker_index() -> int:
    """Returns the index of the worker that runs the current scheduled function, from 0.

    It is also defined in the functions of `ClusterCoordinator.create_per_worker_dataset` and
    `ClusterCoordinator.per_worker_values`.

    Raises:
        RuntimeError: The call is not in such a function, or in a function that JAX traces.

    Example:
        >>> strategy = jdist.ParameterServerStrategy(workers=2)
        >>> coordinator = jdist.coordinator.ClusterCoordinator(strategy)
        >>> coordinator.schedule(jdist.coordinator.get_current_worker_index).fetch() in (0, 1)
        True
    """
    worker = _worker.get()
    if worker is None:
        raise RuntimeError(
            "`get_current_worker_index` can only be called in a function that a worker runs. Pass the function that calls it "
            "to `ClusterCoordinator.schedule`."
        )
    if jax_compat.is_tracing():
        raise RuntimeError(
            "`get_current_worker_index` was called while JAX traces a function: the index would be a constant in the compiled "
            "function, which all workers share. Call it before, and pass the index as an argument."
        )
    return worker.index
