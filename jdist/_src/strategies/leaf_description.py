"""Where a leaf of a state lies, in words and in bytes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import core
from jax.sharding import NamedSharding, Sharding

from jdist._src.core.tree import dtype_and_shape
from jdist._src.devices.mesh import Replicas
from jdist._src.values.arrays import is_device_array


@dataclasses.dataclass(frozen=True)
class LeafDescription:
    """Where a leaf of a state lies, or would lie.

    Attributes:
        path: The keys that lead to it, as patterns of a layout see them: `params/dense/kernel`.
        spec: Dtype and shape, as the host sees it.
        placement: In words.
        bytes: What one copy of it takes.
        device_bytes: What each of `devices` holds of it, in its own memory.
        host_bytes: What each of `devices` keeps of it in the memory of its host.
        devices: The devices of the strategy that it lies on.
    """

    path: str
    spec: str
    placement: str
    bytes: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    devices: frozenset[jax.Device] = frozenset()


def describe_leaf(
    path: str, value: Any, wrapper: Any, wanted: Sharding, replicas: Replicas, home: frozenset[jax.Device]
) -> LeafDescription:
    """What lies, or would lie, under `path`: `wanted` is where the strategy would put it, `home` all devices that it uses."""
    if not is_device_array(value) and not is_shape(value):
        is_number = hasattr(value, "dtype") or isinstance(value, (bool, int, float, complex))
        placement = "on the host; not placed" if is_number else "no array"
        return LeafDescription(path, dtype_and_shape(value), placement, getattr(value, "nbytes", 0))
    if is_device_array(value) and value.is_deleted():
        return LeafDescription(path, dtype_and_shape(value), "deleted: its memory was given to a step, or freed")
    place = value.sharding if is_device_array(value) else wanted
    devices = frozenset(place.device_set)
    is_host = place.memory_kind not in (None, replicas.whole.memory_kind)
    placement = _placement(value.shape, wrapper, place, replicas)
    placement += f", in host memory ({place.memory_kind})" if is_host else ""
    if not devices <= home:
        where = f", on {listed(sorted(map(str, devices)), 3)}" if len(devices) > 1 else ""
        placement += f"{where}, not this strategy's"
    size = math.prod(value.shape) * value.dtype.itemsize
    held = math.prod(place.shard_shape(value.shape)) * value.dtype.itemsize if devices & home else 0
    held_in = (0, held) if is_host else (held, 0)
    return LeafDescription(path, dtype_and_shape(value), placement, size, *held_in, devices & home)


def _placement(shape: tuple[int, ...], wrapper: Any, place: Sharding, replicas: Replicas) -> str:
    part = place.shard_shape(shape)
    split, ours = _split_in_words(shape, part, place), list(replicas.mesh.devices.flat)
    in_order = not isinstance(place, NamedSharding) or list(place.mesh.devices.flat) == ours  # pyright: ignore
    split += ", the devices in another order" if place.device_set == set(ours) and not in_order else ""
    aggregation = getattr(wrapper, "aggregation", None)
    said = f"{type(wrapper).__name__} {aggregation.name if aggregation else ''}".strip()
    if wrapper is None or said == "Mirrored NONE":
        return split
    if not wrapper.stacked:
        return f"{split} ({said})"
    if place.device_set != set(ours) or not in_order or shape[:1] <= (1,):
        return f"one a replica ({said}), {split}"
    return f"one a replica ({said})" + (f", {part[0]} a device" if part[0] > 1 else "")


def _split_in_words(shape: tuple[int, ...], part: tuple[int, ...], place: Sharding) -> str:
    if len(place.device_set) == 1:
        return f"on {next(iter(place.device_set))}"
    counts = {dim: size // part[dim] for dim, size in enumerate(shape) if size != part[dim]}
    if not counts:
        return "mirrored"
    axes = place.spec if isinstance(place, NamedSharding) else [()] * len(shape)
    over = {dim: " and ".join(map(repr, names_of(axes[dim]))) for dim in counts}
    dims = [f"dim {dim}{over[dim] and ' over ' + over[dim]} ({count} parts)" for dim, count in counts.items()]
    copies = len(place.device_set) // math.prod(counts.values())
    return f"split {', '.join(dims)}" + (f", {copies} copies" if copies > 1 else "")


def names_of(axes: Any) -> tuple[str, ...]:
    """The axes in an entry of a `PartitionSpec`."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def is_shape(value: Any) -> bool:
    """Whether there is only the shape of an array yet."""
    return isinstance(value, (jax.ShapeDtypeStruct, core.Tracer))


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """What a view is asked about: what is on no device, and so is not described by it, is any number."""
    if is_device_array(value) or is_shape(value):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return jax.ShapeDtypeStruct(value.shape if isinstance(value, np.ndarray) else (), np.float32)


def listed(names: Sequence[str], most: int, comma: str = ", ") -> str:
    """The first of the names, and how many more there are."""
    return comma.join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
