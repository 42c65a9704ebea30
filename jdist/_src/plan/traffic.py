"""Bytes that a compiled program moves between a device and its memory, according to its instructions.

XLA's cost analysis counts the body of a loop once. Here each instruction reads its operands and writes its results, as often as
it runs. Values inside a fusion stay on the chip. A fusion that slices an operand reads the slice.
"""

from jdist._src.devices.hlo_text import HloModule, Instruction, device_sizes

# Operations that move no bytes, or whose operations are counted one by one.
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


def memory_traffic(module: HloModule) -> float:
    """Returns the bytes that one device reads and writes in one run of a program. A loop of unknown length counts once."""
    total = 0.0
    enters = lambda instruction: instruction.opcode in ("while", "call", "conditional")
    for instruction, computation, count, _ in module.executions(enters):
        allocates = instruction.opcode == "custom-call" and not instruction.operands
        if allocates or instruction.opcode in _FREE or instruction.opcode.endswith(("-done", "-update")):
            continue
        total += (1 if count is None else count) * _bytes_moved(module, instruction, module.computations[computation])
    return total


def _bytes_moved(module: HloModule, instruction: Instruction, siblings: dict[str, Instruction]) -> int:
    operands = [_bytes(siblings[name].shape) for name in instruction.operands if name in siblings]
    if instruction.opcode in _SLICES:
        return 2 * _bytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if instruction.opcode == "fusion" and instruction.called:
        body = instruction.called[0]
        return _written(module, body) + sum(_read(module, body, i, size) for i, size in enumerate(operands))
    return _bytes(instruction.shape) + sum(operands)


def _written(module: HloModule, computation: str) -> int:
    """Returns the bytes that a fusion writes: of a result that it updates in place, the update."""
    body = module.computations[computation]

    def written(name: str) -> int:
        instruction = body[name]
        if instruction.is_view:
            return written(instruction.operands[0])
        match instruction.opcode:
            case "tuple":
                return sum(map(written, instruction.operands))
            case "dynamic-update-slice":
                return _bytes(body[instruction.operands[1]].shape)
            case "fusion":
                return _written(module, instruction.called[0])
        return _bytes(instruction.shape)

    return written(module.roots[computation])


def _read(module: HloModule, computation: str, number: int, size: int) -> int:
    """Returns the bytes that a fusion reads of its operand `number`, which has `size` bytes, or of slices of it."""
    body = module.computations[computation]

    def read(name: str) -> int:
        total = 0
        for user in (each for each in body.values() if name in each.operands and each.opcode != "parameter"):
            if user.opcode in _SLICES:
                total += _bytes(user.shape)
            elif user.is_view:
                total += read(user.name)
            elif user.opcode == "fusion":
                called = user.called[0]
                total += sum(_read(module, called, i, size) for i, each in enumerate(user.operands) if each == name)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                total += size
        return total

    parameters = (each.name for each in body.values() if each.opcode == "parameter" and each.operands == [str(number)])
    return min(size, sum(map(read, parameters)))


def _bytes(shape: str) -> int:
    return sum(device_sizes(shape))
