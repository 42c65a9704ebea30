"""`MirroredStrategy`: a replica a device, state the same on all."""

from collections.abc import Sequence
from typing import final

import jax

from jdist._src.collectives.cross_device_ops import CommunicationOptions, CrossDeviceOps, resolve_communication
from jdist._src.devices.mesh import Replicas, replica_mesh, warn_if_local
from jdist._src.execution.shard_map import ShardMapBackend
from jdist._src.execution.virtual import VirtualBackend
from jdist._src.strategies.base import Strategy


@final
class MirroredStrategy(Strategy):
    """One replica on each of several devices; every replica holds the whole state, and all stay in step.

    Args:
        devices: The devices, or their names, as `["gpu:0", "gpu:1"]`; all local devices by default. Devices of other
            processes may be among them, if every process names the same: `jax.devices()`.
        cross_device_ops: How the replicas' values are added up: `AllReduce()` by default, `ReductionToOneDevice()`,
            `HierarchicalAllReduce(group_size)`.
        communication_options: Which leaves travel together: `CommunicationOptions(bytes_per_pack)`.
        virtual_replicas: How many replicas the mathematics has, at least one a device, instead of one a device. Each device
            runs its part of them in turn, and sums are taken along one fixed tree, so that results are the same, to the bit,
            on any number of devices of a kind. Best a multiple of that number: else every device holds all of the batch.

    Raises:
        ValueError: The list is empty, has duplicates, mixes platforms or names a device that is not here; or the devices
            do not make groups of the size that is asked for; or there are fewer virtual replicas than devices.
        TypeError: An option is of another kind.

    Example:
        >>> jdist.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2
        >>> jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=8).num_replicas_in_sync
        8
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        virtual_replicas: int | None = None,
    ):
        mesh, virtual = replica_mesh(devices), virtual_replicas is not None
        warn_if_local("MirroredStrategy", devices, "MirroredStrategy(devices=jax.devices())")
        mesh, ops, options = resolve_communication(mesh, cross_device_ops, communication_options, virtual)
        replicas = Replicas.on(mesh, virtual_replicas)
        arguments = {
            "devices": list(mesh.devices.flat),
            "cross_device_ops": cross_device_ops,
            "communication_options": communication_options,
            "virtual_replicas": virtual_replicas,
        }
        view = VirtualBackend(replicas) if replicas.virtual else ShardMapBackend(replicas)
        super().__init__(view, ops, options, arguments=arguments)
