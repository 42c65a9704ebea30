"""Runs scheduled functions on a worker: `LocalRunner` in a thread of this process, `RayRunner` in the actor of the worker."""

from typing import Any, NamedTuple, Protocol

import jax

from jdist._src.parameter_server.closure_queue import Closure
from jdist._src.parameter_server.per_worker import on_worker
from jdist._src.parameter_server.ray_cluster import RayCluster
from jdist._src.parameter_server.worker_index import Worker, call_function, running_on


class FunctionRunner(Protocol):
    """Runs scheduled functions on one worker, called by the thread of the worker."""

    @property
    def name(self) -> str:
        """The device or the process of the worker, for messages."""
        ...

    def run(self, closure: Closure, worker: Worker) -> Any:
        """Returns the result of a function, whose arrays are computed.

        Raises:
            WorkerLostError: The worker was lost. The function may run on another one.
            BaseException: The error of the function.
        """
        ...


class LocalRunner(NamedTuple):
    """Runs functions in the thread that calls it, with `device` as JAX's default device."""

    device: jax.Device

    @property
    def name(self) -> str:
        """See `FunctionRunner.name`."""
        return str(self.device)

    def run(self, closure: Closure, worker: Worker) -> Any:
        """See `FunctionRunner.run`."""
        return closure.context.run(self._run_in_context, closure, worker)

    def _run_in_context(self, closure: Closure, worker: Worker) -> Any:
        with jax.default_device(self.device), running_on(worker), jax.enable_x64(closure.enable_x64):  # pyright: ignore
            args, kwargs = closure.args, closure.kwargs
            if closure.has_worker_values:
                args, kwargs = on_worker((args, kwargs), worker.index, lambda cells: cells.get(worker))
            return call_function(closure.fn, args, kwargs, closure.name)


class RayRunner(NamedTuple):
    """Runs functions in the actor of a worker."""

    cluster: RayCluster
    worker: int

    @property
    def name(self) -> str:
        """See `FunctionRunner.name`."""
        return f"Ray actor {self.worker}"

    def run(self, closure: Closure, worker: Worker) -> Any:
        """See `FunctionRunner.run`."""
        args, kwargs = closure.args, closure.kwargs
        if closure.has_worker_values:
            args, kwargs = on_worker((args, kwargs), worker.index, self.cluster.cell_reference)
        return self.cluster.call(worker, closure.fn, args, kwargs, closure.name, closure.enable_x64)
