"""What a compiled program sends over the wire, counted in the text of the program.

    for one in collectives(jitted.lower(*args).compile().as_text()):
        print(one.kind, one.bytes_sent, one.conditional)

The text is what XLA runs, after it has joined, split and widened what was asked for. The bytes are those that one device
sends in a ring, which is how they are sent where they are many.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple


class Collective(NamedTuple):
    """One collective operation of a program, at one place where it is called.

    Attributes:
        kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"` or `"collective-permute"`.
        bytes_sent: What one device sends each time.
        group: How many devices take part; for a permutation, all of them.
        times: How often it runs each time that it is reached, being in loops; None where a loop does not say how long it is.
        conditional: Whether it is in the branch of a conditional, and may not be reached.
    """

    kind: str
    bytes_sent: float
    group: int
    times: int | None
    conditional: bool


class _Instruction(NamedTuple):
    opcode: str
    shape: str
    operands: list[str]  # names
    attributes: str


# What one of `n` devices sends in a ring, for each byte that it puts in.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
_NOT_COUNTED = ("collective-broadcast", "ragged-all-to-all", "send", "recv")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)


def collectives(hlo_text: str) -> list[Collective]:
    """Every collective that a program may run, once for each place that its computation is called from.

    Args:
        hlo_text: A compiled program, `jitted.lower(...).compile().as_text()`.

    Raises:
        ValueError: The text is no program, or there is a collective in it that is not understood.
    """
    computations, entry = _parsed(hlo_text)
    devices = math.prod(
        int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", hlo_text.split("\n", 1)[0])
    )

    def found(name: str, times: int | None, conditional: bool) -> Iterator[Collective]:
        instructions = computations[name]
        for one in instructions.values():
            kind = one.opcode.removesuffix("-start")
            if kind in _SENT:
                group = _group(one.attributes, devices)
                put_in = sum(_size(instructions[operand].shape) for operand in one.operands)
                yield Collective(kind, put_in * _SENT[kind](group) if group > 1 else 0.0, group, times, conditional)
            elif kind in _NOT_COUNTED:
                raise ValueError(f"What `{one.opcode}` sends is not counted here.")
            elif not one.opcode.endswith(("-update", "-done")):  # they name the computation that their start has called
                rounds = _rounds(one)
                inside = None if times is None or rounds is None else times * rounds
                for called in _called(one.attributes):
                    yield from found(called, inside, conditional or one.opcode == "conditional")

    return list(found(entry, 1, False))


def _parsed(hlo_text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """The instructions of each computation, by name, and the name of the computation where the program begins."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry = instructions = None
    for line in hlo_text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line)
        if begins := _COMPUTATION.match(line):
            instructions = computations[begins[2]] = {}
            entry = begins[2] if begins[1] else entry
        elif instructions is not None and (one := _INSTRUCTION.match(line)):
            name, shape, opcode, rest = one.groups()
            operands, _, attributes = re.sub(r"\)(?:, |$)", "\n", rest, count=1).partition("\n")
            instructions[name] = _Instruction(opcode, shape, re.findall(r"%([\w.-]+)", operands), attributes)
    if entry is None:
        raise ValueError('This is no text of a compiled program: no computation of it is marked as "ENTRY".')
    return computations, entry


def _called(attributes: str) -> list[str]:
    unquoted = re.sub(r'"[^"]*"', "", attributes)
    return [name for names in _CALLED.findall(unquoted) for name in re.findall(r"[\w.-]+", names)]


def _rounds(one: _Instruction) -> int | None:
    """How often an instruction runs what it calls; None for a loop that does not say."""
    if one.opcode != "while":
        return 1
    known = re.search(r"known_trip_count\W+n\W+(\d+)", one.attributes)
    return int(known[1]) if known else None


def _group(attributes: str, devices: int) -> int:
    """How many devices exchange their values, in each of the ways that XLA says it."""
    if pairs := re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes):
        moves = any(source != target for source, target in re.findall(r"(\d+),(\d+)\}", pairs[1]))
        return devices if moves else 1
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        groups = re.findall(r"\{([\d,]*)\}", listed[1])
        return max((len(group.split(",")) for group in groups), default=devices)
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(counted[1])
    if meshed := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'(.+?)'=(\d+)", meshed[1]))
        axes = re.findall(r"'(.+?)'(?::\(\d+\)(\d+))?", meshed[2])  # a part of an axis says how large it is
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    raise ValueError(f"Which devices take part cannot be read from this: {attributes}")


def _size(shape: str) -> int:
    """The bytes of an array, or of all arrays of a tuple."""
    return sum(
        math.ceil(_bits(dtype) * math.prod(int(n.strip("<=")) for n in dims.split(",") if n) / 8)
        for dtype, dims in _SHAPE.findall(shape)
    )


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # pred
