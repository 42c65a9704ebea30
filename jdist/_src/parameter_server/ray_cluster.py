"""`RayCluster`: starts the actors of workers and servers on a running Ray cluster, and replaces lost ones."""

import itertools
import logging
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jdist._src.launch.ray_engine import connect_to_ray
from jdist._src.parameter_server.closure_queue import WorkerLostError
from jdist._src.parameter_server.per_worker import WorkerCells, on_worker
from jdist._src.parameter_server.ray_actors import (
    ActorProcess,
    CellReference,
    MissingUpdateError,
    ServerActor,
    WorkerActor,
)
from jdist._src.parameter_server.ray_programs import RayBinding, RayProgram
from jdist._src.parameter_server.worker_index import Worker

_PASSED_VARIABLES = re.compile(
    r"(XLA_|LIBTPU_|NCCL_)|JAX_(?!NUM_CPU_DEVICES|PLATFORMS|COORDINATOR|NUM_PROC|PROC)|PYTHONPATH$"
)
_NOTICE_SECONDS = 10.0
# Ray sends an object up to this size with the call, and a larger one through the object store, which costs 1 ms and no copy.
# Its default is 100 kB. Measured on loopback, 256 kB take 0.6 of the time of the object store this way, 4 MB 2.5 of its time.
_INLINE_BYTES = {"RAY_max_direct_call_object_size": str(512 * 1024)}
_LOG = logging.getLogger("jdist")


class RayCluster:
    """The actors of workers and servers.

    Mutable: it holds the actors, and the programs that they have loaded.

    Args:
        num_workers: The number of workers.
        num_servers: The number of servers.
        environ: The environment variables of the host program.

    Attributes:
        workers: The actor of each worker.
        servers: The actor of each server.
        platform: The platform of the workers.
        server_nodes: The number of the node of each server.
        num_threads: The number of threads of XLA in each actor.

    Raises:
        ImportError: Ray is not installed.
        ValueError: No Ray cluster runs, or it does not have the resources.
        RuntimeError: The nodes have another version of JAX.
    """

    def __init__(self, num_workers: int, num_servers: int, environ: Mapping[str, str]):
        self._ray = connect_to_ray(environ)
        self.num_workers, self.num_servers = num_workers, num_servers
        resources = self._ray.cluster_resources()
        self._gpus = int(
            bool(resources.get("GPU")) and bool(re.search("cuda|gpu|^$", environ.get("JAX_PLATFORMS", "")))
        )
        _check_resources(resources, num_workers, num_servers, self._gpus)
        self._variables = {name: value for name, value in environ.items() if _PASSED_VARIABLES.match(name)}
        self.num_threads = environ.get("NPROC", "1")
        self._settings = {"jax_enable_x64": jax.config.jax_enable_x64}  # pyright: ignore[reportAttributeAccessIssue]
        self._lock = threading.Lock()  # threads of a coordinator and of the program notice the loss of a worker
        self._cells: weakref.WeakKeyDictionary[WorkerCells, CellReference] = weakref.WeakKeyDictionary()
        self._cell_numbers = itertools.count()
        self._programs: list[RayProgram] = []
        self._bindings: list[RayBinding] = []
        self.workers = [self._start_worker() for _ in range(num_workers)]
        self.servers = [self._start_server() for _ in range(num_servers)]
        self._processes = [worker.process.remote() for worker in self.workers]
        processes = self.processes()
        self.platform = processes[0].platform
        addresses = [process.node for process in processes[num_workers:]]
        self.server_nodes = [sorted(set(addresses)).index(address) for address in addresses]
        check_versions(processes)

    def processes(self) -> list[ActorProcess]:
        """Returns the process of each worker, then of each server."""
        references = [actor.process.remote() for actor in (*self.workers, *self.servers)]
        if len(self._ray.wait(references, num_returns=len(references), timeout=_NOTICE_SECONDS)[0]) < len(references):
            _LOG.warning(
                "Waiting for %d workers and %d servers to start: other programs use the resources of the Ray cluster, or the "
                "nodes are slow.",
                *(self.num_workers, self.num_servers),
            )
        return self._ray.get(references)

    def worker_pids(self) -> list[int]:
        """Returns the id of the process of each worker, 0 while it starts."""
        started, _ = self._ray.wait(self._processes, num_returns=len(self._processes), timeout=0)
        return [self._pid(reference) if reference in started else 0 for reference in self._processes]

    def _pid(self, process: Any) -> int:
        try:
            return self._ray.get(process).pid
        except self._ray.exceptions.RayError:  # the worker was lost before it returned its process
            return 0

    def put(self, value: Any) -> Any:
        """Returns an object in Ray's object store."""
        return self._ray.put(value)

    def get(self, references: Any) -> Any:
        """Returns the values of objects."""
        return self._ray.get(references)

    def wait_for_any(self, references: Sequence[Any], timeout: float | None) -> int | None:
        """Returns the index of an object that is available, or None after the time limit."""
        done, _ = self._ray.wait(list(references), num_returns=1, timeout=timeout)
        return references.index(done[0]) if done else None

    def load(self, program: RayProgram) -> None:
        """Sends the parts of a step to all actors."""
        self._programs.append(program)
        worker_part = self._ray.put(program.worker)
        for worker in self.workers:
            worker.load.remote(program.number, worker_part)
        for server, part in zip(self.servers, program.servers, strict=True):
            server.load.remote(program.number, part)

    def bind(self, binding: RayBinding) -> None:
        """Sends the leaves that a step uses to the servers."""
        self._bindings.append(binding)
        for server, of_server in zip(self.servers, binding.servers, strict=True):
            server.bind.remote(binding.number, of_server)

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        name: str,
        enable_x64: bool,
        worker: Worker,
    ) -> Any:
        """Returns the result of a scheduled function on a worker. See `WorkerActor.call`.

        Raises:
            TypeError: The function or an argument cannot be sent.
            WorkerLostError: The worker was lost; another one has replaced it.
            BaseException: The error of the function.
        """
        settings = {"jax_enable_x64": enable_x64}
        args, kwargs = on_worker((args, kwargs), worker.index, self._cell_reference)
        try:
            result = self.workers[worker.index].call.remote(worker, fn, args, kwargs, name, settings)
        except (TypeError, pickle.PicklingError) as error:
            raise TypeError(
                f"`{name}` cannot be sent to a worker, which is another process: {str(error).splitlines()[0]}\n  Define it "
                "without references to strategies, files, locks and iterators, and pass arrays as arguments."
            ) from error
        try:
            return self._ray.get(result)
        except self._ray.exceptions.RayError as error:
            if self.is_loss(error):
                self.replace_lost_workers()
                raise WorkerLostError(f"The process of worker {worker.index} has ended.") from error
            cause = getattr(error, "cause", None)
            if cause is None:
                raise
            cause.add_note(f"In the process of the worker:\n{error}")
            raise cause from None

    def _cell_reference(self, cells: WorkerCells) -> CellReference:
        """Returns the placeholder of a per-worker value in the arguments of `call`."""
        with self._lock:
            if cells not in self._cells:
                self._cells[cells] = CellReference(next(self._cell_numbers), self._ray.put(cells.make))
            return self._cells[cells]

    def read_cell(self, cells: WorkerCells, worker: int) -> Any:
        """Returns the value of a worker, which it has created."""
        return self._ray.get(self.workers[worker].cell.remote(self._cell_reference(cells).number))

    def replace_lost_workers(self) -> list[int]:
        """Replaces the workers that were lost, and returns their indices."""
        with self._lock:
            return self._replace_lost_workers()

    def _replace_lost_workers(self) -> list[int]:
        lost = [index for index, worker in enumerate(self.workers) if not self._is_alive(worker.process)]
        for index in lost:
            self.workers[index] = self._start_worker()
            self._processes[index] = self.workers[index].process.remote()
            for program in self._programs:
                self.workers[index].load.remote(program.number, program.worker)
        return lost

    def lost_servers(self) -> list[int]:
        """Returns the indices of the servers that were lost, or have not received an update.

        Raises:
            Exception: The error of an update.
        """
        return [index for index, server in enumerate(self.servers) if not self._is_alive(server.check)]

    def replace_server(self, index: int) -> Any:
        """Replaces a server by a new one, without its arrays, and returns its actor."""
        self._ray.kill(self.servers[index])
        self.servers[index] = server = self._start_server()
        for program in self._programs:
            server.load.remote(program.number, program.servers[index])
        for binding in self._bindings:
            server.bind.remote(binding.number, binding.servers[index])
        return server

    def is_loss(self, error: BaseException) -> bool:
        """Returns whether an error was caused by the loss of an actor or of an object."""
        exceptions = self._ray.exceptions
        kinds = (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.WorkerCrashedError)
        return isinstance(error, kinds) or isinstance(getattr(error, "cause", None), (*kinds, MissingUpdateError))

    def _is_alive(self, method: Any) -> bool:
        try:
            self._ray.get(method.remote())
        except Exception as error:
            if not self.is_loss(error):
                raise
            return False
        return True

    def _start_worker(self) -> Any:
        platform = {} if self._gpus else {"JAX_PLATFORMS": "cpu"}
        return self._start(WorkerActor, num_gpus=self._gpus, variables=platform)

    def _start_server(self) -> Any:
        return self._start(ServerActor, num_gpus=0, variables={"JAX_PLATFORMS": "cpu"})

    def _start(self, kind: type, *, num_gpus: int, variables: Mapping[str, str]) -> Any:
        environment = {
            **self._variables,
            **_INLINE_BYTES,
            "NPROC": self.num_threads,
            "OMP_NUM_THREADS": self.num_threads,
            **variables,
        }
        options = {
            "num_cpus": 1,
            "num_gpus": num_gpus,
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": environment},
        }
        return self._ray.remote(kind).options(**options).remote(self._settings)


def _check_resources(resources: Mapping[str, float], num_workers: int, num_servers: int, gpus: int) -> None:
    needed = {"CPU": num_workers + num_servers, "GPU": gpus * num_workers}
    for name, number in needed.items():
        if number > (available := resources.get(name, 0)):
            raise ValueError(
                f"{num_workers} workers and {num_servers} servers need {number} {name}s, but the Ray cluster has "
                f"{available:g}. Add nodes to the cluster, or reduce `workers` or `servers`."
            )


def check_versions(processes: Sequence[ActorProcess]) -> None:
    """Raises RuntimeError if a process has another version of JAX than the host program, which exports the programs."""
    for process in processes:
        if process.jax_version != jax.__version__:
            raise RuntimeError(
                f"The Ray node {process.node} has JAX {process.jax_version}, and the host program JAX {jax.__version__}. "
                "Install the same version on all nodes."
            )
