"""The memory of a compiled step on one device, by its contents, and the memory that a device has."""

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jdist._src.core.nn_modules import to_array_tree
from jdist._src.core.tree import PyTree
from jdist._src.devices.hardware import hardware_of
from jdist._src.devices.topology import is_topology_device, topology_of
from jdist._src.plan.buffers import Buffer
from jdist._src.strategies.base import Strategy
from jdist._src.values.state_sharding import state_leaves

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DEFAULT_GPU_FRACTION = 0.75  # of its memory that JAX reserves without XLA_PYTHON_CLIENT_MEM_FRACTION


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device while a step runs.

    Attributes:
        parameters: The state without the state of optimizers.
        optimizer: The state of optimizers.
        inputs: The batch and other arguments.
        outputs: Results that do not reuse the memory of the state.
        activations: Values of the forward pass that the backward pass reads; 0 if the program was not compiled because it
            does not fit.
        temporaries: All other buffers: gradients, values between operations.
        code: The program itself.
        host: Bytes in the memory of the host, which are not in `total`.
        total: Bytes that the step needs on a device.
        limit: Bytes that a device has for the step; None if they are unknown.
    """

    parameters: int
    optimizer: int
    inputs: int
    outputs: int
    activations: int
    temporaries: int
    code: int
    host: int
    total: int
    limit: int | None


def argument_sizes(strategy: Strategy, state: PyTree, inputs: Sequence[PyTree]) -> tuple[list[Buffer], dict[str, int]]:
    """Returns the arguments of a step as buffers of one device, and the bytes of each kind.

    The kinds are `"parameters"`, `"optimizer"`, `"inputs"` and `"host"`.
    """
    description = strategy.describe(state)
    sizes = {"parameters": 0, "optimizer": 0, "inputs": 0, "host": description.host_bytes}
    buffers: list[Buffer] = []
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype), to_array_tree(state))
    for leaf, where in zip(state_leaves(shapes), description.leaves, strict=True):
        kind = "optimizer" if leaf.is_optimizer else "parameters"
        sizes[kind] += where.device_bytes
        buffers.append(Buffer(f"state: {where.path}", where.device_bytes, None, False))
    arguments = to_array_tree(tuple(inputs))
    shardings = strategy._backend.input_shardings(arguments)
    for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(arguments), shardings, strict=True):
        value = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        size = math.prod(sharding.shard_shape(value.shape)) * value.dtype.itemsize
        sizes["inputs"] += size
        buffers.append(Buffer(f"input{jax.tree_util.keystr(path)}", size, None, False))
    return buffers, sizes


def compiled_memory(
    compiled: jax.stages.Compiled, sizes: dict[str, int], peak: Iterable[Buffer], limit: int | None
) -> MemoryPlan:
    """Returns the memory of a compiled step. `sizes` are the bytes of its arguments, `peak` its temporary buffers."""
    stats: Any = compiled.memory_analysis()
    arguments, temporary = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    outputs = max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes)
    code = stats.generated_code_size_in_bytes
    activations = min(temporary, sum(buffer.bytes for buffer in peak if buffer.is_activation))
    # The layout of the arguments on the device may pad them.
    padding = max(0, arguments - sizes["parameters"] - sizes["optimizer"] - sizes["inputs"])
    return MemoryPlan(
        sizes["parameters"],
        sizes["optimizer"],
        sizes["inputs"],
        outputs,
        activations,
        temporary - activations + padding,
        code,
        sizes["host"],
        arguments + outputs + temporary + code,
        limit,
    )


def refused_memory(error: BaseException, sizes: dict[str, int]) -> MemoryPlan | None:
    """Returns the memory of a step that the compiler refused because it does not fit; None if it has another reason."""
    total_and_limit = _total_and_limit(error)
    if total_and_limit is None:
        return None
    total, limit = total_and_limit
    arguments = sizes["parameters"] + sizes["optimizer"] + sizes["inputs"]
    return MemoryPlan(
        sizes["parameters"],
        sizes["optimizer"],
        sizes["inputs"],
        outputs=0,
        activations=0,
        temporaries=max(0, total - arguments),
        code=0,
        host=sizes["host"],
        total=max(total, arguments),
        limit=limit,
    )


def _total_and_limit(error: BaseException) -> tuple[int, int] | None:
    """Returns the bytes that a program needs and the bytes that a TPU has, from the message of its compiler."""
    match = _TOTAL_AND_LIMIT.search(str(error)) or _USED_OF_LIMIT.search(str(error))
    return match and (int(float(match[1]) * _UNITS[match[2]]), int(float(match[3]) * _UNITS[match[4]]))


# "the total memory required for HLO temporaries (20.00G) exceeds available HBM (15.75G)", and of older versions of libtpu
# "Used 17.50G of 15.75G hbm".
_TOTAL_AND_LIMIT = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available \w+ \(([\d.]+)([KMGT]?)\)")
_USED_OF_LIMIT = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?)")


def memory_limit(device: Any) -> int | None:
    """Returns the bytes that a device has for a program; None if they are unknown.

    A TPU compiler reports its limit only where it refuses a program, so this compiles one that is too large.
    """
    if device.platform == "tpu" and is_topology_device(device):
        return _tpu_limit(device)
    if is_topology_device(device):
        config = topology_of(device).gpu_target_config
        with open(str(config), encoding="utf-8") as file:
            size = re.search(r"device_memory_size:\s*(\d+)", file.read())
        return int(int(size[1]) * _gpu_fraction()) if size else None
    with contextlib.suppress(Exception):  # not all platforms report it
        if limit := (device.memory_stats() or {}).get("bytes_limit"):
            return int(limit)
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count("cpu")
    hardware = hardware_of(device)
    return int(hardware.memory) if hardware else None


def _gpu_fraction() -> float:
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _DEFAULT_GPU_FRACTION))


@functools.cache
def _tpu_limit(device: Any) -> int | None:
    shape = jax.ShapeDtypeStruct((2**40,), jnp.uint8, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(shape).compile()
    except jax.errors.JaxRuntimeError as error:
        total_and_limit = _total_and_limit(error)
        return total_and_limit and total_and_limit[1]
    return None
