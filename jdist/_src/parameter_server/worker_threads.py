"""The threads of the local workers: each runs one scheduled function at a time, with its device as JAX's default device."""

from collections.abc import Sequence
from typing import Any

import jax

from jdist._src.core.background_threads import start_thread
from jdist._src.parameter_server.closure_queue import Closure, ClosureQueue, WorkerLostError
from jdist._src.parameter_server.per_worker import on_worker
from jdist._src.parameter_server.worker_index import Worker, running_on


class EndOfDataError(RuntimeError):
    """A scheduled function has read its data set to the end: `next` raised `StopIteration` in the function."""

    __module__ = "jdist.coordinator"


def start_workers(queue: ClosureQueue, devices: Sequence[jax.Device]) -> None:
    """Starts the threads that do not run yet, one per device of `devices`.

    The threads reference the queue, not its coordinator. They end when the coordinator is deleted and the queue is empty.
    """
    for index in queue.attach_workers(len(devices)):
        start_thread(_run_worker, (queue, index, devices[index]), name=f"jdist worker {index}", stop=queue.close)


def _run_worker(queue: ClosureQueue, index: int, device: jax.Device) -> None:
    worker = Worker(index)
    with jax.default_device(device):
        while (closure := queue.get(index)) is not None:
            worker = _run(queue, closure, worker, device)
            del closure  # an idle worker holds neither a function nor its arguments


def _run(queue: ClosureQueue, closure: Closure, worker: Worker, device: jax.Device) -> Worker:
    """Runs a function, reports its outcome, and returns the worker of the next one."""
    try:
        value = closure.context.run(_call, closure, worker)
    except WorkerLostError as error:
        queue.requeue(closure, error)
        return Worker(worker.index, worker.incarnation + 1)
    except BaseException as error:  # also SystemExit, which `join` raises where it ends the program
        note = f"Raised by the scheduled function `{closure.name}` on worker {worker.index} ({device})."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        queue.fail(closure, error)
    else:
        queue.finish(closure, value)
    return worker


def _call(closure: Closure, worker: Worker) -> Any:
    """Returns the result of a function. Waits for its arrays: an error of the device would otherwise be lost."""
    with running_on(worker), jax.enable_x64(closure.enable_x64):  # pyright: ignore
        try:
            args, kwargs = closure.args, closure.kwargs
            if closure.has_worker_values:
                args, kwargs = on_worker((args, kwargs), worker)
            return jax.block_until_ready(closure.fn(*args, **kwargs))
        except StopIteration as error:
            raise EndOfDataError(
                f"`{closure.name}` raised StopIteration: an iterator that it reads has ended, such as the per-worker data set "
                f"of worker {worker.index}. `next(iterator, None)` returns None at the end."
            ) from error
