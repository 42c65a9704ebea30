"""The buffers of a compiled program that exist at the moment when most memory is used.

The compiler reports totals only. The text of its program contains the instructions in the order in which they run, so the
lifetime of each buffer is known: from its instruction to the last one that reads it.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from jdist._src.devices.hlo_text import HloModule, Instruction, device_sizes

# The result of these is a part or a view of the operands, so they allocate no buffer.
_WITHOUT_BUFFER = (
    "get-tuple-element",
    "tuple",
    "bitcast",
    "optimization-barrier",
    "while",
    "after-all",
    "domain",
    "parameter",
)


class Buffer(NamedTuple):
    """A buffer of a program on one device.

    Attributes:
        name: The path of names under which JAX traced it, without the function: `"jvp()/dot_general"`.
        bytes: Its size.
        line: The line of user code that traced it; None if it is unknown.
        is_activation: Whether it is a value of a forward pass, which the backward pass reads.
    """

    name: str
    bytes: int
    line: str | None
    is_activation: bool


def peak_buffers(module: HloModule) -> list[Buffer]:
    """Returns the temporary buffers that exist when they need most memory, the largest first.

    Arguments and results are not among them.
    """
    peak = _peak(module, module.entry, {})
    buffers = [_described(module, instruction, size) for instruction, size in peak]
    return sorted(buffers, key=lambda buffer: -buffer.bytes)


_Sized: TypeAlias = tuple[Instruction, int]
_Id: TypeAlias = tuple[str, int]  # an instruction, and the number of an array in its result


def _peak(module: HloModule, name: str, peaks: dict[str, list[_Sized]]) -> list[_Sized]:
    """Returns the buffers of a computation and of the computations that it runs, at its peak."""
    if name in peaks:
        return peaks[name]
    instructions = list(module.computations[name].values())
    owners = _owners(module, instructions)
    root = owners.get(module.roots.get(name, ""), [])
    last_use = {
        owner: i for i, each in enumerate(instructions) for used in each.operands for owner in _all(owners, used)
    }
    last_use.update((owner, len(instructions)) for element in root for owner in element)
    results = frozenset().union(*root) if name == module.entry else frozenset()
    origins = _origins(module, instructions, owners)
    live: dict[_Id, _Sized] = {}
    peak: list[_Sized] = []
    for position, instruction in enumerate(instructions):
        for index, size in enumerate(_own_bytes(instruction)):
            owner = (instruction.name, index)
            if size and owner in _all(owners, instruction.name) and owner not in results:
                live[owner] = origins.get(owner, instruction), size
        peak = max(peak, [*live.values(), *_inner_peak(module, instruction, peaks)], key=_total)
        for owner in [owner for owner in live if last_use.get(owner, -1) <= position]:
            del live[owner]
    peaks[name] = peak
    return peak


def _total(buffers: Sequence[_Sized]) -> int:
    return sum(size for _, size in buffers)


def _inner_peak(module: HloModule, instruction: Instruction, peaks: dict[str, list[_Sized]]) -> list[_Sized]:
    """Returns the largest peak of the computations that an instruction runs one operation at a time."""
    if instruction.opcode not in ("while", "call", "conditional", "async-start"):
        return []
    return max((_peak(module, called, peaks) for called in instruction.called), key=_total, default=[])


def _owners(module: HloModule, instructions: Sequence[Instruction]) -> dict[str, list[frozenset[_Id]]]:
    """Returns for each array of each value the results that allocated its buffer. Arguments own nothing."""
    owners: dict[str, list[frozenset[_Id]]] = {}
    for instruction in instructions:
        operands = [owners.get(operand, []) for operand in instruction.operands]
        name, opcode = instruction.name, instruction.opcode
        if opcode == "get-tuple-element":
            index = int(re.search(r"index=(\d+)", instruction.attributes)[1])  # pyright: ignore[reportOptionalSubscript]
            owners[name] = operands[0][index : index + 1]
        elif opcode == "tuple" or (opcode == "all-reduce" and all(map(any, operands))):  # an all-reduce is in place
            owners[name] = [frozenset().union(*elements) for elements in operands]
        elif opcode in _WITHOUT_BUFFER or opcode.endswith(("-done", "-update")):
            owners[name] = operands[0] if operands else []
        else:
            updated = _updated_operands(module, instruction)
            owners[name] = [
                frozenset([(name, i)]) if number is None else frozenset().union(*operands[number])
                for i, number in zip(range(len(_own_bytes(instruction))), updated, strict=False)
            ]
    return owners


def _all(owners: dict[str, list[frozenset[_Id]]], name: str) -> frozenset[_Id]:
    return frozenset().union(*owners.get(name, []))


def _origins(
    module: HloModule, instructions: Sequence[Instruction], owners: dict[str, list[frozenset[_Id]]]
) -> dict[_Id, Instruction]:
    """Returns the instructions that fill the buffers which loops fill, such as the activations of a scan over layers."""
    origins: dict[_Id, Instruction] = {}
    for loop in (each for each in instructions if each.opcode == "while"):
        name = re.search(r"\bbody=%?([\w.-]+)", loop.attributes)[1]  # pyright: ignore[reportOptionalSubscript]
        body = module.computations[name]
        for elements, result in zip(owners[loop.name], body[module.roots[name]].operands, strict=False):
            source = body[result]
            if source.opcode == "get-tuple-element":
                source = body[source.operands[0]]
            if any(updated is not None for updated in _updated_operands(module, source)):
                origins.update((owner, source) for owner in elements)
    return origins


def _updated_operands(module: HloModule, instruction: Instruction) -> list[int | None]:
    """Returns for each array of a result the number of the operand that it updates in place; None if it is a new array."""
    count = len(device_sizes(instruction.shape))
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return [0] * count
    if instruction.opcode != "fusion" or not instruction.called:
        return [None] * count
    body = module.computations.get(instruction.called[0], {})
    root = body.get(module.roots.get(instruction.called[0], ""))
    results = [] if root is None else root.operands if root.opcode == "tuple" else [root.name]
    return [_updated_parameter(body, result) for result in results] if len(results) == count else [None] * count


def _updated_parameter(body: dict[str, Instruction], name: str) -> int | None:
    """Returns the number of the parameter of a fusion that a value of it updates in place."""
    updates = False
    while name in body and (body[name].is_view or body[name].opcode == "dynamic-update-slice"):
        updates = updates or body[name].opcode == "dynamic-update-slice"
        name = body[name].operands[0]
    return int(body[name].operands[0]) if updates and name in body and body[name].opcode == "parameter" else None


def _own_bytes(instruction: Instruction) -> list[int]:
    """Returns the bytes of each array of a result in the memory of the device."""
    if instruction.opcode in ("constant", "iota", "partition-id", "replica-id", "send", "recv"):
        return []
    sizes = device_sizes(instruction.shape)
    # The result of a `-start` is a tuple of the operands and the results.
    return sizes[-1:] if instruction.opcode.endswith("-start") else sizes


def _described(module: HloModule, instruction: Instruction, size: int) -> Buffer:
    name = instruction.op_name
    frame = module.frame(instruction)
    is_activation = "jvp(" in name and "transpose(" not in name
    return Buffer(_short(name) or instruction.name, size, str(frame) if frame else None, is_activation)


def _short(op_name: str) -> str:
    """Returns an operation's path without the parts that jdist and JAX add around the user's function."""
    parts = [part for part in op_name.split("/") if part not in ("shard_map", "jit(one_replica)", "closed_call")]
    return "/".join(parts[1:] or parts)
