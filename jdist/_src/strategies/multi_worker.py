"""`MultiWorkerMirroredStrategy`: one replica per device of several processes, each with a full copy of the state."""

from collections import Counter
from collections.abc import Mapping
from typing import final

import jax
from jax.sharding import Mesh

from jdist._src.cluster.detection import warn_of_unresolved_variables
from jdist._src.cluster.resolution import resolve
from jdist._src.cluster.resolver import ClusterNotFoundError, ClusterResolver
from jdist._src.collectives.cross_device_ops import CommunicationOptions, CrossDeviceOps
from jdist._src.core.jax_compat import has_backend
from jdist._src.core.tree import one_line
from jdist._src.devices.mesh import REPLICA_AXIS, model_mesh, replica_mesh
from jdist._src.faults.time_limit import time_limit
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.replica_backend import replica_backend
from jdist._src.values.state_sharding import Layout


@final
class MultiWorkerMirroredStrategy(Strategy):
    """One replica on each device of all processes of a cluster; every replica holds a full copy of the state.

    Every process runs the same program. The constructor joins the other processes, unless they have joined, so create the
    strategy before the first use of JAX. All processes have the same number of devices. Process 0 is the chief: it writes
    checkpoints, logs and reports.

    The results are those of `MirroredStrategy` on the same number of devices of one process; with `virtual_replicas` and
    `jdist.sync.exact()` they are bitwise equal. Before a program runs, the processes compare it: a difference is an error that
    names it, on all of them.

    Args:
        cluster_resolver: Describes the processes, such as `jdist.cluster.TFConfigClusterResolver()`. Default:
            `jdist.cluster.resolve()`, which reads the environment variables of launchers and cluster managers. If it finds no
            cluster, the strategy uses the devices of this process, and warns of variables of launchers that no resolver reads.
        cross_device_ops: The implementation of reductions: `AllReduce()` by default, `ReductionToOneDevice()`,
            `HierarchicalAllReduce(group_size)`.
        communication_options: The packing of small leaves, and the time limit of collectives.
        virtual_replicas: The number of replicas, if it should not be the number of devices, see `MirroredStrategy`. A multiple
            of the number of devices.
        axis_name: The name of the replica axis in replica functions, see `MirroredStrategy`.
        mesh: The devices of all processes with the axis of the replicas first, or the sizes of its axes,
            `{"replica": -1, "model": 2}`; see `MirroredStrategy`.
        layout: The partition of parameters over the model axes of `mesh`; see `MirroredStrategy`.

    Raises:
        RuntimeError: JAX has started before the processes joined; a process is missing, or runs another program, or has another
            version of JAX or jdist.
        ValueError: The settings of the cluster are malformed; or the processes have different numbers of devices; or
            `virtual_replicas` does not fit them.
        TypeError: An argument is not of its class.

    Example:
        >>> strategy = jdist.MultiWorkerMirroredStrategy()  # one process: no cluster is found
        >>> strategy.num_replicas_in_sync
        8
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        virtual_replicas: int | None = None,
        axis_name: str = REPLICA_AXIS,
        mesh: Mesh | Mapping[str, int] | None = None,
        layout: Layout | None = None,
    ):
        resolver = join_cluster(cluster_resolver)
        devices = start_devices()
        grid = replica_mesh(devices, axis_name) if mesh is None else model_mesh(mesh, devices, axis_name)
        _check_equal_counts(list(grid.devices.flat))
        arguments = {
            "cross_device_ops": cross_device_ops,
            "communication_options": communication_options,
            "virtual_replicas": virtual_replicas,
            "axis_name": axis_name,
            "layout": layout,
        }
        backend, ops, options = replica_backend(grid, **arguments)
        # Without the resolver: it identifies this process, and another process may read the pickle.
        arguments["mesh"] = dict(mesh) if isinstance(mesh, Mapping) else mesh
        super().__init__(backend, ops, options, arguments=arguments, cluster_resolver=resolver)


def join_cluster(resolver: ClusterResolver | None) -> ClusterResolver | None:
    """Joins the processes that `resolver` describes, by default those that `resolve` finds, and returns the resolver.

    None if there is no cluster, or if the processes have joined without a resolver. Warns of variables that show a cluster,
    if no resolver accepts them.

    Raises:
        TypeError: `resolver` is not a `ClusterResolver`.
        ValueError: The settings of the cluster are malformed.
        RuntimeError: The processes cannot join.
    """
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"`cluster_resolver` must be such as `jdist.cluster.TFConfigClusterResolver()`, got {one_line(resolver)}."
        )
    if resolver is None:
        if jax.distributed.is_initialized():
            return None
        try:
            resolver = resolve()
        except ClusterNotFoundError:
            warn_of_unresolved_variables()
            return None
    resolver.initialize()
    return resolver


def start_devices(platform: str | None = None) -> list[jax.Device]:
    """Returns the devices of all processes. If JAX has not started, it waits for the devices of each process.

    A message reports the wait every 30 seconds, and it has the time limit of a step.
    """
    if has_backend():
        return jax.devices(platform)
    with time_limit("waits until JAX has started the devices of all processes"):
        return jax.devices(platform)


def _check_equal_counts(devices: list[jax.Device]) -> None:
    """Raises ValueError if the processes have different numbers of devices."""
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"process {process} has {counts[process]}" for process in sorted(counts))
        raise ValueError(
            f"The processes have different numbers of devices: {listed}. Each process reads an equal part of a batch, so give "
            "each the same number: `JAX_NUM_CPU_DEVICES` on CPU, `CUDA_VISIBLE_DEVICES` on GPUs."
        )
