"""Bytes that a compiled program moves between a device and its memory, according to its instructions.

XLA's cost analysis counts the body of a loop once. Here each instruction reads its operands and writes its results, as often as
it runs. Values inside a fusion stay on the chip. A fusion that slices an operand reads the slice.
"""

import re

from jdist._src.devices.hlo_text import HloModule, Instruction, array_sizes

_FREE = (
    "after-all",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "domain",
    "get-tuple-element",
    "iota",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
)
_SLICES = ("dynamic-slice", "gather", "slice")
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")


def memory_traffic(module: HloModule) -> float:
    """Returns the bytes that one device reads and writes in one run of a program. A loop of unknown length counts once."""
    total = 0.0
    enters = lambda instruction: instruction.opcode in ("while", "call", "conditional")
    for instruction, computation, count, _ in module.executions(enters):
        if instruction.opcode in _FREE or instruction.opcode.endswith(("-done", "-update")):
            continue
        total += (1 if count is None else count) * _bytes_moved(module, instruction, module.computations[computation])
    return total


def _bytes_moved(module: HloModule, instruction: Instruction, siblings: dict[str, Instruction]) -> int:
    operands = [_bytes(siblings[name].shape) for name in instruction.operands if name in siblings]
    result = _bytes(instruction.shape)
    if instruction.opcode in _SLICES:
        return 2 * result
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if instruction.opcode == "fusion" and instruction.called:
        body = module.computations.get(instruction.called[0], {})
        root = body.get(module.roots.get(instruction.called[0], ""))
        read = [_bytes_read(body, i, size) for i, size in enumerate(operands)]
        if root is not None and root.opcode == "dynamic-update-slice":  # in place: the update is written
            update = _bytes(body[root.operands[1]].shape)
            return update + sum(size for size, operand in zip(read, operands, strict=True) if operand != result)
        return result + sum(read)
    return result + sum(operands)


def _bytes_read(body: dict[str, Instruction], number: int, size: int) -> int:
    """Returns the bytes that a fusion reads of its operand `number`, of `size` bytes."""
    parameter = next((i.name for i in body.values() if i.opcode == "parameter" and i.operands == [str(number)]), None)
    users = [i for i in body.values() if parameter in i.operands and i.opcode != "parameter"]
    if users and all(user.opcode in _SLICES for user in users):
        return min(size, sum(_bytes(user.shape) for user in users))
    return size


def _bytes(shape: str) -> int:
    return sum(size for size, layout in array_sizes(shape) if not _ON_CHIP.search(layout))
