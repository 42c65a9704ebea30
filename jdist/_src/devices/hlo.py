"""Collectives of a compiled program and the bytes that they send, read from its optimized HLO.

The optimized HLO is the program that XLA runs, after it has combined, split and converted collectives. Bytes are counted for
ring algorithms, which XLA's backends use for large arrays.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jdist._src.core.tree import describe_type
from jdist._src.devices.hlo_text import HloModule, Instruction, num_bytes


class Collective(NamedTuple):
    """A collective operation of a compiled program, at one call site.

    Attributes:
        kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"`, or `"send"` from one
            TPU slice to another one.
        bytes_sent: Bytes that one device sends per execution.
        group_size: The number of participating devices; for a permutation, all devices.
        executions: Executions per run of the program, more than 1 in a loop; None if the trip count of the loop is unknown.
        conditional: Whether the operation is in a branch of a conditional, and may not be executed.
        axes: The mesh axes over which the devices communicate; None if no mesh was passed, or no set of axes has these groups.
        line: The line of user code that traced it, `"train.py:41"`; None if it is unknown.
        overlaps: Whether the schedule of the program contains computation between the start and the end of the operation.
    """

    kind: str
    bytes_sent: float
    group_size: int
    executions: int | None
    conditional: bool
    axes: tuple[str, ...] | None = None
    line: str | None = None
    overlaps: bool = False

    @property
    def bytes_per_run(self) -> float:
        """Bytes that one device sends per run of the program. A loop of unknown length counts once."""
        return self.bytes_sent * self.num_executions

    @property
    def num_executions(self) -> int:
        """Executions per run of the program. A loop of unknown length counts once."""
        return 1 if self.executions is None else self.executions


# Bytes that one of `n` devices sends in a ring algorithm, per byte of its operand.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "send": lambda n: 2 * (n - 1) / n,  # of multi-slice programs, an all-reduce over the slices
}
KINDS = tuple(_SENT)
_UNSUPPORTED = ("collective-broadcast", "ragged-all-to-all")
_MULTI_SLICE = "xla_megascale_runtime"
_COMPUTE_OPCODES = ("fusion", "dot", "convolution", "custom-call", "while", "call", "conditional", "scatter", "sort")


def collectives(program: str | jax.stages.Compiled, mesh: Mesh | None = None) -> list[Collective]:
    """Returns the collectives of a compiled program, one entry per call site.

    Args:
        program: A compiled program, such as `strategy.compile(...)` or `jitted.lower(...).compile()`, or its HLO text
            (`compiled.as_text()`).
        mesh: The mesh that it was compiled for, such as `strategy.mesh`, for the axes of the collectives.

    Raises:
        TypeError: `program` is not compiled, such as a step or a function of `jax.jit`.
        ValueError: The text is not a compiled HLO module, or contains a collective that is not supported.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> step = lambda state, x: (state - jdist.all_reduce("mean", x), None)
        >>> shapes = np.zeros(8, np.float32), jdist.PerReplica(np.zeros((2, 8), np.float32))
        >>> program = strategy.compile(step, *shapes)
        >>> [
        ...     (each.kind, each.bytes_sent, each.axes)
        ...     for each in jdist.hlo.collectives(program, strategy.mesh)
        ... ]
        [('all-reduce', 32.0, ('replica',))]
    """
    if not isinstance(program, str | jax.stages.Compiled):
        raise TypeError(
            f"`collectives` reads a compiled program, got {describe_type(program)}. Compile a step for its arguments, "
            "`strategy.compile(step, state, *inputs)`, or a function of `jax.jit`, `fn.lower(*args).compile()`."
        )
    return module_collectives(HloModule(program if isinstance(program, str) else program.as_text() or ""), mesh)


def module_collectives(module: HloModule, mesh: Mesh | None = None) -> list[Collective]:
    """Returns `collectives` of a parsed program."""
    return list(_collectives(module, mesh))


def _collectives(module: HloModule, mesh: Mesh | None) -> Iterator[Collective]:
    overlapping = _overlapping(module)
    chains: set[str] = set()
    for instruction, computation, count, conditional in module.executions():
        kind = instruction.opcode.removesuffix("-start")
        if kind in _UNSUPPORTED:
            raise ValueError(f"The bytes that `{instruction.opcode}` sends cannot be counted.")
        if kind not in _SENT or _is_host_transfer(instruction):
            continue
        if chain := _chain(instruction):
            if chain in chains:
                continue
            chains.add(chain)
        size, axes = _group(instruction, module.num_devices, mesh)
        operands = (module.computations[computation][operand] for operand in instruction.operands)
        operand_bytes = sum(num_bytes(operand.shape) for operand in operands)
        yield Collective(
            kind,
            operand_bytes * _SENT[kind](size) if size > 1 else 0.0,
            size,
            count,
            conditional,
            axes,
            str(frame) if (frame := module.frame(instruction)) else None,
            instruction.name in overlapping,
        )


def _is_host_transfer(instruction: Instruction) -> bool:
    """Whether a send goes to the program's host, as of a callback, and not to another slice."""
    return "is_host_transfer=true" in instruction.attributes and _MULTI_SLICE not in instruction.attributes


def _chain(instruction: Instruction) -> str | None:
    """Returns the channel of a collective that the TPU compiler has cut into parts, each in a fusion with computation.

    Each part has the operand of the complete collective.
    """
    channel = re.search(r"\bchannel_id=(\d+)", instruction.attributes)
    return channel[1] if channel and "async_collective_fusion_config" in instruction.attributes else None


def _overlapping(module: HloModule) -> set[str]:
    """Returns the names of the collectives that run beside computation, according to the schedule."""
    names: set[str] = set()
    for computation in module.computations.values():
        instructions = list(computation.values())
        position = {instruction.name: i for i, instruction in enumerate(instructions)}
        for end, instruction in enumerate(instructions):
            start = position.get(instruction.operands[0]) if instruction.operands else None
            if not instruction.opcode.endswith("-done") or start is None or _is_synchronous(instructions[start]):
                continue
            if any(between.opcode in _COMPUTE_OPCODES for between in instructions[start + 1 : end]):
                names |= {instructions[start].name, *_contents(module, instructions[start])}
    # A fusion of the TPU compiler that contains a collective and computation.
    for instruction, *_ in module.executions(lambda _: False):
        if instruction.opcode == "fusion" and "async_collective_fusion" in "".join(
            (instruction.name, *instruction.called)
        ):
            names |= _contents(module, instruction)
    return names


def _contents(module: HloModule, instruction: Instruction) -> set[str]:
    """Returns the names of the instructions in the computations that an instruction runs."""
    return {name for called in instruction.called for name in module.computations.get(called, ())}


def _is_synchronous(start: Instruction) -> bool:
    return '"is_sync":true' in start.attributes


def _group(instruction: Instruction, devices: int, mesh: Mesh | None) -> tuple[int, tuple[str, ...] | None]:
    """Returns the number of devices per group and the mesh axes of a collective, in each notation that XLA prints."""
    attributes = instruction.attributes
    if instruction.opcode == "send":
        return _slices(mesh)
    if pairs := re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes):
        moves = [pair for pair in re.findall(r"(\d+),(\d+)\}", pairs[1]) if pair[0] != pair[1]]
        return devices if moves else 1, _axes_of_moves([(int(a), int(b)) for a, b in moves], mesh)
    groups = _device_groups(attributes, devices)
    return groups.shape[1], _axes_of_groups(groups, mesh)


def _device_groups(attributes: str, devices: int) -> np.ndarray:
    """Returns the groups of devices `[group, device]`."""
    if named := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(.+?)'=(\d+)", named[1])}
        return _groups_along(sizes, re.findall(r"'(.+?)'(?::\((\d+)\)(\d+))?", named[2]))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape = [int(size) for size in iota[3].split(",")]
        ids = np.arange(np.prod(shape)).reshape(shape)
        ids = ids.transpose([int(axis) for axis in iota[4].split(",")]) if iota[4] else ids
        return ids.reshape(int(iota[1]), int(iota[2]))
    if groups := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        rows = [[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", groups[1])]
        largest = max(map(len, rows), default=0)  # groups of other sizes are left out
        return np.array([row for row in rows if len(row) == largest] or [range(devices)])
    raise ValueError(f"Cannot read the participating devices of a collective from {attributes!r}.")


def _groups_along(sizes: Mapping[str, int], axes: Sequence[tuple[str, str, str]]) -> np.ndarray:
    """Returns the groups of the devices of a mesh along axes, or along parts of axes: `(name, size before it, its size)`."""
    parts = {axis: (int(before), int(size)) for axis, before, size in axes if size}
    names = [axis for axis, *_ in axes]
    shape: list[int] = []
    grouped: list[int] = []
    for axis, size in sizes.items():
        before, part = parts.get(axis, (1, size if axis in names else 1))
        if axis in names:
            grouped.append(len(shape) + 1)
        shape += [before, part, size // (before * part)]
    ids = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    others = [i for i in range(len(shape)) if i not in grouped]
    return ids.transpose(others + grouped).reshape(-1, int(np.prod([shape[i] for i in grouped], dtype=int)))


def _axes_of_groups(groups: np.ndarray, mesh: Mesh | None) -> tuple[str, ...] | None:
    """Returns the axes along which the devices of each group differ, if the groups are all devices along these axes.

    In a program for several slices, the groups contain the devices of one slice.
    """
    if mesh is None or groups.max() >= mesh.size:
        return None
    positions = np.stack(np.unravel_index(groups, mesh.devices.shape), axis=-1)  # [group, device, axis]
    differ = (positions != positions[:, :1]).any(axis=(0, 1))
    axes = tuple(axis for axis, differs in zip(mesh.axis_names, differ, strict=True) if differs)
    if groups.size != mesh.size:
        return axes if groups.size * _slices(mesh)[0] == mesh.size else None
    return axes if groups.shape[1] == np.prod([mesh.shape[axis] for axis in axes], dtype=int) else None


def _axes_of_moves(moves: Sequence[tuple[int, int]], mesh: Mesh | None) -> tuple[str, ...] | None:
    if mesh is None or not moves or np.max(moves) >= mesh.size:
        return None if moves or mesh is None else ()
    sources, targets = (np.stack(np.unravel_index(ids, mesh.devices.shape)) for ids in np.array(moves).T)
    differ = (sources != targets).any(axis=1)
    return tuple(axis for axis, differs in zip(mesh.axis_names, differ, strict=True) if differs)


def _slices(mesh: Mesh | None) -> tuple[int, tuple[str, ...] | None]:
    """Returns the number of slices, and the axes along which the devices are in different slices."""
    if mesh is None:
        return 2, None
    slices = np.vectorize(lambda device: getattr(device, "slice_index", 0) or 0, otypes=[int])(mesh.devices)
    is_varying = [(slices != np.take(slices, [0], axis=i)).any() for i in range(slices.ndim)]
    axes = tuple(axis for axis, varies in zip(mesh.axis_names, is_varying, strict=True) if varies)
    return len(np.unique(slices)), axes
