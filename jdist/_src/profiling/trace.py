"""The events of a trace of `jax.profiler`: operations on the devices, and what the host did.

The forms of the planes, as XLA writes them:

* CPU: one plane for the host. Operations are events of its threads with the statistics `hlo_op` and `device_ordinal`.
* TPU: one plane per device. Its line "XLA Ops" has the operations, one after the other; "Async XLA Ops" has asynchronous
  operations, from start to end. Events are named by their HLO, and have no statistics.
* GPU: one plane per device with one line per stream. Events are kernels, with the statistic `hlo_op`.
"""

import collections
import pathlib
import re
from typing import Any, NamedTuple

import jax

from jdist._src.core import trace_annotations
from jdist._src.profiling.hlo_metadata import NO_FACTS, HloModule, OperationFacts, facts_of_text, read_modules
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
        planes = list(jax.profiler.ProfileData.from_serialized_xspace(data).planes)
        reader = _Reader(read_modules(data))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"The trace {file} is damaged ({error}). Remove it, and profile again; the other files of the run may be intact."
        ) from error
    for plane in planes:
        if device := re.fullmatch(r"/device:(?!CUSTOM)(\w+):(\d+)", plane.name):
            reader.read_device(plane, f"{device[1].lower()}:{device[2]}")
        elif plane.name == "/host:CPU":
            reader.read_host(plane)
    trace = reader.trace()
    if trace is None:
        raise ValueError(f"The trace {file} has no events: it is empty, or was not written completely. Profile again.")
    return trace


class _Reader:
    """Collects the events of the planes of a trace.

    Mutable: it holds the events.

    Args:
        modules: The HLO modules of the programs.
    """

    def __init__(self, modules: dict[str, HloModule]):
        self._modules = modules
        self._operations: dict[str, dict[OperationKey, list[Interval]]] = {}
        self._keys: dict[tuple[str, str, str], OperationKey | None] = {}
        self._hosts: dict[str, list[Interval]] = {name: [] for name in ("compilation", "input", "dispatch")}
        self._block: tuple[Interval, int, int] | None = None
        self._examples: collections.Counter[int] = collections.Counter()
        self._first, self._last = None, 0

    def read_device(self, plane: Any, device: str) -> None:
        """Adds the operations of an accelerator."""
        for line in plane.lines:
            if line.name in ("XLA Ops", "Async XLA Ops"):
                is_async = line.name.startswith("Async")
                for event in line.events:
                    name, opcode = facts_of_text(event.name)
                    # Asynchronous copies compute nothing.
                    self._add(device, event, "", name, opcode, collectives_only=is_async)
            elif line.name.startswith("Stream"):
                for event in line.events:
                    stats = _stats(event)
                    name = stats.get("hlo_op") or event.name
                    if "hlo_op" in stats or not event.name.lower().startswith(("memcpy", "memset")):
                        self._add(device, event, _program(stats), name, _kernel_opcode(event.name))

    def read_host(self, plane: Any) -> None:
        """Adds the events of the host, and the operations of CPU devices."""
        for line in plane.lines:
            for event in line.events:
                name = event.name
                if name.startswith(_SKIPPED):
                    continue
                if name in _COMPILATION:
                    self._hosts["compilation"].append(self._interval(event))
                elif name.startswith("PjitFunction("):
                    self._hosts["dispatch"].append(self._interval(event))
                elif name == trace_annotations.INPUT:
                    self._hosts["input"].append(self._interval(event))
                elif name == trace_annotations.COMPILE:
                    end = int(event.start_ns)
                    self._hosts["compilation"].append((end - int(1e9 * float(_stats(event)["seconds"])), end))
                elif name == trace_annotations.BLOCK:
                    stats = _stats(event)
                    self._block = self._interval(event), int(stats["process"]), int(stats["num_processes"])
                elif name == trace_annotations.BATCH:
                    for item in str(_stats(event)["examples"]).split():
                        replica, examples = item.split(":")
                        self._examples[int(replica)] += int(examples)
                else:
                    stats = _stats(event)
                    if "hlo_op" in stats:
                        self._add(f"cpu:{stats.get('device_ordinal', 0)}", event, _program(stats), stats["hlo_op"], "")

    def trace(self) -> Trace | None:
        """Returns the events; None if there are none."""
        if self._block is None:
            if self._first is None:
                return None
            self._block = (self._first, self._last), 0, 1
        return Trace(*self._block, self._operations, **self._hosts, examples=dict(self._examples))

    def _interval(self, event: Any) -> Interval:
        start = int(event.start_ns)
        end = start + int(event.duration_ns)
        self._first = start if self._first is None else min(self._first, start)
        self._last = max(self._last, end)
        return start, end

    def _add(
        self, device: str, event: Any, program: str, name: str, opcode: str, collectives_only: bool = False
    ) -> None:
        interval = self._interval(event)
        identity = program, name, opcode
        if identity not in self._keys:
            self._keys[identity] = self._key(*identity)
        key = self._keys[identity]
        if key is not None and (key.is_collective or not collectives_only):
            self._operations.setdefault(device, {}).setdefault(key, []).append(interval)

    def _key(self, program: str, name: str, opcode: str) -> OperationKey | None:
        """Returns the key of an operation; None for a loop, a branch or a call, whose operations have their own events."""
        facts = NO_FACTS
        # The events of a TPU do not name their program.
        for module in [program, re.sub(r"\(\d+\)$", "", program)] if program else self._modules:
            if module in self._modules and (found := self._modules[module].facts(name)):
                facts = found
                program = module
                break
        opcode = facts.opcode or opcode
        if opcode in ("while", "conditional", "call") or (not opcode and _CONTAINER.fullmatch(name)):
            return None
        is_direct = bool(_COLLECTIVE.match(opcode))
        may_contain = opcode in ("", "fusion", "custom-call") or opcode.startswith("async-")
        is_collective = is_direct or (may_contain and bool(_COLLECTIVE_NAME.search(name)))
        return OperationKey(re.sub(r"\(\d+\)$", "", program), name, facts, is_collective)


_SKIPPED = "ThreadpoolListener::", "end: ", "ThunkExecutor::"  # the most frequent events of a CPU
_COMPILATION = (
    "lower_sharding_computation",
    "backend_compile_and_load",
    "backend_compile",
)  # also in traces without `COMPILE`
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


def _kernel_opcode(kernel: str) -> str:
    return "nccl" if kernel.lower().startswith("nccl") else ""
