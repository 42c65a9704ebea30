"""Devices that are described, and not there: a compiler takes them, and programs for them can be looked at."""

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any

import jax

from jdist._src.core.arguments import as_int

# What a generation is offered in: two dimensions, all of them; three, those below 4x4x4, and multiples of 4 up to the last.
_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_SLICES: dict[str, tuple[str, ...]] = {
    "v2": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v3": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"),
    "v4": (*_SMALL, "16x16x16"),
    "v5e": _FLAT,
    "v5p": (*_SMALL, "16x16x24"),
    "v6e": _FLAT,
    "tpu7x": (*_SMALL, "16x24x24"),
}
# Unless it is told, libtpu asks the machine which host of which slice it is on. It matters only to programs that run.
_NOWHERE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

_GPU_TOPOLOGY = "A topology of GPUs is '1x2x8': NVLink domains, hosts in each, GPUs in a host."


def topology_devices(
    topology: str, *, num_slices: int = 1, gpu_target_config: str | os.PathLike[str] | None = None
) -> list[jax.Device]:
    """The devices of a machine that is not there, for strategies that are to compile for it: `Strategy.compile`.

    Args:
        topology: Of a TPU slice its generation and shape, as `"v5e:4x4"`. Of GPUs their numbers, as `"1x2x8"`: so many
            domains of hosts joined by NVLink, hosts in each, and GPUs in a host.
        num_slices: How many such TPU slices, joined by the network of the data center.
        gpu_target_config: The file that describes a GPU to XLA, its `GpuTargetConfigProto` as text.

    Raises:
        ValueError: There is no such topology; the message lists those there are.
        TypeError: `num_slices` is no whole number.
        ModuleNotFoundError: The compiler for these devices is not installed.
        FileNotFoundError: There is no such file.

    Example:
        >>> devices = jdist.topology_devices("v5e:4x4")
        >>> len(devices), devices[0].device_kind
        (16, 'TPU v5 lite')
    """
    num_slices = as_int("`num_slices`", num_slices, 1)
    if gpu_target_config is not None:
        if num_slices != 1:
            raise ValueError(f"`num_slices={num_slices}` is for TPUs; of GPUs the topology says it all: '1x2x8'.")
        return _gpus(topology, gpu_target_config)
    generation, _, shape = topology.partition(":") if isinstance(topology, str) else (None, "", "")
    if generation not in _SLICES or not _is_offered(shape, _SLICES[generation]):
        listed = "; ".join(f"{name}: {_said(shapes)}" for name, shapes in _SLICES.items())
        raise ValueError(
            f"There is no TPU topology {topology!r}. There are {listed}. Write generation and shape: 'v5e:4x4'. For GPUs, name "
            "a `gpu_target_config`."
        )
    if importlib.util.find_spec("libtpu") is None:  # the compiler, which JAX finds by itself
        raise ModuleNotFoundError(
            f"To compile for {topology!r} without a TPU, the compiler for TPUs is needed, which is not installed: "
            '`pip install "jdist[plan]"`.'
        )
    from jax.experimental import topologies

    with _environment(_NOWHERE):
        return list(topologies.get_topology_desc(topology, "tpu", num_slices=num_slices).devices)


def _gpus(topology: str, target_config: str | os.PathLike[str]) -> list[jax.Device]:
    from jax.experimental import topologies

    if not isinstance(topology, str) or not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", topology, re.ASCII):
        raise ValueError(f"There is no GPU topology {topology!r}. {_GPU_TOPOLOGY}")
    path = os.fspath(target_config)
    try:
        with open(path, encoding="utf-8") as file:
            config = file.read()
    except UnicodeDecodeError:
        config = ""
    if not config.strip():
        raise ValueError(
            f"{path!r} describes no GPU: it is empty, or no text. XLA wants its `GpuTargetConfigProto` as text."
        )
    try:
        return list(topologies.get_topology_desc("gpu", "cuda", target_config=config, topology=topology).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"There are no GPUs of the topology {topology!r} and the target {path!r}: {error}. {_GPU_TOPOLOGY}"
        ) from error
    except (RuntimeError, ValueError) as error:  # JAX has no such platform
        raise ModuleNotFoundError(
            "To compile for GPUs without one, JAX's plugin for them is needed, which is not installed or does not load "
            f'({error}): `pip install "jax[cuda13]"`, or, for the compiler alone, `pip install --no-deps jax-cuda13-plugin '
            "jax-cuda13-pjrt` in JAX's version."
        ) from error


def _is_offered(shape: str, shapes: tuple[str, ...]) -> bool:
    if shape in shapes or not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape, re.ASCII):
        return shape in shapes
    sizes, largest = ([int(size) for size in text.split("x")] for text in (shape, shapes[-1]))
    fits = [size % 4 == 0 and size <= most for size, most in zip(sizes, largest, strict=False)]
    return len(largest) == 3 and all(fits)


def _said(shapes: tuple[str, ...]) -> str:
    *others, last = shapes
    three = last.count("x") == 2
    return f"{', '.join(others)}, and multiples of 4 up to {last}" if three else ", ".join(shapes)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, for as long as the block runs."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def is_topology_device(device: Any) -> bool:
    """Whether `device` is not there."""
    return type(device.client).__name__ == "CompileOnlyPyClient"
