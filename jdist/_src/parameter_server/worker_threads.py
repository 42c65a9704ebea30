"""The threads of the workers: each runs one scheduled function at a time."""

from collections.abc import Sequence

from jdist._src.core.background_threads import start_thread
from jdist._src.parameter_server.closure_queue import Closure, ClosureQueue, WorkerLostError
from jdist._src.parameter_server.worker_calls import FunctionRunner
from jdist._src.parameter_server.worker_index import Worker


def start_workers(queue: ClosureQueue, runners: Sequence[FunctionRunner]) -> None:
    """Starts the threads that do not run yet, one per runner.

    The threads reference the queue, not its coordinator. They end when the coordinator is deleted and the queue is empty.
    """
    for index in queue.attach_workers(len(runners)):
        start_thread(_run_worker, (queue, index, runners[index]), name=f"jdist worker {index}", stop=queue.close)


def _run_worker(queue: ClosureQueue, index: int, runner: FunctionRunner) -> None:
    worker = Worker(index)
    while (closure := queue.get(index)) is not None:
        worker = _run(queue, closure, worker, runner)
        del closure  # an idle worker holds neither a function nor its arguments


def _run(queue: ClosureQueue, closure: Closure, worker: Worker, runner: FunctionRunner) -> Worker:
    """Runs a function, reports its outcome, and returns the worker of the next one."""
    try:
        value = runner.run(closure, worker)
    except WorkerLostError as error:
        queue.requeue(closure, error)
        return Worker(worker.index, worker.incarnation + 1)
    except BaseException as error:  # also SystemExit, which `join` raises where it ends the program
        note = f"Raised by the scheduled function `{closure.name}` on worker {worker.index} ({runner.name})."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        queue.fail(closure, error)
    else:
        queue.finish(closure, value)
    return worker
