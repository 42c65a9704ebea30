"""Processes that do not answer: a thread of each process sends an answer every second, a heartbeat.

The answers end if the process is stopped (SIGSTOP), and if a call holds Python's lock. On Linux, the launcher reads which
processes are stopped.
"""

import contextlib
import math
import pathlib
import signal
import time
from collections.abc import Iterable, Mapping

from jdist._src.launch.end_rules import EndRules, RunningProcess
from jdist._src.launch.output import Console

_WARNING_SECONDS = 30.0
_STOPPED_CHECK_SECONDS = 1.0
_STOPPED_SECONDS = 5.0  # until a process that is stopped is reported
_PAUSE_SECONDS = 5.0  # between two checks, after which the launcher itself was stopped


class AnswerLimit:
    """The time in which each process has to answer.

    Mutable: it stores which processes it has warned about.

    Args:
        seconds: The time without an answer after which a process is killed; infinity for no limit.
        console: Receives messages.
    """

    def __init__(self, seconds: float, console: Console):
        self._seconds, self._console = seconds, console
        self._warned: dict[int, float] = {}  # the last answer of a process before the warning, by its index
        self._last_check = time.monotonic()

    def kill_silent(self, processes: Iterable[RunningProcess], rules: EndRules) -> None:
        """Kills the running processes that have not answered in time. It is their failure.

        Call it at least every few seconds, after all answers that have arrived were noted.

        Args:
            processes: The processes.
            rules: Receives the failure.
        """
        now = time.monotonic()
        launcher_was_stopped = now - self._last_check > _PAUSE_SECONDS
        self._last_check = now
        if math.isinf(self._seconds) or rules.is_ending():
            return
        for process in (process for process in processes if process.status is None):
            if launcher_was_stopped:
                process.answer_time = now
            silent = now - process.answer_time
            if silent > self._seconds:
                process.send_signal(signal.SIGKILL, True)
                rules.note_status(process, -signal.SIGKILL, f"no answer for {self._seconds:g} seconds")
                return
            is_warned = self._warned.get(process.index) == process.answer_time
            if silent > min(_WARNING_SECONDS, self._seconds / 2) and not is_warned:
                self._warned[process.index] = process.answer_time
                self._console.message(
                    f"process {process.index} has not answered for {silent:.0f} seconds. It is stopped, or a call holds "
                    f"Python's lock. It is killed after {self._seconds:g} seconds."
                )


class StoppedProcesses:
    """Reports processes that are stopped, once until they run again.

    Mutable: it stores when each process was first seen to be stopped.

    Args:
        console: Receives messages.
    """

    def __init__(self, console: Console):
        self._console = console
        self._since: dict[int, float] = {}  # by index of the process
        self._reported: set[int] = set()
        self._next_check = 0.0

    def report(self, pids: Mapping[int, int]) -> None:
        """Writes a message about each process that has been stopped for some seconds, and about its continuation.

        Args:
            pids: The id of each running process, by its index.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _STOPPED_CHECK_SECONDS
        stopped = {index for index, pid in pids.items() if _is_stopped(pid)}
        self._since = {index: self._since.get(index, now) for index in stopped}
        for index in sorted(stopped - self._reported):
            if now - self._since[index] >= _STOPPED_SECONDS:
                self._reported.add(index)
                self._console.message(
                    f"process {index} is stopped, by SIGSTOP or a debugger, and the others wait for it. "
                    f"`kill -CONT {pids[index]}` continues it."
                )
        for index in sorted(self._reported - stopped):
            self._reported.discard(index)
            if index in pids:
                self._console.message(f"process {index} runs again.")


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped. Only Linux shows it: elsewhere False."""
    with contextlib.suppress(OSError):
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return text.rpartition(")")[2].split()[0] == "T"
    return False
