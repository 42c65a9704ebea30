"""`ParameterServerStrategy`: asynchronous training with workers and servers."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final, get_args

import jax

from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, one_line
from jdist._src.devices.mesh import REPLICA_AXIS, Replicas, replica_mesh
from jdist._src.execution.traced import Proof
from jdist._src.parameter_server.backend import ParameterServerBackend
from jdist._src.parameter_server.engine import Engine, WorkerProgress
from jdist._src.parameter_server.event_log import THREADS_VARIABLE, is_replay
from jdist._src.parameter_server.local_executor import LocalExecutor
from jdist._src.parameter_server.partitioners import Partitioner, check_partitions
from jdist._src.parameter_server.ray_cluster import RayCluster
from jdist._src.parameter_server.ray_executor import RayExecutor
from jdist._src.replica.finite import NonFinite
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.description import Description
from jdist._src.strategies.explicit_devices import check_devices_are_explicit
from jdist._src.values.remote_array import materialize


@final
class ParameterServerStrategy(Strategy):
    """Workers compute gradients at their own speed, and servers apply each of them to the state: asynchronous training.

    A step that was written for one replica runs unchanged. A call of it passes the batch to an idle worker and returns: the
    worker reads the state, computes up to the last collective, and sends the gradients to the servers, which run the other
    part of the step, the update, on the current state. Other workers may have updated the state in between; the number of
    their updates is the *staleness* of this one. One batch is one update, so there is one replica, and collectives are the
    identity.

    Steps return the state as `ServerArray`s. A read of one (`np.asarray`, `strategy.run`, a checkpoint, a callback of the
    `Trainer`) waits for all earlier calls, so its value contains every update that the host program has requested.

    With `engine="ray"`, each worker and each server is an actor of a running Ray cluster, on any of its machines. A worker that
    is lost is replaced, and its call runs again; a server that is lost is restored, if there are `snapshots`. Each call is
    applied exactly once. Workers and servers receive compiled programs, so their machines need jdist, and none of the user's
    code.

    Args:
        workers: The number of workers, or their devices. Worker `i` uses accelerator `i` of this process, modulo their number;
            without accelerators, all use the first CPU device, which runs several programs at the same time. With Ray, a
            worker uses one CPU, and one GPU if the cluster has GPUs.
        servers: The number of servers. They store the state in the memory of the host.
        engine: `"local"`: workers and servers in this process. `"ray"`: in processes of the Ray cluster at the address in the
            variable `RAY_ADDRESS`, or of this machine.
        variable_partitioner: Divides large leaves over the servers along their first dimension, such as
            `jdist.MinSizePartitioner(max_shards=4)`. By default each leaf, with its optimizer state, is on one server.
        max_staleness: The maximum number of updates between the read of a worker and its own update. 0 runs one call after the
            other, with the results of `OneDeviceStrategy`; `workers - 1` is the least value with which all workers are busy.
            None: no bound. With Ray a worker then reads the state for its next call while it computes.
        non_finite: The treatment of a call in which a value for the servers, such as a gradient, is infinite or NaN. `"keep"`:
            it is applied, as under other strategies; a policy such as `jdist.sync.skip_nonfinite` decides. `"skip"`: it is
            not applied, and counted in `worker_progress()`. `"stop"`: the next call or read raises an error. Both name the
            worker.
        snapshots: A `jdist.Checkpointer` in which the state is saved whenever `every` divides the number of calls, after
            waiting for all of them. A server that is lost is restored from it, and after a restart the program continues from
            it: its step is the number of calls that the state contains.
        record: A file for the order in which workers start and updates are applied. `jdist replay FILE` runs the program again
            in this order, in one process, with bitwise equal results.
        axis_name: The name of the replica axis in replica functions; see `MirroredStrategy`.

    Raises:
        RuntimeError: `workers` is a number, and this process is one of several: each would train a separate model.
        TypeError: A number is not an integer, the partitioner is not a function, or `snapshots` is not a checkpointer.
        ValueError: There are no workers or no servers, `max_staleness` is negative, or a choice is unknown. No Ray cluster
            runs, or it does not have the CPUs. When a step is called first: the partitioner divides a leaf otherwise than along
            its first dimension, or the step cannot be sent to other processes.
        ImportError: Ray is not installed.

    Source:
        J. Dean et al., "Large scale distributed deep networks", NeurIPS 2012 (Downpour SGD).

    Example:
        >>> strategy = jdist.ParameterServerStrategy(workers=2, servers=2)
        >>> @strategy.step
        ... def descend(w, x):
        ...     grad = jax.grad(lambda w: jax.numpy.mean((w - x) ** 2))(w)
        ...     return w - 0.1 * jdist.all_reduce("mean", grad), None
        >>> w = strategy.init(lambda: jax.numpy.zeros(3))
        >>> for batch in strategy.distribute_dataset(
        ...     np.ones((400, 3), np.float32), batch_size=4
        ... ):
        ...     w, _ = descend(w, batch)
        >>> [round(x, 2) for x in w.tolist()]
        [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        *,
        workers: int | Sequence[jax.Device | str] = 4,
        servers: int = 2,
        engine: Literal["local", "ray"] = "local",
        variable_partitioner: Partitioner | Callable[[Any, Any], Any] | None = None,
        max_staleness: int | None = None,
        non_finite: NonFinite = "keep",
        snapshots: Checkpointer | None = None,
        record: str | os.PathLike[str] | None = None,
        axis_name: str = REPLICA_AXIS,
    ):
        _check_choices(engine, non_finite, variable_partitioner, snapshots)
        num_servers = as_int("`servers`", servers, 1)
        bound = None if max_staleness is None else as_int("`max_staleness`", max_staleness, 0)
        path = None if record is None else pathlib.Path(record)
        listed = workers if isinstance(workers, (list, tuple)) else None
        check_devices_are_explicit(
            "`ParameterServerStrategy`", listed, "ParameterServerStrategy(workers=jax.local_devices())"
        )
        devices = _worker_devices(workers, engine)
        replicas = Replicas.from_mesh(replica_mesh(devices[:1], axis_name), axis_name=axis_name)
        host_sharding, tests_finite = replicas.replicated_sharding, non_finite != "keep"
        self._cluster: RayCluster | None = None
        if engine == "ray" and not is_replay(path):
            self._cluster = RayCluster(len(devices), num_servers, os.environ)
            restores = snapshots is not None
            executor = RayExecutor(self._cluster, host_sharding, tests_finite=tests_finite, restores_servers=restores)
            num_threads = self._cluster.num_threads
        else:
            server_devices = _server_devices(num_servers, devices)
            executor = LocalExecutor(devices, server_devices, host_sharding, tests_finite=tests_finite)
            num_threads = os.environ.get(THREADS_VARIABLE)
        self._partitioner, self._devices = variable_partitioner, tuple(devices)
        calls_per_worker = 2 if engine == "ray" else 1
        self._engine = Engine(executor, bound, path, non_finite, num_threads, calls_per_worker)
        arguments = {
            "workers": devices if isinstance(workers, (list, tuple)) else len(devices),
            "servers": num_servers,
            "engine": engine,
            "variable_partitioner": variable_partitioner,
            "max_staleness": max_staleness,
            "non_finite": non_finite,
            "snapshots": snapshots,
            "record": None if record is None else str(record),
            "axis_name": axis_name,
        }
        backend = ParameterServerBackend(replicas, self._engine, self._num_shards, snapshots)
        super().__init__(backend, arguments=arguments)
        self._context = dataclasses.replace(self._context, is_asynchronous=True)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._cluster is not None:
            raise TypeError(
                '`ParameterServerStrategy(engine="ray")` cannot be pickled or copied: it holds the workers and servers. A '
                "scheduled function cannot use it either: pass values as arguments, such as `jdist.read_values(state)`."
            )
        return super().__reduce__()

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._engine.executor.num_workers

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The device of each worker."""
        return self._devices

    def staleness_counts(self) -> dict[int, int]:
        """Returns the number of updates of each staleness that were applied so far, in ascending order.

        Example:
            >>> strategy = jdist.ParameterServerStrategy(workers=2, max_staleness=0)
            >>> strategy.staleness_counts()
            {}
        """
        return self._engine.staleness_counts()

    def worker_progress(self) -> tuple[WorkerProgress, ...]:
        """Returns the progress of each worker so far, for displays. It does not wait.

        Example:
            >>> jdist.ParameterServerStrategy(workers=1).worker_progress()
            (WorkerProgress(updates=0, version=-1, staleness=0, skipped=0, restarts=0, pid=0),)
        """
        return self._engine.worker_progress()

    def join(self) -> None:
        """Waits until all calls of steps are applied.

        Raises:
            RuntimeError: A worker failed.
        """
        self._engine.join()

    def run(
        self, fn: Callable[..., Any], args: Sequence[PyTree] = (), kwargs: Mapping[str, PyTree] | None = None
    ) -> Any:
        """See `Strategy.run`. The function runs once, on the device of the first worker, with the current values."""
        values = materialize(args) if isinstance(args, (tuple, list)) else args
        return super().run(fn, values, materialize(kwargs))

    def step(self, fn: Any = ..., *, donate: bool = True, **options: Any) -> Any:
        """See `Strategy.step`. The state is on the servers, so `donate=False` is impossible."""
        if not donate:
            raise ValueError(
                "`donate=False` is impossible under `ParameterServerStrategy`: the servers update the state in place. To keep "
                "a state, read it: `jdist.read_values(state)`."
            )
        return super().step(fn, **options)

    def reduce(self, op: Any, value: PyTree, axis: Any) -> PyTree:
        """See `Strategy.reduce`. Of one replica: the value itself, reduced over `axis`."""
        return super().reduce(op, materialize(value), axis)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """See `Strategy.gather`. Of one replica: the value itself."""
        return super().gather(materialize(value), axis)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """See `Strategy.local_results`. Of one replica: `(value,)`."""
        return super().local_results(materialize(value))

    def put(self, tree: PyTree) -> PyTree:
        """See `Strategy.put`. The first step that receives the result moves it to the servers."""
        return super().put(materialize(tree))

    def describe(self, state: PyTree = None, *, max_rows: int = 40, proof: Proof | None = None) -> Description:
        """See `Strategy.describe`."""
        return super().describe(materialize(state), max_rows=max_rows, proof=proof)

    def _num_shards(self, name: str, shape: Any) -> int:
        if self._partitioner is None or not shape.shape:
            return 1
        return check_partitions(self._partitioner(shape.shape, shape.dtype), shape.shape, name)


def _check_choices(engine: str, non_finite: str, variable_partitioner: Any, snapshots: Any) -> None:
    if engine not in ("local", "ray"):
        raise ValueError(f'`engine` must be "local" or "ray", got {one_line(engine)}.')
    if variable_partitioner is not None and not callable(variable_partitioner):
        raise TypeError(
            "`variable_partitioner` must be a function of a shape and a dtype, such as "
            f"`jdist.MinSizePartitioner(max_shards=4)`, got {one_line(variable_partitioner)}."
        )
    if snapshots is not None and not isinstance(snapshots, Checkpointer):
        raise TypeError(f"`snapshots` must be a `jdist.Checkpointer(path, every=...)`, got {one_line(snapshots)}.")
    if non_finite not in get_args(NonFinite):
        raise ValueError(f'`non_finite` must be "keep", "skip" or "stop", got {one_line(non_finite)}.')


def _worker_devices(workers: int | Sequence[jax.Device | str], engine: str) -> list[jax.Device]:
    """Returns the device of each worker; with Ray, the device of the host program, on which values are read."""
    if isinstance(workers, (list, tuple)):
        if engine == "ray":
            raise ValueError(
                f'`workers` must be a number with `engine="ray"`, got {len(workers)} devices: Ray places the workers.'
            )
        return list(replica_mesh(workers).devices.flat)
    devices = jax.local_devices()
    # One CPU device runs several programs at the same time, and arrays on it need no copy between devices.
    spread = 1 if devices[0].platform == "cpu" or engine == "ray" else len(devices)
    return [devices[number % spread] for number in range(as_int("`workers`", workers, 1))]


def _server_devices(count: int, workers: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns a CPU device for each server: the device of a worker, if workers are on the CPU."""
    on_cpu = [device for device in workers if device.platform == "cpu"] or jax.local_devices(backend="cpu")
    return [on_cpu[0]] * count
