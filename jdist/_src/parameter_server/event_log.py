"""The log of a run: the order in which workers started and their updates were applied; and its replay."""

import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np

REPLAY_VARIABLE = "JDIST_REPLAY"
VERDICT_VARIABLE = "JDIST_REPLAY_VERDICT"  # the file into which a replay writes its verdict
UPDATES_PER_DIGEST = 10
THREADS_VARIABLE = "NPROC"  # the size of XLA's thread pools, on which the division of some sums depends
_FORMAT = 2


def digest(leaves: Iterable[Any]) -> str:
    """Returns a hash of the bytes, shapes and dtypes of arrays."""
    state = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        array = np.asarray(leaf)
        state.update(f"{array.dtype}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).view(np.uint8).data)
    return state.hexdigest()


class WorkerEvent(NamedTuple):
    """An event of a recorded run.

    Attributes:
        kind: `"start"` or `"apply"`.
        call: The number of the call, from 0.
        worker: The worker that started it.
        step: The name of the step.
    """

    kind: Literal["start", "apply"]
    call: int
    worker: int = -1
    step: str = ""


def _as_event(event: Mapping[str, Any]) -> WorkerEvent:
    if "apply" in event:
        return WorkerEvent("apply", event["apply"])
    return WorkerEvent("start", event["start"], event["worker"], event["step"])


class EventLog:
    """Writes the events of a run to a file, one JSON object per line, the program first.

    Mutable: it holds the open file.

    Args:
        path: The file; it is replaced.
        num_workers: The number of workers.
        num_threads: The value of `NPROC` in the processes of the workers, or None if it is not set.
    """

    def __init__(self, path: pathlib.Path, num_workers: int, num_threads: str | None = None):
        self._file: TextIO = path.open("w", buffering=1)
        program = {
            "format": _FORMAT,
            "workers": num_workers,
            "threads": num_threads,
            "arguments": sys.orig_argv[1:],
            "folder": os.getcwd(),
        }
        self.write(**program)

    def write(self, **event: Any) -> None:
        """Writes an event.

        Args:
            **event: One of
                `start=call, worker=..., version=..., step=...`: a worker starts a call, having read a version of the state;
                `apply=call`: its results are applied;
                `lost=call`: its worker was lost, and it starts again;
                `digest=text, updates=number`: the digest of the state after a number of updates;
                `end=number`: the program has ended after this number of updates. Without it, the run was killed.
        """
        self._file.write(json.dumps(event) + "\n")


class ReplayVerdict(NamedTuple):
    """The comparison of a replay with the recorded run.

    Attributes:
        updates: The number of updates that the replay applied.
        recorded: The number of updates in the log.
        compared: The number of digests that were compared.
        equal: The number of updates after which the state was equal last.
        differs: The number of updates after which the state was first seen to differ; None if it never was.
        is_complete: Whether the log has its last event.
    """

    updates: int
    recorded: int
    compared: int
    equal: int
    differs: int | None
    is_complete: bool

    def __str__(self) -> str:
        if self.differs is not None:
            return f"differs from update {self.differs}: the state was equal after update {self.equal}."
        compared = f"equal: {self.updates} updates, {self.compared} digests of the state"
        if self.updates < self.recorded:
            return f"{compared}; but the program ended after {self.updates} of {self.recorded} updates."
        if not self.is_complete:
            return f"{compared}; but the log has no end: the recorded run was killed, or the file was cut."
        return compared + "."

    @property
    def is_equal(self) -> bool:
        """Whether the replay is the recorded run."""
        return self.differs is None and self.updates == self.recorded and self.is_complete


class Replay:
    """The events of a log, in order.

    Mutable: it holds the number of the next event, and compares digests.

    Args:
        path: The log.
        num_workers: The number of workers now.

    Raises:
        ValueError: The file is not a log, or it was written with another number of workers.
    """

    def __init__(self, path: pathlib.Path, num_workers: int):
        program, events = read_log(path)
        self._events = [_as_event(event) for event in events if "start" in event or "apply" in event]
        self._digests = {event["updates"]: event["digest"] for event in events if "digest" in event}
        self._is_complete = any("end" in event for event in events)
        self._path, self._next = path, 0
        self._compared = self._equal = 0
        self._differs: int | None = None
        if program["workers"] != num_workers:
            raise ValueError(
                f"{str(path)!r} was recorded with {program['workers']} workers, and this strategy has {num_workers}. Replay "
                "the program that was recorded."
            )

    def compare(self, num_updates: int, read_leaves: Callable[[], Iterable[Any]]) -> None:
        """Compares the state after `num_updates` updates with the digest in the log, if there is one."""
        if num_updates not in self._digests or self._differs is not None:
            return
        self._compared += 1
        if digest(read_leaves()) == self._digests[num_updates]:
            self._equal = num_updates
        else:
            self._differs = num_updates

    def write_verdict(self) -> None:
        """Writes the verdict for `jdist replay`."""
        count = lambda events: sum(event.kind == "apply" for event in events)
        verdict = ReplayVerdict(
            count(self._events[: self._next]),
            count(self._events),
            self._compared,
            self._equal,
            self._differs,
            self._is_complete,
        )
        if VERDICT_VARIABLE in os.environ:
            pathlib.Path(os.environ[VERDICT_VARIABLE]).write_text(json.dumps(verdict))

    @property
    def next_event(self) -> WorkerEvent | None:
        """The next event; None at the end of the log."""
        return self._events[self._next] if self._next < len(self._events) else None

    def advance(self) -> None:
        """Continues with the event after the next one."""
        self._next += 1

    def check_start(self, call: int, step: str) -> None:
        """Checks that the recorded run started a call of a step at the next event, or later.

        Raises:
            RuntimeError: It did not.
        """
        later = self._events[self._next :]
        if any(event.kind == "start" and (event.call, event.step) == (call, step) for event in later):
            return
        event = next((event for event in later if event.kind == "start"), None)
        recorded = "the end of the run" if event is None else f"`{event.step}`, call {event.call + 1}"
        raise RuntimeError(
            f"The program differs from the run that {str(self._path)!r} recorded: event {self._next + 1} is {recorded}, and "
            f"the program calls `{step}`, call {call + 1}. Replay with the same program, data and seeds."
        )


def read_log(path: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the program of a log, and its events. A last line that is not complete is omitted.

    Raises:
        ValueError: The file is not a log.
    """
    program, events = _parsed(path)
    effective: list[dict[str, Any]] = []
    for event in events:
        if "lost" in event:  # the worker had no effect
            index = max(i for i, other in enumerate(effective) if other.get("start") == event["lost"])
            del effective[index]
        else:
            effective.append(event)
    return program, effective


def _parsed(path: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = path.read_text().splitlines()
    try:
        program, *events = [json.loads(line) for line in lines[:-1]] + _last_event(lines)
        number = program["format"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{str(path)!r} is not a log of `ParameterServerStrategy(record=...)`.") from None
    if number != _FORMAT:
        raise ValueError(
            f"{str(path)!r} is a log of format {number}, written by another version of jdist, which reads format {_FORMAT}. "
            "Record the run again."
        )
    return program, events


def _last_event(lines: list[str]) -> list[Any]:
    try:
        return [json.loads(lines[-1])] if lines else []
    except json.JSONDecodeError:
        return []


def is_replay(record: pathlib.Path | None) -> bool:
    """Returns whether the variable `JDIST_REPLAY` requests the replay of the file `record`."""
    replayed = os.environ.get(REPLAY_VARIABLE)
    return record is not None and replayed is not None and pathlib.Path(replayed).absolute() == record.absolute()


def open_log(
    record: pathlib.Path | None, num_workers: int, num_threads: str | None = None
) -> tuple[EventLog | None, Replay | None]:
    """Returns the log to write, or the replay of it, if the variable `JDIST_REPLAY` names the same file."""
    if record is None:
        return None, None
    if is_replay(record):
        return None, Replay(record, num_workers)
    return EventLog(record, num_workers, num_threads), None
