"""`MirroredStrategy`: a replica a device, state the same on all."""

from collections.abc import Sequence
from typing import final

import jax

from jdist.cross_device_ops import CommunicationOptions, CrossDeviceOps
from jdist.mesh import replica_mesh
from jdist.strategies.base import Strategy


@final
class MirroredStrategy(Strategy):
    """One replica on each of several devices; every replica holds the whole state, and all stay in step.

    Args:
        devices: The devices, or their names, as `["gpu:0", "gpu:1"]`; all local devices by default. Devices of other
            processes may be among them, if every process names the same.
        cross_device_ops: How the replicas' values are added up: `AllReduce()` by default, `ReductionToOneDevice()`,
            `HierarchicalAllReduce(group_size)`.
        communication_options: Which leaves travel together: `CommunicationOptions(bytes_per_pack)`.

    Raises:
        ValueError: The list is empty, has duplicates, mixes platforms or names a device that is not here; or the devices
            do not make groups of the size that is asked for.
        TypeError: An option is of another kind.

    Example:
        >>> jdist.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        super().__init__(replica_mesh(devices), cross_device_ops, communication_options)
