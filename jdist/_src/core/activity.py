"""Records what this process does: calls of compiled programs, and waits of the host program for other processes.

The thread that reports hangs (`jdist._src.faults.watchdog`) reads the records. Each call of a program writes some fields of
`calls`, which takes about 0.15 microseconds; a thread that waits adds a `Wait` to its list.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_MOST_RECORDS = 1024
_RECORDS_PER_MARK = 16  # a power of two


class Launches:
    """The launches on this process of programs in which the same processes take part.

    Mutable: it counts them.

    Attributes:
        processes: The indices of the processes; None for all processes.
        name: The processes as text.
        count: The number of launches.
    """

    __slots__ = ("count", "name", "processes")

    def __init__(self, processes: tuple[int, ...] | None):
        self.processes, self.name = processes, "all" if processes is None else ",".join(map(str, processes))
        self.count = 0


_launches: list[Launches] = []


@functools.cache
def launches_of(processes: tuple[int, ...] | None) -> Launches:
    """Returns the launches of programs in which these processes take part; None for all processes."""
    _launches.append(Launches(processes))
    return _launches[-1]


def launch_counts() -> dict[str, int]:
    """Returns the number of launches by the processes that take part."""
    return {launches.name: launches.count for launches in list(_launches) if launches.count}


@dataclasses.dataclass(eq=False)
class Label:
    """The description of a program, or of a collective of the host program, in reports.

    Mutable: the collectives are known when the program is traced.

    Attributes:
        name: The name of the function, or of the method of a strategy.
        steps: The number of steps per call; 0 if it is not a step.
        collectives: The first collectives of the program with their source lines.
        checksum: Of the program; equal on all processes.
        launches: The launches of the programs in which the same processes take part.
        is_collective: Whether it is known to contain collectives.
    """

    name: str
    steps: int = 0
    collectives: Sequence[str] = ()
    checksum: int = 0
    launches: Launches = dataclasses.field(default_factory=lambda: launches_of(None))
    is_collective: bool = False


class CallLog:
    """Calls of compiled programs.

    Mutable: each call writes to it.

    Attributes:
        steps: The number of calls of steps that have returned.
        before_step: Functions that are called with the number of each call of a step, from 1, before it. For faults in tests.
        running: The program of the last of these calls; None if the call has returned.
        last: A list of the results of the last of these calls that returned, and its program.
        num_records: The number of records of calls that all processes make, and of the host values that they pass.
        digest: A hash of these records in order. It is equal on all processes that make the same calls.
        num_forgotten: The number of times that the records were deleted.
        is_difference_known: Whether an error has reported that the records differ between the processes.
    """

    __slots__ = (
        "_marks",
        "_newest_records",
        "before_step",
        "digest",
        "is_difference_known",
        "last",
        "num_forgotten",
        "num_records",
        "running",
        "steps",
    )

    def __init__(self) -> None:
        self.steps = self.num_records = self.digest = self.num_forgotten = 0
        # The newest records: the number, the digest after it, the name, and values as text.
        self._newest_records: collections.deque[tuple[int, int, str, str]] = collections.deque(maxlen=_MOST_RECORDS)
        self._marks: dict[int, tuple[int, int, int]] = {}
        self.is_difference_known = False
        self.before_step: list[Callable[[int], None]] = []
        self.running: Label | None = None
        self.last: list[Any] = [None, None]

    def record(self, name: str, checksum: int, values: str = "") -> None:
        """Adds a record. All processes add equal records in the same order, or replicated values may differ between them."""
        self.num_records = number = self.num_records + 1
        self.digest = digest = hash((self.digest, checksum))  # of integers: the same in every process
        self._newest_records.append((number, digest, name, values))
        if not number % _RECORDS_PER_MARK:
            self._marks[number & -number] = self.num_forgotten, number, digest

    def marks(self) -> list[list[int]]:
        """Returns some numbers of records with `num_forgotten` and 32 bits of the digests then, as JSON.

        There is one mark per power of two `p` from 16: the last number that `p` divides and `2 p` does not. So two processes
        have a common mark, unless the numbers of their records differ too much.
        """
        return [[num_forgotten, n, digest % 2**32] for num_forgotten, n, digest in list(self._marks.values())]

    def newest_records(self) -> list[list[Any]]:
        """Returns the newest records as JSON: the number, the digest after it, and a text."""
        records = list(self._newest_records)  # in C, while another thread may add a record
        return [[number, digest, f"{name} ({values})" if values else name] for number, digest, name, values in records]

    def forget_records(self) -> None:
        """Deletes the records. All processes do so after a comparison that has found and reported a difference."""
        self.num_records = self.digest = 0
        self.num_forgotten += 1
        self._newest_records.clear()
        self._marks.clear()
        self.note_difference()
        self.is_difference_known = False

    def note_difference(self) -> None:
        """Notes that an error reports different records, so the next call of a program does not raise another one."""
        self.is_difference_known = True
        for error in [error for error in pending if isinstance(error, Exception)]:
            with contextlib.suppress(ValueError):  # a call of a program has raised it
                pending.remove(error)

    @property
    def launches(self) -> int:
        """The number of calls of programs that run on devices of several processes."""
        return sum(launch_counts().values())


# Called with the names and values of the host values of each call of a program that has some, before the call.
host_value_observers: list[Callable[[Sequence[tuple[str, Any]]], None]] = []
# Exceptions that the next call of a program raises at its start: errors, or timers of interrupts that are deferred.
pending: list[Exception | threading.Timer] = []
calls = CallLog()


def newest_label() -> Label | None:
    """Returns the label of the last program that was launched on devices of several processes."""
    return calls.running or calls.last[1]


time_limit = 600.0  # seconds of a wait for other processes; the watchdog sets the limit of the strategies


def launch(label: Label, call: Callable[..., Any], *args: Any) -> Any:
    """Returns `call(*args)`, which launches a program on devices of several processes, and records the call."""
    label.launches.count += 1
    calls.running = label
    try:
        results = call(*args)
    except BaseException:
        label.launches.count -= 1
        raise
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
        round: The name of the exchange of messages, and the round, whose messages it waits for.
        processes: The processes of this exchange.
    """

    reason: str
    is_for_thread: bool = False
    round: str = ""
    processes: Sequence[int] = ()


_waits: dict[int, list[Wait]] = {}  # of each thread, the innermost last
_work: dict[int, str] = {}  # of each thread
_background_threads: set[int] = set()
_abandoned: frozenset[threading.Thread] = frozenset()  # never changed in place: the thread of the watchdog reads it


@contextlib.contextmanager
def waiting(reason: str, round: str = "", processes: Sequence[int] = ()) -> Iterator[None]:
    """Records that this thread waits for other processes while the block runs. See `Wait`."""
    with _recorded(Wait(reason, round=round, processes=processes)):
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
