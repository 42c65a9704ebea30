"""The watchdog of a job with several processes: warns of waits for other processes, and ends a job that hangs with a report.

A strategy whose devices are in several processes starts it. Its thread observes this process once per second. It logs a
warning during each long wait. When a wait exceeds the time limit and no process works, every process prints the call that it
waits in and the stacks of its threads, and ends with the exit status `HUNG`.
"""

import atexit
import contextlib
import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core import activity, exit_work
from jdist._src.core.background_threads import start_thread
from jdist._src.core.exit_statuses import HUNG
from jdist._src.core.process_messages import post_end_at_exit
from jdist._src.faults.observation import DEBUGGER, Observation, Observer, ProcessWait
from jdist._src.faults.status_board import (
    LOST_SECONDS,
    Decision,
    Status,
    StatusBoard,
    awaited_processes,
    stuck_processes,
)
from jdist._src.faults.time_limit import STDERR, TIME_LIMIT, WARNING_INTERVAL, WORK_LIMIT, seconds_of

_LOG = logging.getLogger("jdist")
_LIMIT_AFTER_ERROR = 60.0  # seconds of a wait, after an error has ended the program of another process
_ENDLESS_SECONDS = 5.0  # of a wait, after which it is an error if it can never end
_ANSWER_SECONDS = 10.0  # in which a process must react
_READ_AFTER = 1 / 6  # of the interval of warnings: the waiting after which the statuses are read
_MIN_REPORTED_SILENCE = 1.0  # seconds without a new status, and at least three intervals, that a warning reports
_LISTED_PROCESSES = 4  # that a warning describes
_READERS = 8  # processes that begin to read the statuses of the others at the same time
_EXIT_DELAY = 1.0  # seconds of process 0: JAX aborts the other processes when it ends
_ERROR_CHARACTERS = 200
_CAUSES_OF_SILENCE = "it is stopped, or a C call holds Python's lock, or its machine is lost"

_watchdog: "Watchdog | None" = None


def start(timeout_seconds: float | None) -> None:
    """Starts the watchdog of this process, which has joined others, or changes the time limit of the one that runs.

    Args:
        timeout_seconds: The time limit of a step, a collective of the host program, or a barrier; infinite for no limit. Of
            several limits, the largest applies. None for no change, at first `JDIST_TIMEOUT_SECONDS` or 600.

    Raises:
        ValueError: An environment variable is not a positive number.
    """
    global _watchdog
    if _watchdog is None or not _watchdog.is_running():
        limit = seconds_of("JDIST_TIMEOUT_SECONDS", TIME_LIMIT) if timeout_seconds is None else timeout_seconds
        work_limit = seconds_of("JDIST_WORK_SECONDS", WORK_LIMIT)
        _watchdog = Watchdog(limit, seconds_of("JDIST_WARNING_SECONDS", WARNING_INTERVAL), work_limit)
        _watchdog.is_default_limit = timeout_seconds is None
        _watchdog.start()
    elif timeout_seconds is not None:
        _watchdog.limit = timeout_seconds if _watchdog.is_default_limit else max(timeout_seconds, _watchdog.limit)
        _watchdog.is_default_limit = False
    activity.time_limit = _watchdog.limit


class _Timer(NamedTuple):
    """A wait that the watchdog has observed.

    Attributes:
        clock: The time of day when it was observed first.
        seconds: Its duration while the watchdog ran. Time in which this process was stopped does not count.
        next_warning: The duration at which the next warning is logged.
    """

    clock: str
    seconds: float
    next_warning: float


class Watchdog:
    """The watchdog of this process.

    Mutable: its thread measures the waits.

    Args:
        limit: The time limit per step in seconds.
        warning_interval: The seconds of waiting between two warnings.
        work_limit: The seconds after which work, such as a compilation, counts as a hang.

    Attributes:
        limit: The time limit per step in seconds.
        is_default_limit: Whether no strategy was created with a time limit.
    """

    is_default_limit = True

    def __init__(self, limit: float, warning_interval: float, work_limit: float = math.inf):
        self.limit, self._warning_interval, self._work_limit = limit, warning_interval, work_limit
        self._process, self._num_processes = jax.process_index(), jax.process_count()
        self._pid = os.getpid()
        # Process 0 answers two requests per process and interval, each in about 0.2 ms.
        interval = min(1.0, warning_interval / 5, limit / 10)
        self._interval = max(interval, self._num_processes / 100)
        self._answer_seconds = max(min(_ANSWER_SECONDS, 10 * interval), 3 * self._interval)
        self._board = StatusBoard(self._interval, self._answer_seconds)
        self._observer = Observer()
        self._timers: dict[Any, _Timer] = {}
        self._usual_seconds: dict[str, float] = {}  # of finished waits, by the name of the program
        self._names: dict[Any, str] = {}  # the name of each wait with a timer, by its key
        # The text of the last observation, and the time of day and `time.monotonic` when it was observed first.
        self._observed = ("", "", 0.0)
        self._work: Any = None  # the work of the last observation, and the number of programs before it
        self._work_seconds = 0.0
        self._num_postponed = 0
        self._has_failed = False
        self._difference: ValueError | None = None  # of the calls of the processes
        self._error_level = logging.WARNING  # of the first error of an observation
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def is_running(self) -> bool:
        """Whether the thread of the watchdog runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts the threads."""
        # They run in reverse order, and before JAX separates the processes, which has a time limit.
        atexit.register(self._wait_at_exit)
        post_end_at_exit(self._process)
        self._board.status = Status(f"Process {self._process} of {self._num_processes} has started.")
        self._board.start()
        self._thread = start_thread(self._run, (), name="jdist watchdog", stop=self._stop.set)

    def _run(self) -> None:
        last = time.monotonic()
        while jax.distributed.is_initialized():
            now = time.monotonic()
            try:
                self._update(min(now - last, 2 * self._interval))
            except Exception:  # of any type: it must not end the watchdog
                _LOG.log(self._error_level, "The watchdog could not observe this process.", exc_info=True)
                self._error_level = logging.DEBUG
            last = now
            if self._stop.wait(self._interval):
                return
            self._raise_difference()
            decision = self._board.decision or self._decision_without_process_0(now)
            if decision is not None:
                self._end_job(decision)

    def _raise_difference(self) -> None:
        """Lets the next call of a program raise the difference between the calls of the processes, if there is one."""
        calls, difference = activity.calls, self._board.difference
        if difference is None or difference[0] != calls.num_forgotten or calls.is_difference_known:
            return
        calls.is_difference_known = True
        self._difference = ValueError(difference[1])
        activity.pending.append(self._difference)
        if difference[0] != calls.num_forgotten:  # another error has reported it at this moment
            calls.note_difference()
            calls.is_difference_known = False

    def _update(self, seconds: float) -> None:
        observation = self._observer.observe()
        self._measure(observation, seconds)
        is_work_too_long = self._work_seconds > self._work_limit
        if self._board.num_postponed != self._num_postponed:
            self._num_postponed = self._board.num_postponed
            self._timers = {key: timer._replace(seconds=0.0) for key, timer in self._timers.items()}
        awaits, launches, newest = _awaits(observation.waits), activity.launch_counts(), activity.newest_label()
        is_compared = awaits is not None and not awaits[1] and activity.calls.running is not None
        if newest is not None and is_compared:  # it is not launched yet
            launches[newest.launches.name] -= 1
        self._board.status = Status(
            self._line(observation),
            bool(observation.waits) and self._observer.end is None,
            None if is_work_too_long else observation.work,
            self._observer.end is not None,
            self._has_failed,
            launches=launches,
            newest_launch=("", "") if newest is None or is_compared else (newest.launches.name, newest.name),
            awaits=awaits,
            marks=activity.calls.marks(),
        )
        exceeds_limit = is_work_too_long or any(map(self._exceeds_limit, observation.waits))
        endless = "" if exceeds_limit else self._reason_of_endless(observation.waits)
        self._board.needs_answers = bool(endless)
        reason = f"process {self._process} has waited longer than its time limit" if exceeds_limit else endless
        self._board.suspicion = reason
        waited = max((timer.seconds for timer in self._timers.values()), default=0.0)
        # The first processes read earlier, so that process 0 does not answer all of them at the same time.
        read_after = self._warning_interval * _READ_AFTER * (1 + self._process // _READERS)
        self._board.reads_statuses = waited > min(read_after, self.limit / 2)
        for wait in observation.waits:
            self._warn(wait)

    def _measure(self, observation: Observation, seconds: float) -> None:
        """Adds `seconds` to the timers of the waits, and of the work, that continue."""
        work = observation.work and (observation.work, activity.calls.launches)
        self._work_seconds = self._work_seconds + seconds if work and work == self._work else 0.0
        self._work = None if observation.work == DEBUGGER else work
        waits = {wait.key: wait for wait in observation.waits}
        for key in self._timers.keys() - waits.keys():
            timer, name = self._timers.pop(key), self._names.pop(key)
            self._usual_seconds[name] = max(timer.seconds, self._usual_seconds.get(name, 0.0))
        for key, wait in waits.items():
            if key in self._timers:
                self._timers[key] = self._timers[key]._replace(seconds=self._timers[key].seconds + seconds)
                continue
            first_warning = max(self._warning_interval, 2 * self._usual_seconds.get(wait.name, 0.0))
            self._timers[key] = _Timer(time.strftime("%H:%M:%S"), 0.0, first_warning)
            self._names[key] = wait.name
        text, _, _ = self._observed
        if observation.text != text:
            self._observed = observation.text, time.strftime("%H:%M:%S"), time.monotonic()

    def _exceeds_limit(self, wait: ProcessWait) -> bool:
        limit = self.limit * max(1, wait.steps)
        if not math.isinf(limit) and any(status.has_failed for status in self._board.statuses.values()):
            limit = min(limit, _LIMIT_AFTER_ERROR)
        return self._timers[wait.key].seconds >= limit

    def _reason_of_endless(self, waits: Sequence[ProcessWait]) -> str:
        """Returns the reason to end the job if this process waits in a call that can never end; else an empty string."""
        seconds = min((self._timers[wait.key].seconds for wait in waits), default=0.0)
        if seconds < (_ENDLESS_SECONDS if all(wait.is_known for wait in waits) else _LIMIT_AFTER_ERROR):
            return ""
        if self._difference in activity.pending:  # no call of a program has raised it
            return str(self._difference)
        statuses = {**self._board.statuses, self._process: self._board.status}
        stuck = stuck_processes(statuses)
        if self._observer.end is not None or self._process not in stuck:
            return ""
        awaited = awaited_processes(self._process, statuses) & stuck
        ended = sorted(process for process in awaited if statuses[process].has_ended)
        if ended:
            return f"process {self._process} waits for process {ended[0]}, which has ended its program"
        return "the processes wait for each other in different calls, so none of them can continue"

    def _line(self, observation: Observation) -> str:
        _, clock, start = self._observed
        seconds = time.monotonic() - start
        if observation.waits:
            clock, seconds, _ = max(
                (self._timers[wait.key] for wait in observation.waits), key=lambda timer: timer.seconds
            )
        return f"Process {self._process} of {self._num_processes}{observation.text}, since {clock} ({seconds:.0f} s)."

    def _warn(self, wait: ProcessWait) -> None:
        timer = self._timers[wait.key]
        if timer.seconds >= timer.next_warning:
            self._timers[wait.key] = timer._replace(next_warning=timer.seconds + self._warning_interval)
            statuses = {0: Status("", waits=True), **self._board.statuses}  # the store may not answer either
            others = [self._line_of_other(process, status) for process, status in statuses.items()]
            listed = "".join(f"\n  {line}" for line in list(filter(None, others))[:_LISTED_PROCESSES])
            _LOG.warning("%s%s", self._board.status.line, f" Processes that do not wait:{listed}" if listed else "")

    def _line_of_other(self, process: int, status: Status) -> str:
        """Returns the sentence about another process in a warning; an empty string if it waits too."""
        seconds = self._board.silent_seconds(process)
        is_silent = seconds > max(_MIN_REPORTED_SILENCE, 3 * self._interval)
        if process == self._process or (status.waits and not is_silent):
            return ""
        if not is_silent:
            return status.line
        name = f"Process {process} of {self._num_processes}"
        last = f" Its last report: {status.line}" if status.line else ""
        return f"{name} has not answered for {seconds:.0f} s: {_CAUSES_OF_SILENCE}.{last}"

    def _decision_without_process_0(self, now: float) -> Decision | None:
        """Returns the decision to end the job if process 0, which holds the key-value store, does not answer either."""
        is_silent = now - self._board.last_exchange > self._answer_seconds + self._interval
        reason = self._board.suspicion
        return Decision(self._process, [0], reason) if reason and is_silent else None

    def _end_job(self, decision: Decision) -> None:
        """Prints the report and ends this process."""
        sys.excepthook = _block  # the connections to processes that end first are lost
        self._print_report(decision)
        self._board.has_reported.set()
        can_exchange = self._board.decision is not None
        self._board.all_have_reported.wait(self._answer_seconds if can_exchange else 3 * self._interval)
        if self._process == 0:
            time.sleep(max(_EXIT_DELAY, self._interval))
        _flush()
        os._exit(1 if self._has_failed else HUNG)

    def _print_report(self, decision: Decision) -> None:
        reason = decision.reason.rstrip(".")
        _write(f"jdist: {reason}, so all processes end with exit status {HUNG}.\n{self._board.status.line}\n")
        faulthandler.dump_traceback(STDERR)
        lines = [self._board.status.line]
        if decision.process == self._process:
            statuses = {**self._board.statuses, self._process: self._board.status}
            silent = {i: f"Process {i} does not answer: {_CAUSES_OF_SILENCE}." for i in decision.silent}
            by_process = {process: status.line for process, status in statuses.items()} | silent
            lines = [by_process[process] for process in sorted(by_process)]
        _write("\n".join(["", *lines, ""]))

    def _wait_at_exit(self) -> None:
        """Waits at the end of the program for the other processes, so that this process still answers."""
        if os.getpid() != self._pid or not self.is_running():
            return
        error = getattr(sys, "last_value", None)  # the error that has ended the program
        self._has_failed = error is not None
        reason = f" with {type(error).__name__}: {error}"[:_ERROR_CHARACTERS] if self._has_failed else ""
        self._observer.end = f"has ended its program{reason}"
        status = self._board.status._replace(
            waits=False,
            work=None,
            has_ended=True,
            has_failed=self._has_failed,
            launches=activity.launch_counts(),
            awaits=None,
        )
        self._board.status = status
        if self._board.decision is not None:
            _block()
        with contextlib.suppress(RuntimeError):
            lost = self._board.wait_for_end_of_others(self._answer_seconds if self._has_failed else LOST_SECONDS)
            if lost and self._has_failed:
                self._end_without_lost(lost)

    def _end_without_lost(self, lost: Sequence[int]) -> None:
        """Lets this process end after an error although others are lost. JAX would wait for them, then abort this process."""
        one = len(lost) == 1
        _write(
            f"jdist: {'process' if one else 'processes'} {', '.join(map(str, lost))} {'does' if one else 'do'} not answer and "
            f"{'has' if one else 'have'} not ended, so this process ends without waiting for {'it' if one else 'them'}.\n"
        )
        if self._process == 0 and len(lost) < self._num_processes - 1:  # JAX aborts the others when it ends
            time.sleep(self._answer_seconds)
        exit_work.end_without_jax(exit_work.status_of(getattr(sys, "last_value", None)))


def _awaits(waits: Sequence[ProcessWait]) -> tuple[str, int, Sequence[int] | None] | None:
    """Returns what the program waits for, for the status: a message rather than the results of a program before it."""
    wait = next((wait for wait in waits if wait.round), None)
    if wait is not None:
        return wait.round, 0, list(wait.processes or ()) if len(wait.processes or ()) < jax.process_count() else None
    if not waits or waits[0].launches is None:
        return None
    return waits[0].launches.name, waits[0].launches.count, waits[0].processes


def _block(*args: object) -> None:
    """Waits until the watchdog ends the process."""
    threading.Event().wait()


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(STDERR, text.encode())


def _flush() -> None:
    """Flushes the standard streams, unless a thread that hangs holds their locks."""

    def flush() -> None:
        with contextlib.suppress(Exception):  # of any type: a stream may be replaced or closed
            sys.stdout.flush()
            sys.stderr.flush()

    thread = threading.Thread(target=flush, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter exits, so the main thread does not hold them
        flush()
    else:
        thread.join(_EXIT_DELAY)
