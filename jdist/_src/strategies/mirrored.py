"""`MirroredStrategy`: one replica per device, each with a full copy of the state."""

from collections.abc import Sequence
from typing import final

import jax

from jdist._src.collectives.cross_device_ops import (
    CommunicationOptions,
    CrossDeviceOps,
    HierarchicalAllReduce,
    resolve_communication,
)
from jdist._src.devices.mesh import REPLICA_AXIS, Replicas, replica_mesh
from jdist._src.execution.shard_map import ShardMapBackend
from jdist._src.execution.virtual import VirtualBackend
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.own_devices import check_own_devices


@final
class MirroredStrategy(Strategy):
    """One replica on each of several devices; every replica holds a full copy of the state, and all copies stay equal.

    Args:
        devices: The devices, or their names, as `["gpu:0", "gpu:1"]`; all local devices by default. They may include devices
            of other processes, if every process passes the same list: `jax.devices()`.
        cross_device_ops: The implementation of reductions: `AllReduce()` by default, `ReductionToOneDevice()`,
            `HierarchicalAllReduce(group_size)`.
        communication_options: Which leaves are reduced together: `CommunicationOptions(bytes_per_pack)`.
        virtual_replicas: The number of replicas, if it should not be the number of devices. Each device runs several virtual
            replicas sequentially, and sums are computed along one fixed tree, so that results are bitwise equal on any number
            of devices of one kind. Choose a multiple of the number of devices: otherwise every device holds the complete batch.
        axis_name: The name of the replica axis in replica functions. With the name of a `jax.pmap`, its function is a replica
            function without changes: `jax.lax.pmean(grads, "batch")`, `nn.BatchNorm(axis_name="batch")`.

    Raises:
        RuntimeError: `devices` is omitted, and this process is one of several: each would train a separate model.
        ValueError: The list is empty, has duplicates, mixes platforms or names a device that does not exist; or the devices
            do not form groups of the requested size; or there are fewer virtual replicas than devices.
        TypeError: `devices` is not a list of devices, or an option is not of its class.

    Example:
        >>> jdist.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2
        >>> jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=8).num_replicas_in_sync
        8
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        virtual_replicas: int | None = None,
        axis_name: str = REPLICA_AXIS,
    ):
        if isinstance(devices, int):
            raise TypeError(
                f"`devices` must be a list of devices, got {devices!r}: write `MirroredStrategy(jax.devices()[:{devices:d}])`."
            )
        check_own_devices("`MirroredStrategy`", devices, "MirroredStrategy(jax.local_devices())")
        mesh, is_virtual = replica_mesh(devices, axis_name), virtual_replicas is not None
        if axis_name != REPLICA_AXIS and isinstance(cross_device_ops, HierarchicalAllReduce):
            raise ValueError(
                f"`HierarchicalAllReduce` reduces over two axes, and `axis_name={axis_name!r}` names one. Omit one of them."
            )
        mesh, ops, options = resolve_communication(mesh, cross_device_ops, communication_options, is_virtual)
        chosen_name = None if axis_name == REPLICA_AXIS else axis_name
        replicas = Replicas.from_mesh(mesh, virtual_replicas, chosen_name)
        arguments = {
            "devices": list(mesh.devices.flat),
            "cross_device_ops": cross_device_ops,
            "communication_options": communication_options,
            "virtual_replicas": virtual_replicas,
            "axis_name": axis_name,
        }
        backend = VirtualBackend(replicas) if replicas.virtual else ShardMapBackend(replicas)
        super().__init__(backend, ops, options, arguments=arguments)
