"""Opcodes and source lines of the operations in a trace, from the HLO modules that the profiler stores in it.

`jax.profiler.ProfileData` does not return the metadata of a plane, so they are read from the bytes of the trace. Fields have
the numbers of `xplane.proto` and `hlo.proto` of OpenXLA, which are listed at the end of this module.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jdist._src.core.source_lines import Frame, user_frame


class OperationFacts(NamedTuple):
    """Facts about an HLO instruction.

    Attributes:
        opcode: The opcode, `"fusion"` or `"all-reduce"`.
        path: The path of the operation in the JAX program, `"jit(step)/dot_general"`.
        source: The line of user code that traced it, or None.
    """

    opcode: str = ""
    path: str = ""
    source: str | None = None


NO_FACTS = OperationFacts()


def read_modules(trace: bytes) -> "dict[str, HloModuleProto]":
    """Returns the HLO modules in a trace by their names with the numbers of their programs: `"jit_step(7)"`.

    Raises:
        ValueError: The bytes are not a trace.
    """
    return {
        name: HloModuleProto(_message(hlo, 1))
        for plane in _messages(memoryview(trace), 1)
        if _text(plane, 2) == "/host:metadata"
        for name, stats in _event_stats(plane)
        if isinstance(hlo := stats.get("Hlo Proto"), memoryview)
    }


def read_program_numbers(trace: bytes) -> dict[str, int]:
    """Returns the number of the program of each operation of accelerators that name it in their metadata, by its HLO."""
    return {
        name: number
        for plane in _messages(memoryview(trace), 1)
        if _text(plane, 2).startswith("/device:")
        for name, stats in _event_stats(plane)
        if isinstance(number := stats.get("program_id"), int)
    }


def _event_stats(plane: memoryview) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each kind of event of a plane, and the statistics of the kind that are numbers or bytes."""
    names = {_number(entry, 1): _text(_message(entry, 2), 2) for entry in _messages(plane, 5)}
    for entry in _messages(plane, 4):
        event = _message(entry, 2)
        fields = [dict(_fields(stat)) for stat in _messages(event, 5)]
        yield (
            _text(event, 2),
            {names.get(each.get(1, 0), ""): next(map(each.get, each.keys() & {3, 4, 6}), None) for each in fields},
        )


class HloModuleProto:
    """The instructions of an HLO module; reads only those that a trace contains: a module may have 100,000.

    Args:
        module: A serialized `HloModuleProto`.
    """

    def __init__(self, module: memoryview):
        self._frames = _Frames(_message(module, 17))
        computations = list(_messages(module, 3))
        self._instructions = {_text(each, 1): each for body in computations for each in _messages(body, 2)}
        self._computations = {_number(body, 5): body for body in computations}
        self._facts: dict[str, OperationFacts] = {}

    def count_instructions(self, names: Iterable[str]) -> int:
        """Returns how many of `names` are instructions of the module."""
        return sum(name in self._instructions for name in names)

    def facts(self, name: str) -> OperationFacts:
        """Returns the facts about an instruction; they are empty if there is none of this name."""
        if name not in self._facts and (instruction := self._instructions.get(name)):
            path, frame = self._origin(instruction)
            if frame is None:  # a fusion without metadata has the line of an instruction inside it
                called = filter(None, map(self._computations.get, _numbers(instruction, 38)))
                origins = (self._origin(each) for body in called for each in _messages(body, 2))
                path, frame = next((origin for origin in origins if origin[1] is not None), (path, None))
            source = None if frame is None else str(frame)
            self._facts[name] = OperationFacts(_text(instruction, 2), path, source)
        return self._facts.get(name, NO_FACTS)

    def _origin(self, instruction: memoryview) -> tuple[str, Frame | None]:
        """Returns the path of an instruction in the JAX program, and its line."""
        metadata = _message(instruction, 7)
        frame = self._frames.user_frame(_number(metadata, 15))
        if frame is None and (file := _text(metadata, 3)):
            frame = Frame(file, _number(metadata, 4), "")
        return _text(metadata, 2), frame


def name_and_opcode(text: str) -> tuple[str, str]:
    """Returns the name and the opcode of an operation whose event is named by its HLO: `"%fusion.1 = f32[8] fusion(...)"`."""
    name, _, rest = text.removeprefix("%").partition(" = ")
    opcode = re.search(r"\s([a-z][a-z0-9-]*)\(", rest)
    return name, opcode[1] if opcode else ""


class _Frames:
    """The call stacks of a module: a tree of frames, each a line of a file."""

    def __init__(self, index: memoryview):
        self._files, self._functions = ([bytes(name).decode() for name in _messages(index, n)] for n in (1, 2))
        self._lines, self._frames = list(_messages(index, 3)), list(_messages(index, 4))
        self._user_frames: dict[int, Frame | None] = {}

    def user_frame(self, number: int) -> Frame | None:
        """Returns the innermost frame of user code of the stack with this number, from 1."""
        if number not in self._user_frames:
            self._user_frames[number] = user_frame(list(self._stack(number)))
        return self._user_frames[number]

    def _stack(self, number: int) -> Iterator[Frame]:
        while 0 < number <= len(self._frames):
            frame = self._frames[number - 1]
            place = self._lines[_number(frame, 1) - 1]
            yield Frame(self._files[_number(place, 1) - 1], _number(place, 3), self._functions[_number(place, 2) - 1])
            number = _number(frame, 2)


# Protocol buffers: https://protobuf.dev/programming-guides/encoding. The fields that are read, by their numbers:
#
# XSpace               planes 1
# XPlane               name 2, event_metadata 4, stat_metadata 5 (both are maps: an entry has key 1 and value 2)
# XEventMetadata       name 2, stats 5
# XStatMetadata        name 2
# XStat                metadata_id 1, uint64_value 3, int64_value 4, bytes_value 6
# HloProto             hlo_module 1
# HloModuleProto       computations 3, stack_frame_index 17
# HloComputationProto  instructions 2, id 5
# HloInstructionProto  name 1, opcode 2, metadata 7, called_computation_ids 38
# OpMetadata           op_name 2, source_file 3, source_line 4, stack_frame_id 15
# StackFrameIndexProto file_names 1, function_names 2, file_locations 3, stack_frames 4
# FileLocation         file_name_id 1, function_name_id 2, line 3
# StackFrame           file_location_id 1, parent_frame_id 2


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each field of a message: an int, or bytes."""
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        size = _FIXED_SIZES.get(kind, -1)
        if kind == 2:
            size, position = _varint(data, position)
        if not 0 <= size <= end - position:
            raise ValueError(f"a field of {size:,} bytes at byte {position:,} of {end:,}")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Returns the number at `position`, and the position after it."""
    value = 0
    for shift, byte in enumerate(data[position : position + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, position + shift + 1
    raise ValueError(f"no number at byte {position:,} of {len(data):,}")


_EMPTY = memoryview(b"")
_FIXED_SIZES = {1: 8, 5: 4}  # bytes, by the kind of the field


def _messages(data: memoryview, field: int) -> Iterator[memoryview]:
    return (value for number, value in _fields(data) if number == field and not isinstance(value, int))


def _message(data: memoryview, field: int) -> memoryview:
    return next(_messages(data, field), _EMPTY)


def _text(data: memoryview, field: int) -> str:
    return bytes(_message(data, field)).decode(errors="replace")


def _number(data: memoryview, field: int) -> int:
    return next((value for number, value in _fields(data) if number == field and isinstance(value, int)), 0)


def _numbers(data: memoryview, field: int) -> list[int]:
    """Returns a repeated number, each as a field or all packed in one."""
    values: list[int] = []
    for number, value in _fields(data):
        if number != field:
            continue
        if isinstance(value, int):
            values.append(value)
            continue
        position = 0
        while position < len(value):
            item, position = _varint(value, position)
            values.append(item)
    return values
