"""`OneDeviceStrategy`: one replica on one device."""

from typing import final

import jax

from jdist._src.devices.mesh import REPLICA_AXIS, Replicas, replica_mesh
from jdist._src.execution.shard_map import ShardMapBackend
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.explicit_devices import check_devices_are_explicit


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device.

    Collectives are the identity, and everything else is the same as on many devices: the results of `run` have the same form,
    and a step that would not keep two replicas synchronized is refused on one.

    Args:
        device: The device, or its name, as `"cpu:0"`; the first local device by default.
        axis_name: The name of the replica axis in replica functions; see `MirroredStrategy`.

    Raises:
        RuntimeError: `device` is omitted, and this process is one of several: each would train a separate model.
        ValueError: The device does not exist.

    Example:
        >>> jdist.OneDeviceStrategy("cpu:0").num_replicas_in_sync
        1
    """

    def __init__(self, device: jax.Device | str | None = None, *, axis_name: str = REPLICA_AXIS):
        devices = None if device is None else [device]
        check_devices_are_explicit("`OneDeviceStrategy`", devices, "OneDeviceStrategy(jax.local_devices()[0])")
        mesh = replica_mesh([jax.local_devices()[0] if device is None else device], axis_name)
        replicas = Replicas.from_mesh(mesh, axis_name=axis_name)
        arguments = {"device": mesh.devices.flat[0], "axis_name": axis_name}
        super().__init__(ShardMapBackend(replicas), arguments=arguments)
