"""Pickles a strategy as the arguments that build it again, with names in place of devices.

A device object exists only in its process. A pickle therefore stores its platform and index, and the reading process looks up
its own device of this name.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist._src.devices.mesh import find_device
from jdist._src.devices.topology import is_topology_device


@dataclasses.dataclass(frozen=True)
class _DeviceName:
    """The name of a device.

    Attributes:
        platform: Such as `"cpu"`.
        index: Its index among the devices of that platform of its process.
        process: The index of its process; None for the process that reads the pickle.
    """

    platform: str
    index: int
    process: int | None

    def device(self) -> jax.Device:
        """Returns the device of this name.

        Raises:
            ValueError: The device does not exist.
        """
        if self.process is None:
            return find_device(f"{self.platform}:{self.index}")
        devices = _devices_of(self.platform, self.process)
        if self.index >= len(devices):
            raise ValueError(
                f"Device {self.platform}:{self.index} of process {self.process} does not exist: the number of joined "
                f"processes is {jax.process_count()}, and process {self.process} has {len(devices)} devices of platform "
                f"{self.platform!r}."
            )
        return devices[self.index]


@dataclasses.dataclass(frozen=True)
class _MeshOfNames:
    names: list[_DeviceName]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_types: tuple[AxisType, ...]

    def mesh(self) -> Mesh:
        """Returns the mesh of the devices of these names."""
        devices = np.array([name.device() for name in self.names])
        return Mesh(devices.reshape(self.shape), self.axis_names, axis_types=self.axis_types)


def with_names(strategy: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a strategy's constructor with names in place of devices, lists of devices and meshes.

    Raises:
        TypeError: The devices are topology devices, which no process has.
    """
    devices = [device for value in arguments.values() for device in _devices_in(value)]
    if any(map(is_topology_device, devices)):
        raise TypeError(
            f"A {strategy} on topology devices cannot be pickled, because no process has these devices. Pickle the name "
            "of the topology, and build the strategy again on `jdist.topology_devices(topology)`."
        )
    # Without a process index, a name means a device of the reading process, whose index may be another.
    is_local = all(device.process_index == jax.process_index() for device in devices)

    def name(device: jax.Device) -> _DeviceName:
        index = _devices_of(device.platform, device.process_index).index(device)
        return _DeviceName(device.platform, index, None if is_local else device.process_index)

    return {key: _replaced(value, name) for key, value in arguments.items()}


def with_devices(strategy: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with this process's devices in place of names.

    Raises:
        ValueError: A device of that name does not exist here.
    """
    try:
        return {key: _looked_up(value) for key, value in arguments.items()}
    except ValueError as error:
        raise ValueError(
            f"A pickled {strategy} is built on the devices of the same names, which this process does not have. {error} Or "
            "build a strategy for the devices of this process, and place the state on them: `strategy.put(state)`."
        ) from error


def _devices_of(platform: str, process: int) -> list[jax.Device]:
    try:
        return [device for device in jax.devices(platform) if device.process_index == process]
    except RuntimeError:  # JAX has no devices of that platform
        return []


def _devices_in(value: Any) -> Iterable[jax.Device]:
    if isinstance(value, Mesh):
        return value.devices.flat
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, jax.Device)]


def _replaced(value: Any, name: Callable[[jax.Device], _DeviceName]) -> Any:
    if isinstance(value, Mesh):
        names = [name(device) for device in value.devices.flat]
        return _MeshOfNames(names, value.devices.shape, value.axis_names, value.axis_types)
    if isinstance(value, list):
        return [_replaced(x, name) for x in value]
    return name(value) if isinstance(value, jax.Device) else value


def _looked_up(value: Any) -> Any:
    if isinstance(value, _MeshOfNames):
        return value.mesh()
    if isinstance(value, list):
        return [_looked_up(x) for x in value]
    return value.device() if isinstance(value, _DeviceName) else value
