"""Ends the processes of an attempt after the first failure, and after signals that the launcher receives."""

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jdist._src.core.exit_statuses import HUNG, PREEMPTED
from jdist._src.launch.notices import JOIN_STATES
from jdist._src.launch.output import Console, PrefixedLines, failure_text

_MEANINGS = {
    PREEMPTED: " (it saved a checkpoint after a signal)",
    HUNG: " (a step, a collective or a barrier took longer than its time limit)",
    -signal.SIGKILL: " (the machine may be out of memory)",
}

# Until processes that have joined one that ended by `os._exit(0)` are ended: they may do the same.
_ABRUPT_END_SECONDS = 10.0
_NOT_JOINED = "it ended with exit status 0 before it joined the others, which wait for it"


class EndTimes(NamedTuple):
    """The seconds that processes have to end.

    Attributes:
        grace_seconds: The time between SIGTERM and SIGKILL for the other processes after the first failure.
        save_seconds: The same time where the processes save a checkpoint: after an exit with status `PREEMPTED`, and before a
            restart with more processes.
        signal_seconds: The time between a SIGTERM or SIGHUP that the launcher forwards and SIGKILL. The processes may save a
            checkpoint in it.
        report_seconds: The same time after an exit with status `HUNG`, in which the others write where they wait.
        exit_seconds: The time of a process between the report of its error and SIGKILL. JAX waits at exit for processes that
            have failed.
    """

    grace_seconds: float = 5.0
    save_seconds: float = 30.0
    signal_seconds: float = 30.0
    report_seconds: float = 5.0
    exit_seconds: float = math.inf

    def seconds_after(self, status: int) -> float:
        """Returns the time between SIGTERM and SIGKILL for the other processes after an exit status."""
        if status == PREEMPTED:
            return self.save_seconds
        return max(self.grace_seconds, self.report_seconds) if status == HUNG else self.grace_seconds


class Failure(NamedTuple):
    """The first failure of an attempt.

    Attributes:
        process: The index of the process, or -1 if the reader of the launcher's output has ended.
        status: Its exit status, `-n` after signal `n`.
        text: Its traceback or the last lines of its output.
        reason: The reason of the launcher to end it, such as "no answer for 60 seconds"; empty if it ended by itself.
    """

    process: int
    status: int
    text: str
    reason: str = ""

    @property
    def exit_status(self) -> int:
        """The exit status of the launcher: the status of the process, or 128 + n after signal n."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def description(self) -> str:
        """The end of the process as text: "process 1 failed: exit status 3"."""
        verb = "ended" if self.status == PREEMPTED else "failed"
        meaning = "" if self.reason else _MEANINGS.get(self.status, "")
        return f"process {self.process} {verb}: {self.reason or status_text(self.status)}{meaning}"


class AttemptResult(NamedTuple):
    """The exit statuses of the processes of an attempt, and its first failure.

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
        """The exit status of the launcher: the status of the first failure, 128 + n for signal n, otherwise 0.

        After a signal, it is `PREEMPTED` if the processes have saved a checkpoint.

        Example:
            >>> [
            ...     AttemptResult(statuses, None, 15).exit_status
            ...     for statuses in ((0, -15), (42, 42), (0, 0))
            ... ]
            [143, 42, 0]
        """
        if self.first_failure is not None:
            return self.first_failure.exit_status
        if self.signal is None or not any(self.statuses):
            return 0
        return PREEMPTED if PREEMPTED in self.statuses else 128 + self.signal


@dataclasses.dataclass(eq=False)
class RunningProcess:
    """A process of an attempt. Mutable.

    Attributes:
        index: The index of the process.
        stdout: The standard output.
        stderr: The standard error.
        send_signal: Sends a signal to the process, or with True to its process group.
        status: The exit status, or None while the process runs.
        answer_time: The time of its last answer, or of its start.
    """

    index: int
    stdout: PrefixedLines
    stderr: PrefixedLines
    send_signal: Callable[[int, bool], None]
    status: int | None = None
    answer_time: float = dataclasses.field(default_factory=time.monotonic)


class EndRules:
    """Ends the processes of an attempt after the first failure, and forwards signals.

    Mutable: it stores the first failure, and how many signals it has forwarded.

    Args:
        processes: The processes. The caller may add processes later.
        times: The time that processes have to end.
        console: Receives messages.
        signals: The signals that this process has received, in order. The caller appends further signals, and calls
            `kill_if_requested` after each.
    """

    def __init__(
        self,
        processes: Sequence[RunningProcess],
        times: EndTimes,
        console: Console,
        signals: list[int],
    ):
        self._processes, self._times, self._console = processes, times, console
        self._signals = signals
        self._num_forwarded = 0
        self._failure: Failure | None = None
        self._is_ending = False  # for a reason that is not a failure of these processes
        self._deadline = math.inf  # of all processes
        self._join_states: dict[int, str] = {}  # of processes that jdist joins
        self._ended_at: dict[int, float] = {}  # when the end of each process was seen
        self._exit_deadlines: dict[int, float] = {}  # of processes that have reported an error

    def kill_if_requested(self) -> None:
        """Kills the processes after a second SIGINT. A signal handler calls it, also while this process writes output."""
        if self._is_killed_by_user():
            self._kill()

    def note(self, process: RunningProcess, notice: str) -> None:
        """Records a notice of a process."""
        if notice in JOIN_STATES:
            self._join_states[process.index] = notice
        elif notice:
            self.note_status(process, int(notice))

    def note_status(self, process: RunningProcess, status: int, reason: str = "") -> None:
        """Records the first failure, and lets the other processes end. A signal that was forwarded is not a failure.

        Args:
            process: The process.
            status: Its exit status; if it still runs, the status that it has reported.
            reason: The reason of the launcher to end it.
        """
        if status and process.status is None and status != PREEMPTED and not self._signals:
            self._exit_deadlines.setdefault(process.index, time.monotonic() + self._times.exit_seconds)
        if status == 0 or self._failure is not None or self._is_ending or self._is_end_by_signal(status):
            return
        self._note_failure(process, status, reason)

    def _note_failure(self, process: RunningProcess, status: int, reason: str) -> None:
        failure = Failure(process.index, status, failure_text(process.stderr.tail(), process.stdout.tail()), reason)
        others = [other for other in self._running() if other is not process]
        seconds = self._times.seconds_after(status)
        if others:
            self._announce_end(f"{failure.description}. The other processes of this command", len(others), seconds)
        self._failure = failure
        self._send_sigterm(others, seconds)

    def end(self, seconds: float, reason: str) -> None:
        """Ends the processes for a reason outside of them. Their exit statuses are not failures from here on.

        Args:
            seconds: The time between SIGTERM and SIGKILL.
            reason: The reason.
        """
        if self._failure is None and not self._is_ending:
            self._is_ending = True
            running = self._running()
            if running:
                self._announce_end(f"{reason}. The processes of this command", len(running), seconds)
            self._send_sigterm(running, seconds)

    def apply(self) -> None:
        """Forwards the signals that were received, and ends processes after a failure or a closed output."""
        while self._num_forwarded < len(self._signals):
            self._forward(self._signals[self._num_forwarded])
            self._num_forwarded += 1
        if self._console.is_closed and self._failure is None:  # as a program that SIGPIPE ends
            self._failure = Failure(-1, -signal.SIGPIPE, "")
            self._send_sigterm(self._running(), self._times.grace_seconds)
        self._end_wait_for_ended_process()
        now = time.monotonic()
        if now > self._deadline:
            self._deadline = math.inf
            self._is_ending = True  # their exit statuses are not failures
            self._kill()
        for process in self._running():
            if now > self._exit_deadlines.get(process.index, math.inf):
                process.send_signal(signal.SIGKILL, True)

    def seconds_left(self) -> float:
        """Returns the seconds until `apply` has to be called, or infinity."""
        running = [self._exit_deadlines.get(process.index, math.inf) for process in self._running()]
        return max(0.0, min(self._deadline, *running, math.inf) - time.monotonic())

    def all_ended(self) -> bool:
        """Whether all processes have ended."""
        return not self._running()

    def is_ending(self) -> bool:
        """Whether the processes are being ended."""
        return self._is_ending or self._failure is not None or bool(self._signals)

    def result(self) -> AttemptResult:
        """Returns the exit statuses of the processes, and the first failure."""
        statuses = tuple(process.status or 0 for process in self._processes)
        return AttemptResult(statuses, self._failure, self._signals[0] if self._signals else None)

    def _end_wait_for_ended_process(self) -> None:
        """Ends the processes if they wait for one that has ended with status 0. Its end alone is not a failure."""
        running_states = {self._join_states.get(process.index) for process in self._running()}
        now = time.monotonic()
        for process in (process for process in self._processes if process.status is not None):
            state = self._join_states.get(process.index)
            ended_at = self._ended_at.setdefault(process.index, now)
            if process.status or self._failure is not None or self._is_ending or self._signals:
                continue
            if state in (None, "joining") and "joining" in running_states:
                reason = _NOT_JOINED
            elif state == "joined" and "joined" in running_states and now > ended_at + _ABRUPT_END_SECONDS:
                reason = "it ended with exit status 0 without leaving the others, as `os._exit` does"
            else:
                continue
            self._note_failure(process, 1, reason)

    def _running(self) -> list[RunningProcess]:
        return [process for process in self._processes if process.status is None]

    def _announce_end(self, text: str, count: int, seconds: float) -> None:
        self._console.message(f"{text} ({count}) receive SIGTERM, and SIGKILL after {seconds:g} seconds.")

    def _send_sigterm(self, processes: Sequence[RunningProcess], seconds: float) -> None:
        if processes:
            self._deadline = min(self._deadline, time.monotonic() + seconds)
        for process in processes:
            process.send_signal(signal.SIGTERM, False)

    def _forward(self, number: int) -> None:
        if number == signal.SIGINT and number in self._signals[: self._num_forwarded]:
            self._console.message("received a second SIGINT, and killed the processes.")
            return
        running = self._running()
        for process in running:  # a terminal sends SIGINT to all processes of a group
            process.send_signal(number, number == signal.SIGINT)
        if number == signal.SIGINT:
            advice = "A second one kills them."
        else:
            advice = f"SIGKILL follows after {self._times.signal_seconds:g} seconds."
            self._deadline = min(self._deadline, time.monotonic() + self._times.signal_seconds)
        name = signal.Signals(number).name
        self._console.message(f"received {name}, and forwarded it to {len(running)} processes. {advice}")

    def _kill(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL, True)

    def _is_end_by_signal(self, status: int) -> bool:
        """Whether a process with this exit status has ended because of a signal that was forwarded."""
        return -status in self._signals or self._is_killed_by_user() or (status == PREEMPTED and bool(self._signals))

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
    """Writes a message about the first failure of an attempt, with its traceback or the last lines of its output."""
    failure = result.first_failure
    if failure is None or failure.process < 0:
        return
    text = (
        f"process {failure.process} of {num_processes} failed first: {failure.reason or status_text(failure.status)}."
    )
    if failure.status == -signal.SIGKILL and not failure.reason:
        text += " The machine may be out of memory."
    console.message(f"{text} The end of its output:\n{failure.text}" if failure.text else text)
