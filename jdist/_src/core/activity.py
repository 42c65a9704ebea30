"""Records what this process does: calls of compiled programs, and waits of the host program for other processes.

The thread that reports hangs (`jdist._src.faults.watchdog`) reads the records. Each call of a program writes some fields of
`calls`, which takes about 0.15 microseconds; a thread that waits adds a `Wait` to its list.
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_MOST_RECORDS = 64


@dataclasses.dataclass(eq=False)
class Label:
    """The description of a program, or of a collective of the host program, in reports.

    Mutable: the collectives are known when the program is traced.

    Attributes:
        name: The name of the function, or of the method of a strategy.
        steps: The number of steps per call; 0 if it is not a step.
        collectives: The first collectives of the program with their source lines.
        checksum: Of the program; equal on all processes.
    """

    name: str
    steps: int = 0
    collectives: Sequence[str] = ()
    checksum: int = 0


class Calls:
    """Calls of compiled programs.

    Mutable: each call writes to it.

    Attributes:
        steps: The number of calls of steps that have returned.
        before_step: Called with the number of each call of a step, from 1, before the call. For faults in tests.
        launches: The number of calls of programs that run on devices of several processes.
        running: The program of the last of these calls; None if the call has returned.
        last: A list of the results of the last of these calls that returned, and its program.
        num_records: The number of records of calls that all processes make, and of the host values that they pass.
        digest: A hash of these records in order. It is equal on all processes that make the same calls.
        newest_records: The digest after each of the newest records, its name, and its values as text.
    """

    __slots__ = ("before_step", "digest", "last", "launches", "newest_records", "num_records", "running", "steps")

    def __init__(self) -> None:
        self.steps = self.launches = self.num_records = self.digest = 0
        self.newest_records: collections.deque[tuple[int, str, str]] = collections.deque(maxlen=_MOST_RECORDS)
        self.before_step: Callable[[int], None] | None = None
        self.running: Label | None = None
        self.last: list[Any] = [None, None]

    def record(self, name: str, checksum: int, values: str = "") -> None:
        """Adds a record. All processes add equal records in the same order, or replicated values may differ between them."""
        self.num_records += 1
        self.digest = hash((self.digest, checksum))  # of integers: the same in every process
        self.newest_records.append((self.digest, name, values))

    def forget_records(self) -> None:
        """Deletes the records. All processes do so when a comparison has found a difference, after which it is known."""
        self.num_records = self.digest = 0
        self.newest_records.clear()


calls = Calls()
time_limit = 600.0  # seconds of a wait for other processes; the watchdog sets the limit of the strategies


def launch(label: Label, call: Callable[..., Any], *args: Any) -> Any:
    """Returns `call(*args)`, which launches a program on devices of several processes, and records the call."""
    calls.launches += 1
    calls.running = label
    try:
        results = call(*args)
    finally:
        calls.running = None
    calls.last = [results, label]
    return results


@dataclasses.dataclass(frozen=True, eq=False)
class Wait:
    """A wait of a thread.

    Attributes:
        reason: The call that waits, for reports.
        is_for_thread: Whether the thread waits for another thread of this process, and not for other processes.
    """

    reason: str
    is_for_thread: bool = False


_waits: dict[int, list[Wait]] = {}  # of each thread, the innermost last
_work: dict[int, str] = {}  # of each thread
_background_threads: set[int] = set()
_abandoned: frozenset[threading.Thread] = frozenset()  # replaced as a whole: the thread of the watchdog reads it


@contextlib.contextmanager
def waiting(reason: str) -> Iterator[None]:
    """Records that this thread waits for other processes while the block runs."""
    with _recorded(Wait(reason)):
        yield


@contextlib.contextmanager
def waiting_for_thread(reason: str) -> Iterator[None]:
    """Records that this thread waits for a background thread of this process while the block runs."""
    with _recorded(Wait(reason, is_for_thread=True)):
        yield


@contextlib.contextmanager
def working(work: str) -> Iterator[None]:
    """Records work of this thread that other processes wait for without a time limit, such as the write of a file."""
    ident = threading.get_ident()
    _work[ident] = work
    try:
        yield
    finally:
        _work.pop(ident, None)


def recorded_work() -> str | None:
    """Returns the work of a thread that `working` records, or None."""
    return next(iter(list(_work.values())), None)


@contextlib.contextmanager
def background_thread() -> Iterator[None]:
    """Records that this thread works in advance while the block runs. Others wait for it in `waiting_for_thread` only."""
    ident = threading.get_ident()
    _background_threads.add(ident)
    try:
        yield
    finally:
        _background_threads.discard(ident)


def background_threads() -> frozenset[int]:
    """Returns the identifiers of the threads that work in advance."""
    return frozenset(_background_threads)


def abandon(threads: Iterable[threading.Thread]) -> None:
    """Records that the program does not wait for these threads any more, so reports of hangs ignore them."""
    global _abandoned
    _abandoned = frozenset(thread for thread in (*_abandoned, *threads) if thread.is_alive())


def abandoned_threads() -> frozenset[int | None]:
    """Returns the identifiers of the abandoned threads that run."""
    return frozenset(thread.ident for thread in _abandoned if thread.is_alive())


def waits_for_processes() -> dict[int, Wait]:
    """Returns the waits for other processes that delay the host program, by the identifier of the thread.

    A wait of a background thread delays the host program only if that waits for a thread.
    """
    innermost = {ident: waits[-1] for ident, waits in list(_waits.items()) if waits}
    waits_for_thread = any(wait.is_for_thread for wait in innermost.values())
    return {
        ident: wait
        for ident, wait in innermost.items()
        if not wait.is_for_thread and (ident not in _background_threads or waits_for_thread)
    }


def wait_of(ident: int) -> Wait | None:
    """Returns the innermost wait of a thread, or None."""
    waits = _waits.get(ident)
    return waits[-1] if waits else None


@contextlib.contextmanager
def _recorded(wait: Wait) -> Iterator[None]:
    ident = threading.get_ident()
    waits = _waits.setdefault(ident, [])
    waits.append(wait)
    try:
        yield
    finally:
        waits.pop()
        if not waits:
            _waits.pop(ident, None)
