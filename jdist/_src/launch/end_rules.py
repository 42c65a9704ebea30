"""When the processes of an attempt are ended: after the first failure, and after signals that the launcher receives."""

import math
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jdist._src.launch.output import Console, PrefixedLines, failure_text

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Failure(NamedTuple):
    """The first failure of an attempt.

    Attributes:
        process: The index of the process, or -1 if the reader of the launcher's output has ended.
        status: Its exit status, `-n` after signal `n`.
        text: Its traceback or the last lines of its output.
    """

    process: int
    status: int
    text: str


class AttemptResult(NamedTuple):
    """How the processes of an attempt ended.

    Attributes:
        statuses: The exit status of each process, `-n` after signal `n`.
        first_failure: The first failure; None if every process succeeded, or ended by a signal that the launcher forwarded.
        signal: The first signal that the launcher forwarded, or None.
    """

    statuses: tuple[int, ...]
    first_failure: Failure | None
    signal: int | None

    @property
    def exit_status(self) -> int:
        """The exit status of the launcher: the status of the first failure, 128 + n for signal n, otherwise 0."""
        if self.first_failure is not None:
            status = self.first_failure.status
            return status if status >= 0 else 128 - status
        return 128 + self.signal if self.signal is not None and any(self.statuses) else 0


class RunningProcess(Protocol):
    """A process of an attempt.

    Attributes:
        index: The index of the process.
        status: The exit status, or None while the process runs.
        stdout: The standard output.
        stderr: The standard error.
    """

    index: int
    status: int | None
    stdout: PrefixedLines
    stderr: PrefixedLines

    def drain(self) -> None:
        """Reads the output that the process has written so far."""
        ...

    def send_signal(self, number: int, *, to_group: bool = False) -> None:
        """Sends a signal to the process, or to its process group."""
        ...


class EndRules:
    """Ends the processes of an attempt after the first failure, and forwards signals.

    Mutable: it stores the first failure and the signals.

    Args:
        processes: The processes. The caller may add processes later.
        grace_seconds: The time between SIGTERM and SIGKILL after the first failure.
        console: Receives messages.
    """

    def __init__(self, processes: Sequence[RunningProcess], grace_seconds: float, console: Console):
        self._processes, self._grace_seconds, self._console = processes, grace_seconds, console
        self._signals: list[int] = []  # received
        self._num_forwarded = 0
        self._failure: Failure | None = None
        self._deadline = math.inf  # of the processes after a failure

    def receive_signal(self, number: int) -> None:
        """Stores a signal. A second SIGINT kills the processes here, also while this process waits to write its output."""
        self._signals.append(number)
        if self._is_killed_by_user():
            self._kill()

    def note_status(self, process: RunningProcess, status: int) -> None:
        """Records the first failure, and lets the other processes end. A signal that was forwarded is not a failure."""
        if status == 0 or self._failure is not None or -status in self._signals or self._is_killed_by_user():
            return
        process.drain()
        failure = Failure(process.index, status, failure_text(process.stderr.tail(), process.stdout.tail()))
        others = [other for other in self._running() if other is not process]
        if others:
            self._console.message(
                f"process {process.index} failed: {status_text(status)}. The other processes of this command "
                f"({len(others)}) receive SIGTERM, and SIGKILL after {self._grace_seconds:g} seconds."
            )
        self._fail(failure, others)

    def apply(self) -> None:
        """Forwards the signals that were received, and ends processes after a failure or a closed output."""
        while self._num_forwarded < len(self._signals):
            self._forward(self._signals[self._num_forwarded])
            self._num_forwarded += 1
        if self._console.is_closed and self._failure is None:  # as a program that SIGPIPE ends
            self._fail(Failure(-1, -signal.SIGPIPE, ""), self._running())
        if time.monotonic() > self._deadline:
            self._deadline = math.inf
            self._kill()

    def seconds_left(self) -> float:
        """Returns the seconds until `apply` has to be called, or infinity."""
        return max(0.0, self._deadline - time.monotonic())

    def all_ended(self) -> bool:
        """Whether all processes have ended."""
        return not self._running()

    def result(self) -> AttemptResult:
        """Returns how the processes ended."""
        statuses = tuple(process.status or 0 for process in self._processes)
        return AttemptResult(statuses, self._failure, self._signals[0] if self._signals else None)

    def _running(self) -> list[RunningProcess]:
        return [process for process in self._processes if process.status is None]

    def _fail(self, failure: Failure, others: Sequence[RunningProcess]) -> None:
        self._failure = failure
        if others:
            self._deadline = time.monotonic() + self._grace_seconds
        for process in others:
            process.send_signal(signal.SIGTERM)

    def _forward(self, number: int) -> None:
        if number == signal.SIGINT and number in self._signals[: self._num_forwarded]:
            self._console.message("received a second SIGINT, and killed the processes.")
            return
        running = self._running()
        for process in running:  # a terminal sends SIGINT to all processes of a group
            process.send_signal(number, to_group=number == signal.SIGINT)
        advice = " A second one kills them." if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        self._console.message(f"received {name}, and forwarded it to {len(running)} processes.{advice}")

    def _kill(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL, to_group=True)

    def _is_killed_by_user(self) -> bool:
        return self._signals.count(signal.SIGINT) > 1


def status_text(status: int) -> str:
    """Returns the text of an exit status.

    Example:
        >>> status_text(3), status_text(-9)
        ('exit status 3', 'ended by SIGKILL')
    """
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"ended by signal {-status}"


def report_failure(result: AttemptResult, num_processes: int, console: Console) -> None:
    """Writes the first failure of an attempt with its traceback, or with the last lines of its output."""
    failure = result.first_failure
    if failure is None or failure.process < 0:
        return
    reason = " The machine may be out of memory." if failure.status == -signal.SIGKILL else ""
    heading = f"process {failure.process} of {num_processes} failed first: {status_text(failure.status)}.{reason}"
    console.message(f"{heading} The end of its output:\n{failure.text}" if failure.text else heading)
