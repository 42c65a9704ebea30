"""`MirroredStrategy`: a replica a device, state the same on all."""

from collections.abc import Sequence
from typing import final

import jax

from jdist.mesh import replica_mesh
from jdist.strategies.base import Strategy


@final
class MirroredStrategy(Strategy):
    """One replica on each of several devices; every replica holds the whole state, and all stay in step.

    Args:
        devices: The devices, or their names, as `["gpu:0", "gpu:1"]`; all local devices by default. Devices of other
            processes may be among them, if every process names the same.

    Raises:
        ValueError: The list is empty, has duplicates, mixes platforms or names a device that is not here.

    Example:
        >>> jdist.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2
    """

    def __init__(self, devices: Sequence[jax.Device | str] | None = None):
        super().__init__(replica_mesh(devices))
