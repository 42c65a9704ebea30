"""Observes this process from another thread: waits for other processes, work without a time limit, and source lines."""

import collections
import functools
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import jax

from jdist._src.core import activity
from jdist._src.core.activity import Label, Launches
from jdist._src.core.source_lines import caller_frame, caller_text, code_at

Stacks: TypeAlias = Mapping[int, FrameType]  # the innermost frame of each thread, by the identifier of the thread
_MOST_SAMPLES = 64
_LISTED_COLLECTIVES = 3
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
DEBUGGER = "is stopped in a debugger"
# The file and the beginning of the name of a function that is on the stack of a thread during work without a time limit.
_WORK = (
    (f"{_JAX}_src/compiler.py", "", "compiles a program"),
    (f"{_JAX}_src/interpreters/partial_eval.py", "", "traces a function"),
    (f"{_JAX}_src/interpreters/mlir.py", "lower_", "lowers a program"),
    ("/orbax/checkpoint/", "", "reads or writes a checkpoint"),
    ("/pdb.py", "interaction", DEBUGGER),
    ("/pydevd.py", "do_wait_suspend", DEBUGGER),
    ("/pydevd.py", "_do_wait_suspend", DEBUGGER),
)


class ProcessWait(NamedTuple):
    """A wait of this process for other processes.

    Attributes:
        key: The identity of the wait: equal in two observations if and only if it is the same wait.
        name: The name of the program, or the reason. Waits for calls of one program have the same name.
        text: The phrase in warnings and reports that describes the wait.
        steps: The number of steps that the call consists of, by which the time limit is multiplied.
        launches: The launches of programs in which the same processes take part, if it waits for a program.
        round: The round of messages that it waits for, if it waits for one.
        processes: The processes that take part; None for all.
        is_known: Whether it is known to wait for other processes: not if a program may have no collective.
    """

    key: Any
    name: str
    text: str
    steps: float = 1
    launches: Launches | None = None
    round: str = ""
    processes: Sequence[int] | None = None
    is_known: bool = False


class Observation(NamedTuple):
    """The activity of this process at one time.

    Attributes:
        text: A sentence without its subject, the process: the step, and the wait, the work or the line of the program.
        waits: The waits for other processes. Empty while the process works.
        work: Work that other processes may wait for without a time limit, or None.
    """

    text: str
    waits: Sequence[ProcessWait]
    work: str | None


class _Sample(NamedTuple):
    results: Any
    label: Label
    step: int


class Observer:
    """Observes this process.

    Mutable: it holds results of calls that have not finished, at most one call per observation.

    Attributes:
        end: A phrase that describes the end of the program; None while the program runs.
    """

    def __init__(self) -> None:
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=_MOST_SAMPLES)
        self._last_record: Any = None
        self._last_step = ""  # the name of the last step
        self.end: str | None = None

    def observe(self) -> Observation:
        """Returns the current activity of this process."""
        abandoned = activity.abandoned_threads()
        stacks = {ident: stack for ident, stack in sys._current_frames().items() if ident not in abandoned}
        work_of_threads = {ident: work for ident, stack in stacks.items() if (work := _work_in(stack))}
        work = activity.recorded_work() or _active_work(work_of_threads)
        sample = self._oldest_sample()
        # A program that is traced or compiled does not run yet, also if the comparison of programs waits for other processes.
        running = None if work_of_threads else activity.calls.running
        if self.end is not None:
            wait = ProcessWait("end", "end", f"{self.end}, and waits for the end of the other programs", math.inf)
            return Observation(f", {self._step_text()}, {wait.text}", [wait], None)
        waits = [] if work else list(_waits(stacks, running, sample))
        text = _text(stacks, work, waits)
        is_in_program = bool(waits) and (sample is not None or running is not None)
        return Observation(f" {text}" if is_in_program else f", {self._step_text()}, {text}", waits, work)

    def _oldest_sample(self) -> _Sample | None:
        """Returns the oldest call that has not finished, of those that an observation found to be the last call."""
        record = activity.calls.last
        results, label = record
        if label is not None and label.steps:
            self._last_step = label.name
        if label is not None and results is not None and record is not self._last_record:
            self._last_record = record
            self._samples.append(_Sample(results, label, activity.calls.steps))
        while self._samples and _are_ready(self._samples[0].results):
            self._samples.popleft()
        if not self._samples and record is self._last_record:
            record[0] = None  # releases the memory of the results
        return self._samples[0] if self._samples else None

    def _step_text(self) -> str:
        number = activity.calls.steps
        name = f" (`{self._last_step}`)" if self._last_step else ""
        return f"after step {number}{name}" if number else "before the first step"


def _waits(stacks: Stacks, running: Label | None, sample: _Sample | None) -> Iterator[ProcessWait]:
    line = _line_of_main(stacks)
    if sample is not None:  # the running call may wait for this one
        text = f"waits for the results of {_program_text(sample.label, sample.step)}{line}"
        yield _program_wait(("results", id(sample.results), sample.step), text, sample.label)
    elif running is not None:
        text = f"waits in {_program_text(running, activity.calls.steps + 1)}{line}"
        yield _program_wait(("call", activity.calls.launches), text, running)
    for ident, wait in activity.waits_for_processes().items():
        line = _line_of_main(stacks) if ident in activity.background_threads() else _line_of(stacks, ident)
        text = f"waits for other processes in {wait.reason}{line}"
        yield ProcessWait(wait, wait.reason, text, 1, None, wait.round, wait.processes, bool(wait.round))


def _program_wait(key: Any, text: str, label: Label) -> ProcessWait:
    processes = label.launches.processes
    return ProcessWait(key, label.name, text, label.steps, label.launches, "", processes, label.is_collective)


def _text(stacks: Stacks, work: str | None, waits: Sequence[ProcessWait]) -> str:
    if waits:
        return "; ".join(wait.text for wait in waits)
    line = _line_of_main(stacks)
    if work:
        return f"{work}{line}"
    wait = activity.wait_of(threading.main_thread().ident or 0)
    if wait is not None:
        return f"waits for {wait.reason}{line}{_lines_of_background_threads(stacks)}"
    return f"runs {line[2:-1]}" if line else "runs"


def _program_text(label: Label, step: int) -> str:
    name = f"step {step} (`{label.name}`)" if label.steps else f"`{label.name}`"
    listed = ", ".join(label.collectives[:_LISTED_COLLECTIVES])
    others = len(label.collectives) - _LISTED_COLLECTIVES
    return name + (f": {listed}" if listed else "") + (f" and {others} others" if others > 0 else "")


def _line_of(stacks: Stacks, ident: int | None) -> str:
    stack = stacks.get(ident or 0)
    return "" if stack is None else caller_text(stack)


def _line_of_main(stacks: Stacks) -> str:
    return _line_of(stacks, threading.main_thread().ident)


def _lines_of_background_threads(stacks: Stacks) -> str:
    frames = [caller_frame(stacks[ident]) for ident in activity.background_threads() if ident in stacks]
    lines = [code_at(frame) for frame in frames if frame]
    return f", while a thread runs {' and '.join(lines)}" if lines else ""


def _are_ready(results: Any) -> bool:
    """Whether the results of a call are computed. All are ready together, so it reads the first one that is not deleted."""
    for leaf in jax.tree.leaves(results):
        is_ready = getattr(leaf, "is_ready", None)  # neither random keys nor host values have it
        if is_ready is not None and not leaf.is_deleted():
            try:
                return is_ready()
            except RuntimeError:  # deleted by another thread
                continue
    return True


def _active_work(work_of_threads: Mapping[int, str]) -> str | None:
    """Returns work of some threads, unless one of these threads waits for other processes."""
    for work in dict.fromkeys(work_of_threads.values()):
        waits = [activity.wait_of(ident) for ident, other in work_of_threads.items() if other == work]
        if None in waits and all(wait is None or wait.is_for_thread for wait in waits):
            return work
    return None


def _work_in(stack: FrameType | None) -> str | None:
    while stack is not None:
        candidates = _work_of_file(stack.f_code.co_filename)
        for name, work in candidates:
            if stack.f_code.co_name.startswith(name):
                return work
        stack = stack.f_back
    return None


@functools.cache
def _work_of_file(file: str) -> tuple[tuple[str, str], ...]:
    path = os.path.abspath(file)
    return tuple((name, work) for part, name, work in _WORK if part in path)
