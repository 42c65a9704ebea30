"""Devices from a topology description, for ahead-of-time compilation.

No hardware is attached: programs can be lowered and compiled for these devices but not executed.
"""

import contextlib
import importlib
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jdist._src.core.arguments import as_int
from jdist._src.core.optional_import import optional_import
from jdist._src.core.tree import one_line

# Shapes of each TPU generation. Two dimensions: all shapes. Three dimensions: the shapes below 4x4x4, and the largest shape;
# all shapes of multiples of 4 up to the largest exist.
_SHAPES_2D = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_SLICE_SHAPES: dict[str, tuple[str, ...]] = {
    "v2": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v3": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"),
    "v4": (*_SMALL_SHAPES_3D, "16x16x16"),
    "v5e": _SHAPES_2D,
    "v5p": (*_SMALL_SHAPES_3D, "16x16x24"),
    "v6e": _SHAPES_2D,
    "tpu7x": (*_SMALL_SHAPES_3D, "16x24x24"),
}
# Without these variables, libtpu queries the machine for its host and slice, which only matter to programs that run.
_COMPILE_ONLY_VARIABLES = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
_CORES = {"v2": 2, "v3": 2, "v4": 2, "tpu7x": 2}  # devices per chip, where these are not 1
_THREE_NUMBERS = re.compile(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", re.ASCII)
_GPU_TOPOLOGY = "A GPU topology is three numbers, such as '1x2x8': NVLink domains, hosts per domain, GPUs per host."


class Topology(NamedTuple):
    """The arguments of `topology_devices`.

    Attributes:
        topology: The generation and the shape of a TPU slice, or the three numbers of a GPU topology.
        num_slices: The number of TPU slices.
        gpu_target_config: The absolute path of the file that describes a GPU; None for TPUs.
    """

    topology: str
    num_slices: int = 1
    gpu_target_config: str | None = None

    def devices(self) -> list[jax.Device]:
        """Returns the devices of this topology."""
        return topology_devices(self.topology, num_slices=self.num_slices, gpu_target_config=self.gpu_target_config)

    def of_size(self, count: int) -> "Topology":
        """Returns the topology of the same kind with `count` devices, with the fewest slices or NVLink domains.

        Raises:
            ValueError: None has this number of devices; the message contains the nearest numbers that exist.
        """
        sizes = _tpu_topologies(self) if self.gpu_target_config is None else _gpu_topologies(self, count)
        if count not in sizes:
            nearest = sorted(sorted(sizes, key=lambda size: abs(math.log(size / count)))[:4])
            raise ValueError(
                f"There is no topology like {self.topology!r} with {count:,} devices. Near it are "
                f"{', '.join(f'{size:,}' for size in nearest)} devices."
            )
        return sizes[count]


# By the `id` of the client of the devices; a new client replaces an entry with its id.
_topologies: dict[int, Topology] = {}


def topology_of(device: Any) -> Topology:
    """Returns the topology of a topology device."""
    return _topologies[id(device.client)]


def topology_devices(
    topology: str, *, num_slices: int = 1, gpu_target_config: str | os.PathLike[str] | None = None
) -> list[jax.Device]:
    """Returns the devices of a topology for `Strategy.compile`. No hardware is attached, so they cannot execute programs.

    Args:
        topology: For a TPU slice its generation and shape, such as `"v5e:4x4"`. For GPUs three numbers, such as `"1x2x8"`: the
            number of domains of hosts connected by NVLink, hosts per domain, and GPUs per host.
        num_slices: The number of TPU slices of this topology, connected by the data center network.
        gpu_target_config: Path of a file that describes a GPU to XLA, a `GpuTargetConfigProto` in text format.

    Raises:
        ValueError: The topology does not exist; the message lists the valid ones.
        TypeError: `num_slices` is not an integer.
        ModuleNotFoundError: The compiler for these devices is not installed.
        FileNotFoundError: The file `gpu_target_config` does not exist.

    Example:
        >>> devices = jdist.topology_devices("v5e:4x4")
        >>> len(devices), devices[0].device_kind
        (16, 'TPU v5 lite')
    """
    num_slices = as_int("`num_slices`", num_slices, 1)
    if gpu_target_config is not None:
        if num_slices != 1:
            raise ValueError(
                f"`num_slices={num_slices}` is for TPUs. A GPU topology contains the number of domains: '1x2x8'."
            )
        devices = _gpu_devices(topology, gpu_target_config)
        _topologies[id(devices[0].client)] = Topology(topology, 1, os.path.abspath(gpu_target_config))
        return devices
    generation, _, shape = topology.partition(":") if isinstance(topology, str) else (None, "", "")
    if generation not in _SLICE_SHAPES or not _is_valid_shape(shape, _SLICE_SHAPES[generation]):
        valid = "; ".join(f"{name}: {_shapes_text(shapes)}" for name, shapes in _SLICE_SHAPES.items())
        raise ValueError(
            f"The TPU topology {one_line(topology)} does not exist. Valid topologies are {valid}. Write generation and shape: "
            "'v5e:4x4'. For GPUs, pass `gpu_target_config`."
        )
    with optional_import(
        f"Compiling for {one_line(topology)} without a TPU needs libtpu, the TPU compiler", "jdist[plan]"
    ):
        importlib.import_module("libtpu")  # JAX imports it to compile
    from jax.experimental import topologies

    with _default_environment(_COMPILE_ONLY_VARIABLES):
        devices = list(topologies.get_topology_desc(topology, "tpu", num_slices=num_slices).devices)
    _topologies[id(devices[0].client)] = Topology(topology, num_slices)
    return devices


def is_topology_device(device: Any) -> bool:
    """Whether `device` comes from a topology description, without hardware."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def _gpu_devices(topology: str, target_config: str | os.PathLike[str]) -> list[jax.Device]:
    from jax.experimental import topologies

    if not isinstance(topology, str) or not _THREE_NUMBERS.fullmatch(topology):
        raise ValueError(f"{one_line(topology)} is not a GPU topology. {_GPU_TOPOLOGY}")
    path = os.fspath(target_config)
    try:
        with open(path, encoding="utf-8") as file:
            config = file.read()
    except UnicodeDecodeError:
        config = ""
    if not config.strip():
        raise ValueError(
            f"{path!r} does not describe a GPU: it is empty or not text. XLA requires a `GpuTargetConfigProto` in text format."
        )
    try:
        return list(topologies.get_topology_desc("gpu", "cuda", target_config=config, topology=topology).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"XLA refuses the GPU topology {topology!r} with the target {path!r}: {error}. {_GPU_TOPOLOGY}"
        ) from error
    except (RuntimeError, ValueError) as error:  # JAX does not have the platform
        raise ModuleNotFoundError(
            "Compiling for GPUs without a GPU requires JAX's CUDA plugin, which is not installed or does not load "
            f'({error}): `pip install "jax[cuda13]"`, or, for the compiler alone, `pip install --no-deps jax-cuda13-plugin '
            "jax-cuda13-pjrt` in the version of JAX."
        ) from error


def _is_valid_shape(shape: str, valid_shapes: tuple[str, ...]) -> bool:
    if shape in valid_shapes or not _THREE_NUMBERS.fullmatch(shape):
        return shape in valid_shapes
    sizes, largest = ([int(size) for size in text.split("x")] for text in (shape, valid_shapes[-1]))
    fits = [size % 4 == 0 and size <= most for size, most in zip(sizes, largest, strict=False)]
    return len(largest) == 3 and all(fits)


def _tpu_topologies(like: Topology) -> dict[int, Topology]:
    """Returns the topologies of a TPU generation by the number of devices, each with the fewest slices, nearest to a cube."""
    generation = like.topology.partition(":")[0]
    shapes = _all_shapes(_SLICE_SHAPES[generation])
    by_chips = {math.prod(shape): shape for shape in sorted(shapes, key=max, reverse=True)}
    sizes: dict[int, Topology] = {}
    for num_slices in [2**i for i in range(9)]:
        for chips, shape in by_chips.items():
            text = f"{generation}:{'x'.join(map(str, shape))}"
            sizes.setdefault(chips * num_slices * _CORES.get(generation, 1), Topology(text, num_slices))
    return sizes


def _all_shapes(names: Iterable[str]) -> list[tuple[int, ...]]:
    *listed, largest = [tuple(map(int, name.split("x"))) for name in names]
    if len(largest) == 2:
        return [*listed, largest]
    multiples = itertools.product(*(range(4, most + 1, 4) for most in largest))
    return [*listed, *(shape for shape in multiples if list(shape) == sorted(shape))]


def _gpu_topologies(like: Topology, count: int) -> dict[int, Topology]:
    """Returns the topologies of GPUs by the number of devices: parts of a host, hosts of a domain, and domains."""
    _, hosts, gpus = map(int, like.topology.split("x"))
    parts = [f"1x1x{n}" for n in range(1, gpus + 1)]
    parts += [f"1x{n}x{gpus}" for n in range(1, hosts + 1)]
    parts += [f"{n}x{hosts}x{gpus}" for n in range(1, max(count // (hosts * gpus), 1) + 2)]
    by_size = {math.prod(map(int, part.split("x"))): part for part in reversed(parts)}
    return {size: like._replace(topology=part) for size, part in by_size.items()}


def _shapes_text(shapes: tuple[str, ...]) -> str:
    *others, last = shapes
    three_dimensions = last.count("x") == 2
    return f"{', '.join(others)}, and multiples of 4 up to {last}" if three_dimensions else ", ".join(shapes)


@contextlib.contextmanager
def _default_environment(values: dict[str, str]) -> Iterator[None]:
    """Sets the environment variables that are not set, inside the `with` block."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
