"""Processes that do not answer: a thread of each process sends a sign of life, which stops with the process.

It stops if the process is stopped (SIGSTOP), and if a call holds Python's lock. On Linux, the launcher sees which processes are
stopped.
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
_PAUSE_SECONDS = 5.0  # between two checks, after which this process was stopped, too


class AnswerTimes:
    """When each process has last answered.

    Mutable: it stores the times.

    Args:
        limit_seconds: The time without an answer after which a process is killed; infinity for no limit.
        console: Receives messages.
    """

    def __init__(self, limit_seconds: float, console: Console):
        self._limit_seconds, self._console = limit_seconds, console
        self._times: dict[int, float] = {}  # by index of the process
        self._warned: set[int] = set()
        self._last_check = time.monotonic()

    def note(self, index: int) -> None:
        """Records an answer of a process, or its start."""
        self._times[index] = time.monotonic()
        self._warned.discard(index)

    def kill_silent(self, processes: Iterable[RunningProcess], rules: EndRules) -> None:
        """Kills the running processes that have not answered in time. It is their failure.

        Call it at least every few seconds, after all answers that have arrived were noted.

        Args:
            processes: The processes.
            rules: Receives the failure.
        """
        now = time.monotonic()
        if now - self._last_check > _PAUSE_SECONDS:
            self._times = dict.fromkeys(self._times, now)
        self._last_check = now
        if math.isinf(self._limit_seconds) or rules.is_ending():
            return
        for process in processes:
            silent = now - self._times[process.index]
            if process.status is not None:
                continue
            if silent > self._limit_seconds:
                process.send_signal(signal.SIGKILL, True)
                rules.note_status(process, -signal.SIGKILL, f"no answer for {self._limit_seconds:g} seconds")
                return
            if silent > min(_WARNING_SECONDS, self._limit_seconds / 2) and process.index not in self._warned:
                self._warned.add(process.index)
                self._console.message(
                    f"process {process.index} has not answered for {silent:.0f} seconds. It is stopped, or a call holds "
                    f"Python's lock. It is killed after {self._limit_seconds:g} seconds."
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
