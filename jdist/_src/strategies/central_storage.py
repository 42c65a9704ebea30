"""`CentralStorageStrategy`: a replica a device, and the state in one place."""

from collections.abc import Sequence
from typing import Literal, final, get_args

import jax
from jax.sharding import Mesh

from jdist._src.collectives.cross_device_ops import resolve_communication
from jdist._src.devices.mesh import (
    HOST_MEMORY,
    REPLICA_AXIS,
    Replicas,
    find_device,
    local_mesh_devices,
    replica_mesh,
    warn_if_local,
)
from jdist._src.devices.topology import is_topology_device
from jdist._src.execution.device_offload import DeviceOffloadBackend
from jdist._src.execution.host_offload import HostOffloadBackend
from jdist._src.strategies.base import Strategy
from jdist._src.values.state_sharding import StateSharding

_Offload = Literal["all", "optimizer"]


@final
class CentralStorageStrategy(Strategy):
    """One replica on each of several devices, and one copy of the state for all of them, in the memory of the host.

    A step sends what the replicas need of the state to their devices, reduces the gradients, and updates the state where it
    is. For models whose state is larger than what stays on a device: it takes less device memory, and more time.

    The one copy is in equal parts, of each device's host its own, along the largest dim that divides; what none divides, each
    host has whole, and on TPUs what would not be in tiles of 8 x 128 numbers. On TPU and CPU the host computes the update too,
    if each element is computed by itself, as in SGD and Adam; elsewhere each device fetches its part, updates it and sends it
    back. Scalars, random keys and what each replica has of its own stay on the devices.

    Args:
        compute_devices: The devices, or their names; all local ones by default.
        parameter_device: Where the state lies: in the memory of the `"host"`, or, between steps, on one device, whose name it
            is (`"cpu:0"`); then it is updated by all that compute, and one copy is kept.
        offload: `"all"` of the state, or that of the `"optimizer"` only: then the parameters stay on the devices that
            compute.

    Raises:
        ValueError: The devices are none, or their host has no memory that programs can name; or `offload` or
            `parameter_device` is another.

    Example:
        >>> strategy = jdist.CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> w = strategy.init(lambda: jax.numpy.zeros((8, 4)))
        >>> w.sharding.memory_kind, w.addressable_shards[0].data.shape
        ('pinned_host', (4, 4))
    """

    def __init__(
        self,
        compute_devices: Sequence[jax.Device | str] | None = None,
        parameter_device: jax.Device | str = "host",
        offload: _Offload = "all",
    ):
        if offload not in get_args(_Offload):
            raise ValueError(f'`offload` is "all" or "optimizer", got {offload!r}.')
        mesh, ops, options = resolve_communication(replica_mesh(compute_devices), None, None, False)
        instead = "CentralStorageStrategy(compute_devices=jax.devices())"
        warn_if_local("CentralStorageStrategy", compute_devices, instead)
        replicas = Replicas.on(mesh)
        platform = mesh.devices.flat[0].platform
        # Between the memories of a TPU and its host, the compiler copies parts of arrays only in whole tiles.
        tile = (8, 128) if platform == "tpu" and parameter_device == "host" else ()
        layout = StateSharding(mesh, REPLICA_AXIS, "all" if offload == "all" else "optimizer", {}, tile)
        if parameter_device == "host":
            _check_memory(mesh)
            storage, view = "host", HostOffloadBackend(replicas, layout, host_computes=platform in ("cpu", "tpu"))
        else:
            device = find_device(parameter_device)
            if is_topology_device(device) or is_topology_device(mesh.devices.flat[0]):
                raise ValueError(
                    f"The host sends a state from {device} to {mesh.devices.flat[0]}, and there is no sending where one of "
                    'them is described: keep the state in the memory of the host, `parameter_device="host"`.'
                )
            storage, view = device, DeviceOffloadBackend(replicas, layout, device)
        arguments = {
            "compute_devices": list(mesh.devices.flat),
            "parameter_device": storage,
            "offload": offload,
        }
        super().__init__(view, ops, options, arguments=arguments)


def _check_memory(mesh: Mesh) -> None:
    """Raises ValueError if programs for these devices cannot name the memory of their host."""
    device = next(iter(local_mesh_devices(mesh).values()), mesh.devices.flat[0])
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"The devices ({device.device_kind}) have the memories {kinds}, and no {HOST_MEMORY!r} to keep a state in. "
            'Described GPUs list none: to see what is saved, describe TPUs. Else name a device: `parameter_device="cpu:0"`.'
        )
