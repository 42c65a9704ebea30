"""The events of a trace of `jax.profiler`: operations on the devices, and activities of the host.

The forms of the planes, as XLA writes them:

* CPU: one plane for the host. Operations are events of its threads with the statistics `hlo_op` and `device_ordinal`.
* TPU: one plane per device. Its line "XLA Ops" has the operations, one after the other; "Async XLA Ops" has asynchronous
  operations, from start to end. The name of an event is its HLO; the statistics are in the metadata of the plane.
* GPU: one plane per device with one line per stream. Events are kernels, with the statistic `hlo_op`.
"""

import collections
import itertools
import pathlib
import re
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jdist._src.core import profiler_annotations
from jdist._src.profiling.hlo_metadata import (
    NO_FACTS,
    HloModuleProto,
    OperationFacts,
    name_and_opcode,
    read_modules,
    read_program_numbers,
)
from jdist._src.profiling.intervals import Interval


class OperationKey(NamedTuple):
    """An operation of a program.

    Attributes:
        program: The name of the program, `"jit_step"`; empty if it is unknown.
        name: The name of the HLO instruction, or of a kernel without one.
        facts: Facts about the instruction.
        is_collective: Whether it is a collective.
    """

    program: str
    name: str
    facts: OperationFacts
    is_collective: bool


class Trace(NamedTuple):
    """The events of one process.

    Attributes:
        interval: The interval of the profile.
        process: The index of the process.
        num_processes: The number of processes.
        operations: For each device, as `"cpu:0"`, its operations with the intervals in which each ran.
        compilation: Intervals in which the host traced, lowered or compiled.
        input: Intervals in which the host waited for a batch.
        dispatch: Intervals of calls of compiled functions, with their compilation.
        examples: The number of true examples of each replica in the batches of this process.
    """

    interval: Interval
    process: int
    num_processes: int
    operations: dict[str, dict[OperationKey, list[Interval]]]
    compilation: list[Interval]
    input: list[Interval]
    dispatch: list[Interval]
    examples: dict[int, int]


def read_trace(file: pathlib.Path) -> Trace:
    """Returns the events in an `.xplane.pb` file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or has no events.
    """
    data = file.read_bytes()
    try:
        reader = _Reader(read_modules(data), read_program_numbers(data))
        with warnings.catch_warnings():
            # An iterator of JAX warns where Python creates its type; if the warning is an error, the process is aborted.
            warnings.simplefilter("ignore", DeprecationWarning)
            reader.read_planes(jax.profiler.ProfileData.from_serialized_xspace(data).planes)
        trace = reader.trace()
    except (RuntimeError, ValueError, LookupError) as error:
        raise ValueError(
            f"The trace {file} is damaged ({error}). Remove it, and profile again; the other files of the run may be intact."
        ) from error
    if trace is None:
        raise ValueError(f"The trace {file} has no events: it is empty, or was not written completely. Profile again.")
    return trace


class _RawOperation(NamedTuple):
    """An operation as the events name it, without the metadata of its program.

    Attributes:
        program: The name and the number of its program, `"jit_step(7)"`; each may be empty.
        name: The name of the HLO instruction, or of a kernel without one.
        opcode: The opcode, if the events have it.
        is_async: Whether its events are from the start to the end of an asynchronous operation.
    """

    program: str
    name: str
    opcode: str = ""
    is_async: bool = False


class _Reader:
    """Collects the events of the planes of a trace.

    Mutable: it holds the events.

    Args:
        modules: The HLO modules of the programs.
        program_numbers: The numbers of the programs of the operations of a TPU, by their HLO.
    """

    def __init__(self, modules: dict[str, HloModuleProto], program_numbers: dict[str, int]):
        self._modules, self._program_numbers = modules, program_numbers
        self._operations: dict[str, dict[_RawOperation, list[Interval]]] = {}
        self._host_intervals: dict[str, list[Interval]] = {name: [] for name in ("compilation", "input", "dispatch")}
        self._block: tuple[Interval, int, int] | None = None
        self._examples: collections.Counter[int] = collections.Counter()
        self._first, self._last = None, 0

    def read_planes(self, planes: Iterable[Any]) -> None:
        """Adds the events of the devices and of the host."""
        for plane in planes:
            if device := re.fullmatch(r"/device:(?!CUSTOM)(\w+):(\d+)", plane.name):
                self._read_device(plane, f"{device[1].lower()}:{device[2]}")
            elif plane.name == "/host:CPU":
                self._read_host(plane)

    def trace(self) -> Trace | None:
        """Returns the events; None if there are none."""
        if self._block is None:
            if self._first is None:
                return None
            self._block = (self._first, self._last), 0, 1
        names: dict[str, set[str]] = {}
        for raw in itertools.chain.from_iterable(self._operations.values()):
            names.setdefault(raw.program, set()).add(raw.name)
        modules = {program: self._module(program, names[program]) for program in names}
        operations: dict[str, dict[OperationKey, list[Interval]]] = {}
        for device, raw_operations in self._operations.items():
            for raw, intervals in raw_operations.items():
                if key := _key(raw, *modules[raw.program]):
                    operations.setdefault(device, {}).setdefault(key, []).extend(intervals)
        return Trace(*self._block, operations, **self._host_intervals, examples=dict(self._examples))

    def _read_device(self, plane: Any, device: str) -> None:
        """Adds the operations of an accelerator."""
        for line in plane.lines:
            if line.name in ("XLA Ops", "Async XLA Ops"):
                is_async = line.name.startswith("Async")
                for event in line.events:
                    number = self._program_numbers.get(event.name, "")
                    self._add(device, event, _RawOperation(f"({number})", *name_and_opcode(event.name), is_async))
            elif line.name.startswith("Stream"):
                for event in line.events:
                    stats, opcode = _stats(event), "nccl" * event.name.lower().startswith("nccl")
                    if "hlo_op" in stats or not event.name.lower().startswith(("memcpy", "memset")):
                        self._add(
                            device, event, _RawOperation(_program(stats), stats.get("hlo_op") or event.name, opcode)
                        )

    def _read_host(self, plane: Any) -> None:
        """Adds the events of the host, and the operations of CPU devices."""
        for line in plane.lines:
            for event in line.events:
                name = event.name
                if name.startswith(_SKIPPED):
                    continue
                if name in _COMPILATION:
                    self._host_intervals["compilation"].append(self._interval(event))
                elif name.startswith("PjitFunction("):
                    self._host_intervals["dispatch"].append(self._interval(event))
                elif name == profiler_annotations.INPUT:
                    self._host_intervals["input"].append(self._interval(event))
                elif name == profiler_annotations.COMPILE:
                    end = int(event.start_ns)
                    self._host_intervals["compilation"].append((end - int(1e9 * float(_stats(event)["seconds"])), end))
                elif name == profiler_annotations.BLOCK:
                    stats = _stats(event)
                    self._block = self._interval(event), int(stats["process"]), int(stats["num_processes"])
                elif name == profiler_annotations.BATCH:
                    for item in str(_stats(event)["examples"]).split():
                        replica, examples = item.split(":")
                        self._examples[int(replica)] += int(examples)
                else:
                    stats = _stats(event)
                    if "hlo_op" in stats:
                        device = f"cpu:{stats.get('device_ordinal', 0)}"
                        self._add(device, event, _RawOperation(_program(stats), stats["hlo_op"]))

    def _module(self, program: str, names: set[str]) -> tuple[str, HloModuleProto | None]:
        """Returns the name of a program, and the module that has most of the operations of these names.

        The number of a program is not sufficient: an executable from the persistent compilation cache has the number that it
        had in the process that compiled it.
        """
        name = program.rpartition("(")[0]
        candidates = [each for each in self._modules if not name or each.rpartition("(")[0] == name]
        rank = lambda each: (self._modules[each].count_instructions(names), each.endswith(program), each)
        best = max(candidates, key=rank, default=None)
        if best is None or not rank(best)[0]:
            return name, None
        return best.rpartition("(")[0], self._modules[best]

    def _interval(self, event: Any) -> Interval:
        start = int(event.start_ns)
        end = start + int(event.duration_ns)
        self._first = start if self._first is None else min(self._first, start)
        self._last = max(self._last, end)
        return start, end

    def _add(self, device: str, event: Any, operation: _RawOperation) -> None:
        self._operations.setdefault(device, {}).setdefault(operation, []).append(self._interval(event))


def _key(raw: _RawOperation, program: str, module: HloModuleProto | None) -> OperationKey | None:
    """Returns the key of an operation; None for one that is not counted.

    The operations in a loop, a branch or a call have events of their own. An asynchronous copy computes nothing.
    """
    facts = module.facts(raw.name) if module else NO_FACTS
    opcode = facts.opcode or raw.opcode
    is_container = opcode in ("while", "conditional", "call") or (not opcode and _CONTAINER.fullmatch(raw.name))
    if is_container or program == "jit_jdist_barrier":  # of `jdist.profile`
        return None
    may_contain = opcode in ("", "fusion", "custom-call") or opcode.startswith("async-")
    is_collective = bool(_COLLECTIVE.match(opcode) or (may_contain and _COLLECTIVE_NAME.search(raw.name)))
    return None if raw.is_async and not is_collective else OperationKey(program, raw.name, facts, is_collective)


_SKIPPED = "ThreadpoolListener::", "end: ", "ThunkExecutor::"  # the most frequent events of a CPU
# Also in traces without `COMPILE`.
_COMPILATION = "lower_sharding_computation", "backend_compile_and_load", "backend_compile"
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-|send|recv|nccl)", re.IGNORECASE
)
# The names of instructions are opcodes, or primitives of JAX.
_COLLECTIVE_NAME = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective|nccl)|"
    r"^(psum|pmax|pmin|ppermute|all_gather|reduce_scatter|all_to_all)\b"
)
_CONTAINER = re.compile(r"(while|cond|conditional|call)(\.(\d+|clone))*")


def _stats(event: Any) -> dict[str, Any]:
    return dict(event.stats)


def _program(stats: dict[str, Any]) -> str:
    return f"{stats.get('hlo_module', '')}({stats.get('program_id', '')})"
