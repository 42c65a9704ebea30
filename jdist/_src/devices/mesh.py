"""The mesh of a strategy: devices by object or name, and the mapping of replicas to devices.

The axes of a mesh up to and including `"replica"` are the axes of the replicas, the *replica axes*. The axes after it are
*model axes*: a replica is a group of devices, over which its model is partitioned. A mesh without an axis `"replica"` has one
replica, which spans all its devices.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist._src.core import jax_compat
from jdist._src.core.arguments import as_int
from jdist._src.core.tree import one_line

REPLICA_AXIS = "replica"
GROUP_AXIS = "group"
HOST_MEMORY = "pinned_host"


def replica_mesh(devices: Sequence[jax.Device | str] | None = None, axis_name: str = REPLICA_AXIS) -> Mesh:
    """Returns a mesh with one replica per device.

    Args:
        devices: Devices, or their names (`"cpu:0"`: platform, then the index among this process's devices of that
            platform; TensorFlow's `"/cpu:0"` too). All local devices by default. Devices of other processes may be included.
        axis_name: The axis of the replicas.

    Returns:
        A mesh with the single axis `"replica"`, in the order of `devices`. With another `axis_name`, an axis `"replica"` of
        size 1 is after it, by which jdist recognizes the replica axes (`replica_axes`).

    Raises:
        ValueError: The list is empty, has duplicates, mixes platforms or names a device that this process does not have; or
            `axis_name` is empty.
        TypeError: An entry is neither a device nor a name, or `axis_name` is not a string.

    Example:
        >>> dict(replica_mesh(["cpu:0", "cpu:1"]).shape)
        {'replica': 2}
    """
    if isinstance(devices, Mesh):
        raise TypeError(
            f"`devices` must be a list of devices, got a mesh with the axes {', '.join(map(repr, devices.axis_names))}. For "
            "one replica per device, pass `list(mesh.devices.flat)`; for a group of devices per replica, "
            f'`jdist.MirroredStrategy(mesh=Mesh(devices, ("{REPLICA_AXIS}", "model")))`. To shard the state over all devices, '
            "use `jdist.ShardedStrategy(mesh=mesh, model_axis=...)`."
        )
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Iterable)):
        instead = f"[{one_line(str(devices))}]" if isinstance(devices, (str, jax.Device)) else "`jax.devices()[:n]`"
        raise TypeError(f"`devices` must be a list of devices, got {one_line(devices)}; write {instead}.")
    chosen = jax.local_devices() if devices is None else [find_device(device) for device in devices]
    _check(chosen)
    check_axis_name(axis_name)
    return mesh_of_replicas(np.array(chosen), (), axis_name)


def mesh_of_replicas(devices: np.ndarray, model_axes: Sequence[str], axis_name: str = REPLICA_AXIS) -> Mesh:
    """Returns a mesh of `devices`, `[replica, *model axes]`, with the replicas along the axis `axis_name`."""
    if axis_name == REPLICA_AXIS:
        names = (REPLICA_AXIS, *model_axes)
    else:
        devices, names = np.expand_dims(devices, 1), (axis_name, REPLICA_AXIS, *model_axes)
    # Not `jax.make_mesh`: it defaults to explicit axes, and may reorder the devices.
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def user_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh that the user passed to `model_mesh`, with `mesh` as result."""
    if mesh.axis_names[0] == REPLICA_AXIS:
        return mesh
    names = (mesh.axis_names[0], *mesh.axis_names[2:])
    return Mesh(mesh.devices.squeeze(1), names, axis_types=(AxisType.Auto,) * len(names))


def model_mesh(mesh: object, devices: Sequence[jax.Device], axis_name: str = REPLICA_AXIS) -> Mesh:
    """Returns the mesh of a strategy whose replicas may be groups of devices.

    Args:
        mesh: A mesh, or the sizes of its axes by name. See `check_mesh_argument`.
        devices: The devices of a mesh that is described by sizes.
        axis_name: The axis of the replicas.

    Raises:
        TypeError: `mesh` is neither.
        ValueError: The axes, their order, their types or their sizes do not fit.
    """
    sizes = check_mesh_argument(mesh, axis_name)
    grid = mesh.devices if isinstance(mesh, Mesh) else np.array(devices).reshape(resolved_sizes(sizes, len(devices)))
    _check(list(grid.flat))
    return mesh_of_replicas(grid, list(sizes)[1:], axis_name)


def check_mesh_argument(mesh: object, axis_name: str) -> dict[str, int]:
    """Checks the argument `mesh` of a strategy of several replicas, and returns its axes and their sizes.

    Args:
        mesh: A mesh, or a mapping from the names of axes to sizes. One size may be -1.
        axis_name: The axis of the replicas.

    Raises:
        TypeError: It is neither, or a size is not an integer.
        ValueError: The first axis is not `axis_name`, an axis is not `Auto`, or a size is less than 1.
    """
    check_axis_name(axis_name)
    if not isinstance(mesh, (Mesh, Mapping)):
        raise TypeError(
            f'`mesh` is a `jax.sharding.Mesh`, or the sizes of its axes, `{{"{axis_name}": -1, "model": 2}}`; got '
            f"{one_line(mesh)}."
        )
    names = list(mesh.axis_names) if isinstance(mesh, Mesh) else list(mesh)
    listed = ", ".join(map(repr, names)) or "no axes"
    if axis_name not in names:
        raise ValueError(
            f"The mesh has the axes {listed}, and none of them is the axis of the replicas, {axis_name!r}. Rename one, or name "
            f"the axis of the replicas: `axis_name={names[0] if names else 'data'!r}`."
        )
    if names[0] != axis_name:
        reordered = ", ".join(map(repr, [axis_name, *(name for name in names if name != axis_name)]))
        raise ValueError(
            f"The axis of the replicas, {axis_name!r}, must be the first axis of the mesh, and the mesh has {listed}. Write "
            f"`Mesh(np.moveaxis(mesh.devices, {names.index(axis_name)}, 0), ({reordered}))`."
        )
    if axis_name != REPLICA_AXIS and REPLICA_AXIS in names:
        raise ValueError(
            f"The mesh has an axis {REPLICA_AXIS!r} beside the axis of the replicas, {axis_name!r}. Rename it."
        )
    if isinstance(mesh, Mesh):
        check_auto_axes(mesh, "a strategy")
        return dict(mesh.shape)
    sizes = {name: size if size == -1 else as_int(f"`mesh[{name!r}]`", size, 1) for name, size in mesh.items()}
    if sum(size == -1 for size in sizes.values()) > 1:
        raise ValueError(
            f"`mesh={sizes}` has several axes of size -1. The size of one axis can be computed: give the others."
        )
    return sizes


def resolved_sizes(sizes: Mapping[str, int], count: int) -> list[int]:
    """Returns the sizes of the axes of a mesh of `count` devices, with the size of an axis that is -1 computed.

    Raises:
        ValueError: The number of devices is not the product of the sizes.
    """
    known = math.prod(size for size in sizes.values() if size != -1)
    if count % known or (-1 not in sizes.values() and count != known):
        raise ValueError(
            f"`mesh={dict(sizes)}` needs {'a multiple of ' if -1 in sizes.values() else ''}{known} devices, and there are "
            f"{count}. Choose sizes whose product is the number of devices, or pass a `Mesh` of some of them."
        )
    return [count // known if size == -1 else size for size in sizes.values()]


def check_auto_axes(mesh: Mesh, strategy: str) -> None:
    """Raises ValueError if an axis of `mesh` is not `Auto`, as `strategy` needs."""
    if any(axis_type != AxisType.Auto for axis_type in mesh.axis_types):
        types = ", ".join(
            f"{name!r}: {axis_type.name}" for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        )
        raise ValueError(
            f"The mesh has the axis types {types}, and {strategy} needs `Auto`: XLA partitions the step, which "
            "JAX refuses for explicit axes where the sharding of a result is ambiguous. Write "
            "`mesh=jax.sharding.Mesh(mesh.devices, mesh.axis_names)`; `jax.make_mesh` creates explicit axes unless "
            "`axis_types=` is `Auto`."
        )


def check_axis_name(axis_name: object) -> None:
    """Raises TypeError or ValueError if `axis_name` is not the name of a mesh axis."""
    if not isinstance(axis_name, str):
        raise TypeError(
            f'`axis_name` must be a string, the name in `jax.lax.pmean(x, "batch")`, got {one_line(axis_name)}.'
        )
    if not axis_name:
        raise ValueError('`axis_name` is empty. Name the axis of the replicas, or omit it for "replica".')


def chosen_name(axis_name: str) -> str | None:
    """Returns the argument `axis_name` of a strategy as `Replicas.axis_name`: None for the default."""
    return None if axis_name == REPLICA_AXIS else axis_name


def group_mesh(mesh: Mesh, group_size: int) -> Mesh:
    """Returns `mesh` with the replica axes `"group"` and `"replica"`: neighbouring replicas form groups of `group_size`.

    Raises:
        ValueError: `group_size` does not divide the number of replicas.
    """
    (num_replicas, *model_sizes), (_, *model_axes) = mesh.devices.shape, mesh.axis_names
    if group_size < 1 or num_replicas % group_size:
        raise ValueError(
            f"{num_replicas} replicas cannot form groups of {group_size}: `group_size` must be a divisor of {num_replicas}."
        )
    axes = (GROUP_AXIS, REPLICA_AXIS, *model_axes)
    grid = mesh.devices.reshape(-1, group_size, *model_sizes)
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def find_device(device: jax.Device | str) -> jax.Device:
    """Returns the device with this name: `"gpu:1"` is the second GPU of this process, `"gpu"` its first.

    TensorFlow's names are accepted: `"/gpu:1"`, `"/device:GPU:1"`, `"/job:localhost/replica:0/task:0/device:GPU:1"`.

    Raises:
        ValueError: This process does not have the device; the message lists the devices it has.
        TypeError: `device` is neither a device nor a name.

    Example:
        >>> find_device("/device:CPU:1") is find_device("cpu:1") is jax.local_devices()[1]
        True
    """
    if isinstance(device, jax.Device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"A device must be a `jax.Device` or a name such as 'cpu:0', got {one_line(device)}.")
    name = _DEVICE_NAME.fullmatch(device.lower())
    if name:
        _check_process(device, name["job"], name["task"])
    platform = name["platform"] if name else ""
    same_platform = _local_devices(platform) if platform else []
    index = int(name["index"] or 0) if name else 0
    if index < len(same_platform):
        return same_platform[index]
    # Lists the devices of the platform that was named, if this process has any.
    local = ", ".join(f"{d.platform}:{i}" for i, d in enumerate(same_platform or jax.local_devices()))
    advice = _PLATFORM_ADVICE.get(platform, _NAME_ADVICE)[not same_platform]
    raise ValueError(f"Device {one_line(device)} not found. This process has {local}. {advice}")


_DEVICE_NAME = re.compile(
    r"(?:/?job:(?P<job>\w+)/)?(?:/?replica:0/)?(?:/?task:(?P<task>\d+)/)?/?(?:device:)?(?P<platform>[a-z]+)(?::(?P<index>\d+))?",
    re.ASCII,
)
_NAME_ADVICE = ("A device name is a platform and an index, such as 'cpu:0'.",) * 2
_GPU_ADVICE = (
    "JAX uses the GPUs listed in `CUDA_VISIBLE_DEVICES` (or `ROCR_VISIBLE_DEVICES`), and all GPUs if it is not set.",
    'JAX found no GPU: install JAX with GPU support, `pip install "jax[cuda13]"` for NVIDIA, and do not set `JAX_PLATFORMS` '
    "to another platform. To test on CPU devices, name them instead.",
)
_CPU_ADVICE = (
    "To have more CPU devices, call `jdist.use_cpu_devices(n)` before the first use of JAX.",
    "JAX has no CPU devices in this process: leave `JAX_PLATFORMS` unset, or add `cpu` to it.",
)
_TPU_ADVICE = (
    "The TPU cores of other hosts belong to other processes: `jdist.TPUStrategy()` uses the cores of all hosts.",
    'JAX found no TPU: on a TPU machine, `pip install "jax[tpu]"`, and do not set `JAX_PLATFORMS` to another platform.',
)
# By platform: the advice if the index is too high, and the advice if JAX does not have a device of the platform.
_PLATFORM_ADVICE = {
    "cpu": _CPU_ADVICE,
    "gpu": _GPU_ADVICE,
    "cuda": _GPU_ADVICE,
    "rocm": _GPU_ADVICE,
    "tpu": _TPU_ADVICE,
}


def _check_process(name: str, job: str | None, task: str | None) -> None:
    """Raises ValueError if a TensorFlow device name refers to another process."""
    local_task = 0 if job == "localhost" else jax.process_index()
    if job in (None, "localhost", "worker") and (task is None or int(task) == local_task):
        return
    raise ValueError(
        f"{name!r} is TensorFlow's name of a device of another process, and this is process {jax.process_index()}. Names "
        "refer to local devices only: `cpu:0`. For the devices of all processes, pass `jax.devices()`, or a part of this list."
    )


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a strategy and their devices.

    Attributes:
        mesh: The devices.
        size: The number of replicas: one per device, or per group of devices along the model axes. If they are virtual, any
            number from the number of devices up; every device runs the same number, except that the last devices may run fewer.
        virtual: Whether the number of replicas was chosen independently of the number of devices.
        batch_axes: The mesh axes that the batch of one replica is sharded over, if one replica spans devices.
        axis_name: The axis of the replicas in replica functions, if its name is chosen; else None.
    """

    mesh: Mesh
    size: int
    virtual: bool = False
    batch_axes: tuple[str, ...] = ()
    axis_name: str | None = None

    @classmethod
    def from_mesh(cls, mesh: Mesh, virtual: int | None = None, axis_name: str = REPLICA_AXIS) -> "Replicas":
        """Returns one replica per device of `mesh` or group of devices, or `virtual` virtual replicas.

        Raises:
            TypeError: `virtual` is not an integer.
            ValueError: There are fewer virtual replicas than devices; or they do not divide evenly over several processes.
        """
        count = num_replica_devices(mesh)
        if virtual is None:
            return cls(mesh, count, axis_name=chosen_name(axis_name))
        if as_int("`virtual_replicas`", virtual, 1) < count:
            raise ValueError(
                f"`virtual_replicas={virtual}` is less than the number of devices, {count}. Every device runs at least one "
                f"replica: use more replicas, or only {max(virtual, 1)} of the devices."
            )
        replicas = cls(mesh, virtual, virtual=True, axis_name=chosen_name(axis_name))
        if not replicas.per_replica_axes and len(local_mesh_devices(mesh)) < mesh.size:
            raise ValueError(
                f"`virtual_replicas={virtual}` does not divide evenly over {count} devices. The devices are in several "
                f"processes, and each process reads the rows of its devices: use a multiple of {count}."
            )
        return replicas

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the replicas, as collectives name them."""
        if self.axis_name is not None:
            return (self.axis_name,)
        return (REPLICA_AXIS,) if self.batch_axes else self.mesh_axes

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The axes of the mesh along which replicas differ; empty if one replica spans all devices."""
        return () if self.batch_axes else replica_axes(self.mesh)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes of the mesh over which the model of a replica is partitioned; empty if one replica spans all devices."""
        return () if self.batch_axes else self.mesh.axis_names[len(self.mesh_axes) :]

    @property
    def axis_sizes(self) -> list[tuple[str, int]]:
        """The axes that are bound while the function of one replica is traced, and their sizes."""
        if self.virtual or self.batch_axes:
            return [(axis, self.size) for axis in self.axes]
        return [(axis, self.mesh.shape[axis]) for axis in self.mesh_axes]

    @property
    def max_per_device(self) -> int:
        """The largest number of replicas that one device runs."""
        return -(-self.size // (1 if self.batch_axes else num_replica_devices(self.mesh)))

    @property
    def num_parts(self) -> int:
        """The number of equal parts of a batch: one per replica, or one per shard of a replica that spans devices."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes) if self.batch_axes else self.size

    @property
    def local_parts(self) -> tuple[int, ...]:
        """The indices of the batch parts that this process holds, in ascending order."""
        if not self.batch_axes:
            return tuple(self.local_devices)
        first = [self.mesh.axis_names.index(axis) for axis in self.batch_axes]
        part_devices = np.moveaxis(self.mesh.devices, first, range(len(first))).reshape(self.num_parts, -1)
        process = jax.process_index()
        return tuple(
            i for i, devices in enumerate(part_devices) if any(device.process_index == process for device in devices)
        )

    @property
    def per_replica_axes(self) -> tuple[str, ...]:
        """The mesh axes that `[replica, ...]` arrays are sharded over; empty if they do not divide evenly over the devices."""
        if self.batch_axes:
            return ()
        return self.mesh_axes if self.size % num_replica_devices(self.mesh) == 0 else ()

    @property
    def local_devices(self) -> dict[int, jax.Device]:
        """The device of each replica of this process, by replica index in ascending order; the first one of a group."""
        group_size = self.mesh.size if self.batch_axes else self.mesh.size // num_replica_devices(self.mesh)
        first: dict[int, jax.Device] = {}
        for position, device in local_mesh_devices(self.mesh).items():
            first.setdefault(position // group_size, device)
        return {i: first[i // self.max_per_device] for i in range(self.size) if i // self.max_per_device in first}

    @property
    def per_device(self) -> "Replicas":
        """One replica per device of the same mesh."""
        return Replicas(mesh_of_replicas(self.mesh.devices.reshape(-1), ()), self.mesh.size)

    @property
    def replicated_sharding(self) -> NamedSharding:
        """The fully replicated sharding."""
        return replicated_sharding(self.mesh)

    @property
    def per_replica_sharding(self) -> NamedSharding:
        """The sharding of `[replica, ...]` arrays."""
        return NamedSharding(self.mesh, PartitionSpec(self.per_replica_axes))

    def batch_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of a batch `[replica, batch, ...]`."""
        splits = self.batch_axes and len(shape) > 1 and shape[1] and shape[1] % self.num_parts == 0
        return NamedSharding(self.mesh, PartitionSpec(None, self.batch_axes)) if splits else self.per_replica_sharding


def spans_devices(mesh: Mesh) -> bool:
    """Whether one replica spans all devices of `mesh`, which then does not have an axis `"replica"`."""
    return REPLICA_AXIS not in mesh.axis_names


def replica_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of `mesh` along which replicas differ: those up to `"replica"`."""
    return mesh.axis_names[: mesh.axis_names.index(REPLICA_AXIS) + 1] if REPLICA_AXIS in mesh.axis_names else ()


def num_replica_devices(mesh: Mesh) -> int:
    """Returns the number of devices of `mesh`, or of groups of devices along its model axes."""
    return math.prod(mesh.shape[axis] for axis in replica_axes(mesh))


def has_model_axes(mesh: Mesh) -> bool:
    """Whether a replica is a group of devices of `mesh`."""
    return not spans_devices(mesh) and replica_axes(mesh) != mesh.axis_names


def row_sharding(rows: NamedSharding) -> NamedSharding:
    """Returns the sharding of a row of a `[replica, ...]` array: partitioned over the model axes only."""
    mesh: Mesh = rows.mesh  # pyright: ignore[reportAssignmentType]
    if not has_model_axes(mesh):
        return replicated_sharding(mesh)
    return NamedSharding(mesh, PartitionSpec(*rows.spec[1:]))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the fully replicated sharding."""
    return NamedSharding(mesh, PartitionSpec())


def local_mesh_devices(mesh: Mesh) -> dict[int, jax.Device]:
    """Returns the devices of this process in `mesh`, by position in the mesh in ascending order."""
    process = jax.process_index()
    return {i: device for i, device in enumerate(mesh.devices.flat) if device.process_index == process}


def _local_devices(platform: str) -> list[jax.Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # JAX does not have the platform, or a device of it
        return []


def _check(devices: list[jax.Device]) -> None:
    if not devices:
        raise ValueError("`devices` is empty. Name at least one device, or omit it to use all local devices.")
    duplicates = sorted({str(device) for device in devices if devices.count(device) > 1})
    if duplicates:
        raise ValueError(
            f"`devices` has duplicates: {', '.join(duplicates)}. A device holds one replica; name it once."
        )
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        raise ValueError(
            f"`devices` mixes the platforms {' and '.join(platforms)}, but a program runs on one platform. Use the devices of "
            "one platform."
        )


def check_host_memory(mesh: Mesh, instead: str) -> None:
    """Raises ValueError, which ends with the advice `instead`, if programs for these devices cannot name their host memory."""
    device = next(iter(local_mesh_devices(mesh).values()), mesh.devices.flat[0])
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"The devices ({device.device_kind}) have the memories {kinds}, and not {HOST_MEMORY!r}, which would store the "
            f"state. Topology devices of GPUs list no memories: compile for TPUs to see the saving. {instead}"
        )
    jax_compat.add_to_memory_space_errors(
        "An array in host memory, such as a state of `jdist.CentralStorageStrategy`, is not indexed, and not combined with "
        "arrays on devices. Copy it first: `jdist.read_values(x)`, or `np.asarray(x)`."
    )
