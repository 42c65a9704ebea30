"""Parses the text of an optimized HLO module: its computations, their instructions in order, and the lines that traced them.

XLA does not have a public interface to the instructions of a compiled program. The text is the same for CPU, GPU and TPU.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jdist._src.core.source_lines import Frame, user_frame


class Instruction(NamedTuple):
    """An instruction of an HLO computation.

    Attributes:
        name: Its name, unique in the module.
        opcode: Such as `"fusion"`.
        shape: The text of its shape, with layouts; a tuple in parentheses.
        operands: The names of its operands; of a parameter its number, of a constant its value.
        attributes: The text after the operands.
    """

    name: str
    opcode: str
    shape: str
    operands: list[str]
    attributes: str

    @property
    def op_name(self) -> str:
        """The path of names under which JAX traced it: `"jit(train)/jvp()/dot_general"`; empty if unknown."""
        match = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs."""
        unquoted = re.sub(r'"[^"]*"', "", self.attributes)
        return [name for names in _CALLED.findall(unquoted) for name in re.findall(r"[\w.-]+", names)]

    @property
    def is_view(self) -> bool:
        """Whether its result is its operand, in another shape or layout."""
        return self.opcode == "bitcast" or (self.opcode == "fusion" and "output_to_operand_aliasing" in self.attributes)


class Execution(NamedTuple):
    """An instruction, and how often one run of the program executes it.

    Attributes:
        instruction: The instruction.
        computation: The name of its computation.
        executions: The number of executions; None in a loop of unknown length.
        conditional: Whether it is in a branch of a conditional.
    """

    instruction: Instruction
    computation: str
    executions: int | None
    conditional: bool


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_OTHER_MEMORY = re.compile(r"S\([1-9]\d*\)")  # in a layout
_TABLE_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')


class HloModule:
    """An optimized HLO module.

    Args:
        text: `compiled.as_text()`.

    Attributes:
        header: Its first line.
        computations: The instructions of each computation by name, in the order in which they run.
        roots: The name of the last value of each computation.
        entry: The name of the entry computation.
        num_devices: The number of devices that run it.

    Raises:
        ValueError: The text is not a compiled program.
    """

    def __init__(self, text: str):
        self.header = text.split("\n", 1)[0]
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.num_devices = math.prod(
            int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", self.header)
        )
        self._tables: dict[str, dict[int, str]] = {}
        self._frames: dict[int, Frame | None] = {}
        self._trip_counts: dict[str, int | None] = {}
        entry = name = None
        table: dict[int, str] = {}
        for line in text.splitlines():
            if line in _TABLES:
                table = self._tables[line] = {}
            elif row := _TABLE_ROW.match(line):
                table[int(row[1])] = row[2] if row[3] is None else row[3]
            elif header := _COMPUTATION.match(line := re.sub(r"/\*.*?\*/", "", line)):
                name = header[2]
                self.computations[name] = {}
                entry = name if header[1] else entry
            elif name and (match := _INSTRUCTION.match(line)):
                is_root, result, shape, opcode, rest = match.groups()
                operands, _, attributes = re.sub(r"\)(?:, |$)", "\n", rest, count=1).partition("\n")
                names = [operands] if opcode in ("parameter", "constant") else re.findall(r"%([\w.-]+)", operands)
                self.computations[name][result] = Instruction(result, opcode, shape, names, attributes)
                if is_root:
                    self.roots[name] = result
        if entry is None:
            raise ValueError(
                "`program` is not the text of a compiled program: it does not have an ENTRY computation. Pass "
                "`compiled.as_text()`."
            )
        self.entry = entry

    def executions(self, enters: Callable[[Instruction], bool] = lambda _: True) -> Iterator[Execution]:
        """Yields the instructions that a run of the program executes, once per call site of their computation.

        Args:
            enters: Whether to yield the instructions of the computations that an instruction calls.
        """
        return self._executions(self.entry, 1, False, enters)

    def _executions(
        self, name: str, count: int | None, conditional: bool, enters: Callable[[Instruction], bool]
    ) -> Iterator[Execution]:
        for instruction in self.computations[name].values():
            yield Execution(instruction, name, count, conditional)
            # `-update` and `-done` repeat the computation of their start.
            if not instruction.opcode.endswith(("-update", "-done")) and enters(instruction):
                trips = self.trip_count(instruction, name)
                inner = None if count is None or trips is None else count * trips
                for called in instruction.called:
                    yield from self._executions(
                        called, inner, conditional or instruction.opcode == "conditional", enters
                    )

    def trip_count(self, instruction: Instruction, computation: str) -> int | None:
        """Returns how often an instruction runs the computations that it calls; None for a loop of unknown length."""
        if instruction.opcode != "while":
            return 1
        if count := re.search(r"known_trip_count\W+n\W+(\d+)", instruction.attributes):
            return int(count[1])
        if instruction.name not in self._trip_counts:
            self._trip_counts[instruction.name] = self._counted_trips(instruction, computation)
        return self._trip_counts[instruction.name]

    def _counted_trips(self, loop: Instruction, computation: str) -> int | None:
        """Returns the length of a loop that counts up to a constant, for which the TPU compiler does not print it."""
        condition, body = (
            re.search(rf"\b{key}=%?([\w.-]+)", loop.attributes)[1]  # pyright: ignore[reportOptionalSubscript]
            for key in ("condition", "body")
        )
        test = self.computations[condition][self.roots[condition]]
        root = self.computations[body][self.roots[body]]
        start = self.computations[computation].get(loop.operands[0])
        if test.opcode != "compare" or root.opcode != "tuple" or start is None or start.opcode != "tuple":
            return None
        counter, end = (self._linear(condition, name) for name in test.operands)
        if counter is None or counter[0] is None or end is None or end[0] is not None or "=LT" not in test.attributes:
            return None
        first = self._linear(computation, start.operands[counter[0]])
        step = self._linear(body, root.operands[counter[0]])
        if first is None or first[0] is not None or step is None or step[0] != counter[0] or step[1] <= 0:
            return None
        return max(0, math.ceil((end[1] - counter[1] - first[1]) / step[1]))

    def _linear(self, computation: str, name: str) -> tuple[int | None, int] | None:
        """Returns an integer as `(i, n)`, if it is element `i` of the argument plus `n`; as `(None, n)` if it is `n`."""
        instruction = self.computations[computation].get(name)
        if instruction is None:
            return None
        match instruction.opcode, instruction.operands:
            case "constant", [value] if re.fullmatch(r"-?\d+", value):
                return None, int(value)
            case "get-tuple-element", [source] if self._is_parameter(computation, source):
                index = re.search(r"\bindex=(\d+)", instruction.attributes)
                return (int(index[1]), 0) if index else None
            case "copy" | "copy-start" | "copy-done" | "bitcast" | "convert", [source]:
                return self._linear(computation, source)
            case "add", [left, right]:
                terms = self._linear(computation, left), self._linear(computation, right)
                if terms[0] is None or terms[1] is None or (terms[0][0] is not None and terms[1][0] is not None):
                    return None
                return terms[0][0] if terms[1][0] is None else terms[1][0], terms[0][1] + terms[1][1]
        return None

    def _is_parameter(self, computation: str, name: str) -> bool:
        instruction = self.computations[computation].get(name)
        return instruction is not None and instruction.opcode == "parameter"

    def frame(self, instruction: Instruction) -> Frame | None:
        """Returns the line of user code that traced an instruction; None if it is unknown."""
        if match := re.search(r"\bstack_frame_id=(\d+)", instruction.attributes):
            number = int(match[1])
            if number not in self._frames:
                self._frames[number] = user_frame(list(self._stack(number)))
            return self._frames[number]
        file = re.search(r'\bsource_file="(.*?)".*?\bsource_line=(\d+)', instruction.attributes)
        return user_frame([Frame(file[1], int(file[2]), "")]) if file else None

    def _stack(self, number: int) -> Iterator[Frame]:
        """Yields the frames of a stack, the innermost first."""
        names, files = self._tables.get("FunctionNames", {}), self._tables.get("FileNames", {})
        locations, frames = self._tables.get("FileLocations", {}), self._tables.get("StackFrames", {})
        while number in frames:
            frame = _numbers(frames[number])
            location = _numbers(locations[frame["file_location_id"]])
            function = names[location["function_name_id"]]
            yield Frame(files[location["file_name_id"]], location["line"], function)
            number = min(frame.get("parent_frame_id", 0), number) - 1  # XLA prints the number of the parent plus 1


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def _numbers(text: str) -> Mapping[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}


def num_bytes(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple."""
    return sum(size for size, _ in array_sizes(shape))


def device_sizes(shape: str) -> list[int]:
    """Returns the bytes of each array in a shape in the main memory of the device; 0 for one in on-chip or host memory."""
    return [0 if _OTHER_MEMORY.search(layout) else size for size, layout in array_sizes(shape)]


def array_sizes(shape: str) -> list[tuple[int, str]]:
    """Returns the bytes and the text of the layout of each array in a shape."""
    return [
        (math.ceil(_bits(dtype) * math.prod(int(n.strip("<=")) for n in dims.split(",") if n) / 8), layout)
        for dtype, dims, layout in _SHAPE.findall(shape)
    ]


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # pred
