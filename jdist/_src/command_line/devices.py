"""`jdist devices`: a table of the devices, and a drawing of those with coordinates."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.command_line.start_devices import start_devices
from jdist._src.command_line.verb import Verb
from jdist._src.strategies.mesh_drawing import draw_mesh


def device_table(devices: Sequence[jax.Device]) -> str:
    """Returns a table of devices. Memory, slice and coordinates are columns if they are known of a device.

    Args:
        devices: Devices of any platform; topology devices too.

    Example:
        >>> print(device_table(jax.devices()[:2]))
        device  kind  process
        cpu:0   cpu   0
        cpu:1   cpu   0
    """
    columns = {
        "device": [f"{device.platform}:{device.id}" for device in devices],
        "kind": [device.device_kind for device in devices],
        "process": [str(device.process_index) for device in devices],
        "memory": [_memory(device) for device in devices],
        "slice": [_attribute(device, "slice_index") for device in devices],
        "coordinates": [_attribute(device, "coords") for device in devices],
        "core": [_attribute(device, "core_on_chip") for device in devices],
    }
    if set(columns["core"]) == {"0"}:  # one core per chip
        del columns["core"]
    table = [[name, *values] for name, values in columns.items() if any(values)]
    widths = [max(map(len, column)) for column in table]
    rows = zip(*table, strict=True)
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def device_drawings(devices: Sequence[jax.Device]) -> list[str]:
    r"""Returns a drawing of the devices of each slice at their coordinates; none if these are unknown or not a full grid.

    Args:
        devices: Devices of any platform; topology devices too.

    Example:
        >>> print(*device_drawings(jdist.topology_devices("v5e:2x4")), sep="\n")
        rows along 'y', columns along 'x'
        ┌───────┐
        │ 0   1 │
        │ 2   3 │
        ├───────┤
        │ 4   5 │
        │ 6   7 │
        └───────┘
    """
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    drawings = [_draw_slice(of_slice) for of_slice in slices.values()]
    if not all(drawings):
        return []
    titles = [f"slice {index}\n" for index in slices] if len(slices) > 1 else [""]
    return [title + drawing for title, drawing in zip(titles, drawings, strict=True)]


def _draw_slice(devices: Sequence[Any]) -> str:
    if any(getattr(device, "coords", None) is None for device in devices):
        return ""
    points = np.array([[*device.coords[::-1], getattr(device, "core_on_chip", None) or 0] for device in devices])
    points -= points.min(axis=0)
    shape = points.max(axis=0) + 1
    if len(devices) != shape.prod() or len(np.unique(points, axis=0)) != len(devices):
        return ""
    ids, processes = np.zeros(shape, int), np.zeros(shape, int)
    for point, device in zip(points, devices, strict=True):
        ids[*point], processes[*point] = device.id, device.process_index
    drawn = [i for i, size in enumerate(shape) if size > 1 or i in (1, 2)]  # rows and columns, and the longer axes
    index = tuple(slice(None) if i in drawn else 0 for i in range(len(shape)))
    names = [*"zyx"[-(len(shape) - 1) :], "core"]
    return draw_mesh([names[i] for i in drawn], ids[index], processes[index])


def _memory(device: Any) -> str:
    try:
        stats = device.memory_stats() or {}
    except RuntimeError:  # devices without hardware, and of other processes
        return ""
    num_bytes = stats.get("bytes_limit")
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes else ""


def _attribute(device: Any, name: str) -> str:
    value = getattr(device, name, None)
    return "" if value is None else str(value)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def _run(arguments: argparse.Namespace) -> int:
    del arguments
    try:
        devices = start_devices()
    except RuntimeError as error:
        print(f"jdist devices: JAX cannot use the devices: {error}", file=sys.stderr)
        return 1
    print(device_table(devices), *device_drawings(devices), sep="\n\n")
    return 0


DEVICES = Verb("print the kind, process, memory and coordinates of each device", "devices", _add_arguments, _run)
