"""Collectives of a compiled program and the bytes that they send, read from its optimized HLO.

The optimized HLO is the program that XLA runs, after it has combined, split and converted collectives. Bytes are counted for
ring algorithms, which XLA's backends use for large arrays.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

from jdist._src.core.tree import describe_type


class Collective(NamedTuple):
    """A collective operation of a compiled program, at one call site.

    Attributes:
        kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"` or `"collective-permute"`.
        bytes_sent: Bytes that one device sends per execution.
        group_size: The number of participating devices; for a permutation, all devices.
        executions: Executions per run of the program, more than 1 in a loop; None if the trip count of the loop is unknown.
        conditional: Whether the operation is in a branch of a conditional, and may not be executed.
    """

    kind: str
    bytes_sent: float
    group_size: int
    executions: int | None
    conditional: bool


class _Instruction(NamedTuple):
    opcode: str
    shape: str
    operands: list[str]
    attributes: str


# Bytes that one of `n` devices sends in a ring algorithm, per byte of its operand.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
KINDS = tuple(_SENT)
_UNSUPPORTED = ("collective-broadcast", "ragged-all-to-all", "send", "recv")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)


def collectives(program: str | jax.stages.Compiled) -> list[Collective]:
    """Returns the collectives of a compiled program, one entry per call site.

    Args:
        program: A compiled program, such as `strategy.compile(...)` or `jitted.lower(...).compile()`, or its HLO text
            (`compiled.as_text()`).

    Raises:
        TypeError: `program` is not compiled, such as a step or a function of `jax.jit`.
        ValueError: The text is not a compiled HLO module, or contains a collective that is not supported.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> step = lambda state, x: (state - jdist.all_reduce("mean", x), None)
        >>> shapes = np.zeros(8, np.float32), jdist.PerReplica(np.zeros((2, 8), np.float32))
        >>> [(each.kind, each.bytes_sent) for each in jdist.hlo.collectives(strategy.compile(step, *shapes))]
        [('all-reduce', 32.0)]
    """
    if not isinstance(program, str | jax.stages.Compiled):
        raise TypeError(
            f"`collectives` reads a compiled program, got {describe_type(program)}. Compile a step for its arguments, "
            "`strategy.compile(step, state, *inputs)`, or a function of `jax.jit`, `fn.lower(*args).compile()`."
        )
    hlo_text = program if isinstance(program, str) else program.as_text() or ""
    computations, entry = _parse(hlo_text)
    devices = math.prod(
        int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", hlo_text.split("\n", 1)[0])
    )

    def walk(name: str, count: int | None, conditional: bool) -> Iterator[Collective]:
        instructions = computations[name]
        for instruction in instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in _SENT:
                size = _group_size(instruction.attributes, devices)
                operand_bytes = sum(_num_bytes(instructions[operand].shape) for operand in instruction.operands)
                yield Collective(kind, operand_bytes * _SENT[kind](size) if size > 1 else 0.0, size, count, conditional)
            elif kind in _UNSUPPORTED:
                raise ValueError(f"The bytes that `{instruction.opcode}` sends cannot be counted.")
            elif not instruction.opcode.endswith(("-update", "-done")):  # these repeat the computation of their start
                trips = _trip_count(instruction)
                inner_count = None if count is None or trips is None else count * trips
                for called in _called_computations(instruction.attributes):
                    yield from walk(called, inner_count, conditional or instruction.opcode == "conditional")

    return list(walk(entry, 1, False))


def _parse(hlo_text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Returns the instructions of each computation by name, and the name of the entry computation."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry = instructions = None
    for line in hlo_text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line)
        if header := _COMPUTATION.match(line):
            instructions = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif instructions is not None and (match := _INSTRUCTION.match(line)):
            name, shape, opcode, rest = match.groups()
            operands, _, attributes = re.sub(r"\)(?:, |$)", "\n", rest, count=1).partition("\n")
            instructions[name] = _Instruction(opcode, shape, re.findall(r"%([\w.-]+)", operands), attributes)
    if entry is None:
        raise ValueError(
            "`program` is not the text of a compiled program: it does not have an ENTRY computation. Pass `compiled.as_text()`."
        )
    return computations, entry


def _called_computations(attributes: str) -> list[str]:
    unquoted = re.sub(r'"[^"]*"', "", attributes)
    return [name for names in _CALLED.findall(unquoted) for name in re.findall(r"[\w.-]+", names)]


def _trip_count(instruction: _Instruction) -> int | None:
    """Returns how often an instruction runs the computations that it calls; None for a loop of unknown length."""
    if instruction.opcode != "while":
        return 1
    count = re.search(r"known_trip_count\W+n\W+(\d+)", instruction.attributes)
    return int(count[1]) if count else None


def _group_size(attributes: str, devices: int) -> int:
    """Returns the number of devices per group, in each notation that XLA prints."""
    if pairs := re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes):
        moves = any(source != target for source, target in re.findall(r"(\d+),(\d+)\}", pairs[1]))
        return devices if moves else 1
    if groups := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return max((len(group.split(",")) for group in re.findall(r"\{([\d,]*)\}", groups[1])), default=devices)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'(.+?)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(.+?)'(?::\(\d+\)(\d+))?", mesh[2])  # a part of an axis is printed with its size
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    raise ValueError(f"Cannot read the participating devices of a collective from {attributes!r}.")


def _num_bytes(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple."""
    return sum(
        math.ceil(_bits(dtype) * math.prod(int(n.strip("<=")) for n in dims.split(",") if n) / 8)
        for dtype, dims in _SHAPE.findall(shape)
    )


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # pred
