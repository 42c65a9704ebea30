"""`CentralStorageStrategy`: one replica per device, and one copy of the state for all of them."""

from collections.abc import Sequence
from typing import Literal, final, get_args

import jax

from jdist._src.collectives.cross_device_ops import resolve_communication
from jdist._src.core.tree import one_line
from jdist._src.devices.mesh import (
    REPLICA_AXIS,
    Replicas,
    check_host_memory,
    find_device,
    replica_mesh,
)
from jdist._src.devices.topology import is_topology_device
from jdist._src.execution.device_offload import DeviceOffloadBackend
from jdist._src.execution.host_offload import HostOffloadBackend
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.explicit_devices import check_devices_are_explicit
from jdist._src.values.state_sharding import StateSharding

_Offload = Literal["all", "optimizer"]


@final
class CentralStorageStrategy(Strategy):
    """One replica on each of several devices, and one copy of the state for all of them, in host memory.

    A step copies the leaves that the replicas read to their devices, reduces the gradients, and updates the state in its
    storage. For models whose state does not fit on a device: it needs less device memory, and more time.

    The copy is split equally over the devices' hosts, along the largest divisible dim. A leaf without one is replicated on the
    hosts; on TPUs so is a leaf whose parts would not consist of tiles of 8 x 128 elements. On TPU and CPU the host also
    computes the update if it is elementwise, as in SGD and Adam; otherwise each device fetches its part, updates it and writes
    it back. Scalars, random keys and per-replica values stay on the devices.

    Args:
        compute_devices: The devices, or their names; all local ones by default.
        parameter_device: Where the state is stored: `"host"` for host memory, or, between steps, one device by name
            (`"cpu:0"`). In that case all compute devices update the state, and one copy is stored.
        offload: `"all"` of the state, or only the state of the `"optimizer"`: then the parameters stay on the compute devices.
        axis_name: The name of the replica axis in replica functions; see `MirroredStrategy`.

    Raises:
        RuntimeError: `compute_devices` is omitted, and this process is one of several: each would train a separate model.
        ValueError: The list of devices is empty, or programs cannot address their host memory; or `offload` or
            `parameter_device` is unknown.

    Example:
        >>> strategy = jdist.CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> w = strategy.init(lambda: jax.numpy.zeros((8, 4)))
        >>> w.sharding.memory_kind, w.addressable_shards[0].data.shape
        ('pinned_host', (4, 4))
    """

    def __init__(
        self,
        compute_devices: Sequence[jax.Device | str] | None = None,
        *,
        parameter_device: jax.Device | str = "host",
        offload: _Offload = "all",
        axis_name: str = REPLICA_AXIS,
    ):
        if offload not in get_args(_Offload):
            raise ValueError(f'`offload` is "all" or "optimizer", got {one_line(offload)}.')
        line = "CentralStorageStrategy({})".format
        check_devices_are_explicit(
            "`CentralStorageStrategy`", compute_devices, line("jax.local_devices()"), line("jax.devices()")
        )
        mesh, ops, options = resolve_communication(replica_mesh(compute_devices, axis_name), None, None, False)
        replicas = Replicas.from_mesh(mesh, axis_name=axis_name)
        platform = mesh.devices.flat[0].platform
        # Between the memories of a TPU and its host, the compiler copies parts of arrays only in complete tiles.
        tile = (8, 128) if platform == "tpu" and parameter_device == "host" else ()
        rules = StateSharding(mesh, axis_name, "all" if offload == "all" else "optimizer", {}, tile)
        if parameter_device == "host":
            check_host_memory(mesh, 'Otherwise name a device: `parameter_device="cpu:0"`.')
            storage = "host"
            backend = HostOffloadBackend(replicas, rules, host_computes=platform in ("cpu", "tpu"))
        else:
            storage = find_device(parameter_device)
            if is_topology_device(storage) or is_topology_device(mesh.devices.flat[0]):
                raise ValueError(
                    f"The host copies a state from {storage} to {mesh.devices.flat[0]}, which is impossible for topology "
                    'devices. Store the state in host memory: `parameter_device="host"`.'
                )
            backend = DeviceOffloadBackend(replicas, rules, storage)
        arguments = {
            "compute_devices": list(mesh.devices.flat),
            "parameter_device": storage,
            "offload": offload,
            "axis_name": axis_name,
        }
        super().__init__(backend, ops, options, arguments=arguments)
        self._on_mesh = backend.to_mesh
