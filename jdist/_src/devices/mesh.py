"""Which devices: from what the user names to a mesh with one axis, `"replica"`."""

import dataclasses
import math
import re
import warnings
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist._src.core.arguments import as_int

REPLICA_AXIS = "replica"
GROUP_AXIS = "group"
HOST_MEMORY = "pinned_host"


def replica_mesh(devices: Sequence[jax.Device | str] | None = None) -> Mesh:
    """A mesh of one replica a device.

    Args:
        devices: Devices, or their names (`"cpu:0"`: platform, then the index among this process's devices of that
            platform; TensorFlow's `"/cpu:0"` too). All local devices by default. Devices of other processes may be among them.

    Returns:
        A mesh with the single axis `"replica"`, in the order of `devices`.

    Raises:
        ValueError: The list is empty, has duplicates, mixes platforms or names a device that is not here.
        TypeError: An entry is neither a device nor a name.

    Example:
        >>> dict(replica_mesh(["cpu:0", "cpu:1"]).shape)
        {'replica': 2}
    """
    if isinstance(devices, Mesh):
        raise TypeError(
            f"`devices` is a list of devices, got a mesh with the axes {', '.join(map(repr, devices.axis_names))}. Here every "
            "device has a replica, with all of the state, so there is no model axis: hand in `list(mesh.devices.flat)`. To "
            "split the state, `jdist.ShardedStrategy(mesh=mesh, model_axis=...)`."
        )
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Iterable)):
        instead = f"[{str(devices)!r}]" if isinstance(devices, (str, jax.Device)) else "`jax.devices()[:n]`"
        raise TypeError(f"`devices` is a list of devices, got {devices!r}; write {instead}.")
    chosen = jax.local_devices() if devices is None else [find_device(device) for device in devices]
    _check(chosen)
    # Not `jax.make_mesh`: it defaults to explicit axes, and may reorder the devices.
    return Mesh(np.array(chosen), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))


def group_mesh(mesh: Mesh, group_size: int) -> Mesh:
    """The same replicas in groups of neighbours: a mesh of the axes `"group"` and `"replica"`.

    Raises:
        ValueError: The replicas do not make groups of that size.
    """
    if group_size < 1 or mesh.size % group_size:
        raise ValueError(f"{mesh.size} replicas do not make groups of {group_size}: take a divisor of {mesh.size}.")
    axes = (GROUP_AXIS, REPLICA_AXIS)
    return Mesh(mesh.devices.reshape(-1, group_size), axes, axis_types=(AxisType.Auto,) * 2)


def find_device(device: jax.Device | str) -> jax.Device:
    """The device of that name: `"gpu:1"` is the second GPU of this process, `"gpu"` its first.

    TensorFlow's names are accepted: `"/gpu:1"`, `"/device:GPU:1"`, `"/job:localhost/replica:0/task:0/device:GPU:1"`.

    Raises:
        ValueError: This process has no such device; the message lists the devices it has.
        TypeError: `device` is neither a device nor a name.

    Example:
        >>> find_device("/device:CPU:1") is find_device("cpu:1") is jax.local_devices()[1]
        True
    """
    if isinstance(device, jax.Device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"A device is a `jax.Device` or a name such as 'cpu:0', got {device!r}.")
    name = _DEVICE_NAME.fullmatch(device.lower())
    if name:
        _check_process(device, name["job"], name["task"])
    platform = name["platform"] if name else ""
    same_platform = _local_devices(platform) if platform else []
    index = int(name["index"] or 0) if name else 0
    if index < len(same_platform):
        return same_platform[index]
    # Of the platform that was named, if this process has devices of it.
    known = ", ".join(f"{d.platform}:{i}" for i, d in enumerate(same_platform or jax.local_devices()))
    advice = _MORE_DEVICES.get(platform, _ANOTHER_NAME)[not same_platform]
    raise ValueError(f"There is no device {device!r}. This process has {known}. {advice}")


_DEVICE_NAME = re.compile(
    r"(?:/?job:(?P<job>\w+)/)?(?:/?replica:0/)?(?:/?task:(?P<task>\d+)/)?/?(?:device:)?(?P<platform>[a-z]+)(?::(?P<index>\d+))?",
    re.ASCII,
)
_ANOTHER_NAME = ("A device name is a platform and an index, such as 'cpu:0'.",) * 2
_GPUS = (
    "JAX uses the GPUs that `CUDA_VISIBLE_DEVICES` (or `ROCR_VISIBLE_DEVICES`) lists, and all if it is not set.",
    'JAX found no GPU: install JAX with GPU support, `pip install "jax[cuda13]"` for NVIDIA, and do not set `JAX_PLATFORMS` '
    "to another platform. To test on CPU devices, name these.",
)
_CPUS = (
    'To have more CPU devices, call `jax.config.update("jax_num_cpu_devices", n)` before the first use of JAX.',
    "JAX has no CPU devices here: leave `JAX_PLATFORMS` unset, or add `cpu` to it.",
)
_TPUS = (
    "The TPU cores of other hosts belong to other processes: `jdist.TPUStrategy()` takes the cores of all hosts.",
    'JAX found no TPU: on a TPU machine, `pip install "jax[tpu]"`, and do not set `JAX_PLATFORMS` to another platform.',
)
# What to do if the index is too high, and if there is no device of the platform.
_MORE_DEVICES = {"cpu": _CPUS, "gpu": _GPUS, "cuda": _GPUS, "rocm": _GPUS, "tpu": _TPUS}


def _check_process(name: str, job: str | None, task: str | None) -> None:
    """Raises ValueError if a device name of TensorFlow means another process."""
    here = 0 if job == "localhost" else jax.process_index()
    if job in (None, "localhost", "worker") and (task is None or int(task) == here):
        return
    raise ValueError(
        f"{name!r} is TensorFlow's name of a device of another process, and this is process {jax.process_index()}. Names "
        "are of local devices only: `cpu:0`. For the devices of all processes, pass `jax.devices()`, or a part of this list."
    )


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas that compute together, and the devices that they lie on.

    Attributes:
        mesh: The devices.
        size: How many replicas there are: one a device; or, if they are virtual, any number, of which each device runs
            equal parts as nearly as can be, the first ones in full.
        virtual: Whether their number was chosen, and not that of the devices.
        split: The mesh axes that one replica's own batch is split over, where it spans devices.
    """

    mesh: Mesh
    size: int
    virtual: bool = False
    split: tuple[str, ...] = ()

    @classmethod
    def on(cls, mesh: Mesh, virtual: int | None = None) -> "Replicas":
        """One replica a device of `mesh`; or so many virtual ones.

        Raises:
            TypeError: `virtual` is no whole number.
            ValueError: A device would have none; or processes would need each other's rows.
        """
        if virtual is None:
            return cls(mesh, mesh.size)
        if as_int("`virtual_replicas`", virtual, 1) < mesh.size:
            raise ValueError(
                f"`virtual_replicas={virtual}` are too few for {mesh.size} devices, which run at least one each. Take more, or "
                f"{max(virtual, 1)} of the devices."
            )
        replicas = cls(mesh, virtual, virtual=True)
        if not replicas.per_replica_axes and len(local_mesh_devices(mesh)) < mesh.size:
            raise ValueError(
                f"`virtual_replicas={virtual}` cannot be shared equally by {mesh.size} devices, and these are of several "
                f"processes, each of which reads its own rows. Take a multiple of {mesh.size}."
            )
        return replicas

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the replicas lie along, as collectives name them."""
        return (REPLICA_AXIS,) if self.split else self.mesh.axis_names

    @property
    def each(self) -> int:
        """How many replicas a device runs, at most."""
        return -(-self.size // self.mesh.size)

    @property
    def num_parts(self) -> int:
        """How many equal parts a batch is split into: one a replica, or those of the one that spans devices."""
        return math.prod(self.mesh.shape[axis] for axis in self.split) if self.split else self.size

    @property
    def local_parts(self) -> tuple[int, ...]:
        """The parts of a batch that this process holds, in ascending order."""
        if not self.split:
            return tuple(self.local)
        first = [self.mesh.axis_names.index(axis) for axis in self.split]
        rows = np.moveaxis(self.mesh.devices, first, range(len(first))).reshape(self.num_parts, -1)
        here = jax.process_index()
        return tuple(i for i, row in enumerate(rows) if any(device.process_index == here for device in row))

    @property
    def per_replica_axes(self) -> tuple[str, ...]:
        """The mesh axes that `[replica, ...]` is split over; none if the devices cannot have equal parts of it."""
        return self.mesh.axis_names if self.size % self.mesh.size == 0 else ()

    @property
    def local(self) -> dict[int, jax.Device]:
        """The replicas whose device this process can reach: number to device, in the order of the numbers."""
        devices = local_mesh_devices(self.mesh)
        if self.split:
            return {0: next(iter(devices.values()))} if devices else {}
        return {i: devices[i // self.each] for i in range(self.size) if i // self.each in devices}

    @property
    def whole(self) -> NamedSharding:
        """The sharding of a value that every device holds whole."""
        return replicated_sharding(self.mesh)

    @property
    def rows(self) -> NamedSharding:
        """The sharding of `[replica, ...]` arrays."""
        return NamedSharding(self.mesh, PartitionSpec(self.per_replica_axes))

    def batch(self, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of a batch `[replica, batch, ...]`."""
        splits = self.split and len(shape) > 1 and shape[1] and shape[1] % self.num_parts == 0
        return NamedSharding(self.mesh, PartitionSpec(None, self.split)) if splits else self.rows


def spans_devices(mesh: Mesh) -> bool:
    """Whether one replica spans all devices of `mesh`: they do not lie along an axis `"replica"`."""
    return REPLICA_AXIS not in mesh.axis_names


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def local_mesh_devices(mesh: Mesh) -> dict[int, jax.Device]:
    """The places in the mesh whose device this process can reach: number to device, in the order of the numbers."""
    here = jax.process_index()
    return {i: device for i, device in enumerate(mesh.devices.flat) if device.process_index == here}


def warn_if_local(strategy: str, devices: Iterable[jax.Device | str] | None, instead: str) -> None:
    """Warns, once per process and strategy, if `strategy` uses local devices by default or by name, and others have joined.

    Each process then trains a model of its own. To be called by the strategy's `__init__`: the warning names its caller's line.

    Args:
        strategy: The name of the strategy's class.
        devices: The devices that the user named, or None.
        instead: What to write for one model on the devices of all processes.
    """
    is_explicit = devices is not None and any(isinstance(device, jax.Device) for device in devices)
    if is_explicit or strategy in _warned_strategies or jax.process_count() == 1:
        return
    _warned_strategies.add(strategy)
    count = jax.process_count()
    warnings.warn(
        f"`{strategy}` uses devices of process {jax.process_index()} only, and {count} processes have joined: each process "
        f"trains a model of its own. For one model on the devices of all {count} processes, write `{instead}`. If one model "
        "per process is intended, pass the devices themselves, such as `jax.local_devices()`.",
        stacklevel=3,
    )


_warned_strategies: set[str] = set()


def _local_devices(platform: str) -> list[jax.Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # JAX knows no such platform, or it has no devices
        return []


def _check(devices: list[jax.Device]) -> None:
    if not devices:
        raise ValueError("`devices` is empty. Name at least one device, or leave it out to take all local ones.")
    twice = sorted({str(device) for device in devices if devices.count(device) > 1})
    if twice:
        raise ValueError(f"`devices` has duplicates: {', '.join(twice)}. A device holds one replica; name it once.")
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        raise ValueError(
            f"`devices` mixes the platforms {' and '.join(platforms)}; one program cannot span them. "
            "Take the devices of one platform."
        )
