"""`MirroredStrategy`: one replica per device, each with a full copy of the state."""

from collections.abc import Mapping, Sequence
from typing import final

import jax
from jax.sharding import Mesh

from jdist._src.collectives.cross_device_ops import CommunicationOptions, CrossDeviceOps
from jdist._src.devices.mesh import REPLICA_AXIS, model_mesh, replica_mesh, user_mesh
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.explicit_devices import check_devices_are_explicit
from jdist._src.strategies.replica_backend import replica_backend
from jdist._src.values.state_sharding import Layout


@final
class MirroredStrategy(Strategy):
    """One replica on each of several devices; every replica holds a full copy of the state, and all copies stay equal.

    With a `mesh` of several axes a replica is a group of devices. The batch, `PerReplica` values, collectives, synchronization
    policies and the proof are per replica as ever. Within a replica, XLA partitions the model over the other axes, the *model
    axes*, as its annotations and `layout` specify (tensor parallelism), or the step does so itself in a `jax.shard_map`
    without `mesh=` and with `axis_names={"model"}`.

    Args:
        devices: The devices, or their names, as `["gpu:0", "gpu:1"]`; all local devices by default. They may include devices
            of other processes, if every process passes the same list: `jax.devices()`.
        cross_device_ops: The implementation of reductions: `AllReduce()` by default, `ReductionToOneDevice()`,
            `HierarchicalAllReduce(group_size)`.
        communication_options: The packing of small leaves, and the time limit of collectives.
        virtual_replicas: The number of replicas, if it should not be the number of devices. Each device runs several virtual
            replicas sequentially, and sums are computed along one fixed tree, so that results are bitwise equal on any number
            of devices of one kind. Choose a multiple of the number of devices: otherwise every device holds the complete batch.
        axis_name: The name of the replica axis in replica functions. With the name of a `jax.pmap`, its function is a replica
            function without changes: `jax.lax.pmean(grads, "batch")`, `nn.BatchNorm(axis_name="batch")`.
        mesh: In place of `devices`, a mesh with the axis of the replicas first, `Mesh(devices, ("replica", "model"))`, or the
            sizes of its axes, `{"replica": -1, "model": 2}`, over all local devices. -1 is computed.
        layout: The partition of parameters over the model axes; see `ShardedStrategy`. Where no pattern matches, the partition
            metadata of flax applies, without names that are not model axes.

    Raises:
        RuntimeError: `devices` is omitted, and this process is one of several: each would train a separate model.
        ValueError: The list is empty, has duplicates, mixes platforms or names a device that does not exist; or the devices
            do not form groups of the requested size; or there are fewer virtual replicas than devices; or the mesh does not
            have the axis of the replicas as its first one.
        TypeError: `devices` is not a list of devices, or an option is not of its class.

    Example:
        >>> jdist.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2
        >>> jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=8).num_replicas_in_sync
        8
        >>> strategy = jdist.MirroredStrategy(
        ...     mesh={"replica": 2, "model": 4}, layout={"w": jax.P(None, "model")}
        ... )
        >>> w = strategy.put({"w": np.zeros((3, 8))})["w"]
        >>> strategy.num_replicas_in_sync, w.addressable_shards[0].data.shape
        (2, (3, 2))
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        virtual_replicas: int | None = None,
        axis_name: str = REPLICA_AXIS,
        mesh: Mesh | Mapping[str, int] | None = None,
        layout: Layout | None = None,
    ):
        if isinstance(devices, int):
            raise TypeError(
                f"`devices` must be a list of devices, got {devices!r}: write `MirroredStrategy(jax.devices()[:{devices:d}])`."
            )
        if devices is not None and mesh is not None:
            raise TypeError("`MirroredStrategy` takes `devices` or `mesh`, and got both. A mesh contains its devices.")
        if not isinstance(mesh, Mesh):
            check_devices_are_explicit("`MirroredStrategy`", devices, "MirroredStrategy(jax.local_devices())")
        grid = replica_mesh(devices, axis_name) if mesh is None else model_mesh(mesh, jax.local_devices(), axis_name)
        arguments = {
            "cross_device_ops": cross_device_ops,
            "communication_options": communication_options,
            "virtual_replicas": virtual_replicas,
            "axis_name": axis_name,
        }
        backend, ops, options = replica_backend(grid, layout=layout, **arguments)
        if mesh is None:
            arguments["devices"] = list(grid.devices.flat)
        else:
            arguments["mesh"] = user_mesh(grid)
        super().__init__(backend, ops, options, arguments={**arguments, "layout": layout})
