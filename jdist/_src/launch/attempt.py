"""One attempt: starts all processes of a program, forwards output and signals, and returns how each process ended."""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from jdist._src.launch import child
from jdist._src.launch.child_processes import (
    Guard,
    end_child,
    exit_status,
    groups_with_members,
    send_signal,
    start_child,
)
from jdist._src.launch.output import Console, PrefixedLines, failure_text

_LEFTOVER_SECONDS = 2.0  # in which processes that the program started may end after it
_POLL_SECONDS = 1.0  # signals, output and the end of a process wake up the launcher earlier
_READ_BYTES = 1 << 16
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Program(NamedTuple):
    """A Python program.

    Attributes:
        kind: `"script"` or `"module"`.
        target: The path of the script, or the name of the module.
        arguments: The arguments.
    """

    kind: str
    target: str
    arguments: Sequence[str]


class Failure(NamedTuple):
    """The first failure of an attempt.

    Attributes:
        process: The index of the process.
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


def run_attempt(
    program: Program,
    environments: Mapping[int, Mapping[str, str]],
    *,
    grace_seconds: float,
    console: Console,
) -> AttemptResult:
    """Runs a program in one process per environment, and returns when all have ended.

    After the first failure, the other processes receive SIGTERM, and SIGKILL after `grace_seconds`. SIGINT, SIGTERM and SIGHUP
    of this process are forwarded; a second SIGINT kills all. All processes have ended when the function returns, those that the
    program started too, unless they left their process group. If this process is killed, they are killed.

    Args:
        program: The program.
        environments: The environment variables of each process of this machine, by the index of the process.
        grace_seconds: The time between SIGTERM and SIGKILL after the first failure.
        console: Receives the output and the messages.
    """
    with contextlib.ExitStack() as stack:
        attempt = _Attempt(grace_seconds, console, stack.enter_context(Guard()))
        stack.callback(attempt.end)
        stack.enter_context(_wake_up_on_signals(attempt))
        for index, environment in environments.items():
            attempt.start(index, program, environment)
        return attempt.wait()


class _Process:
    """One process: its streams, and its exit status once known."""

    def __init__(self, index: int, popen: subprocess.Popen[bytes], console: Console):
        assert popen.stdout is not None and popen.stderr is not None
        self.index, self.popen, self.status = index, popen, None
        self.stdout, self.stderr = console.stdout_lines(index), console.stderr_lines(index)
        self.streams = {popen.stdout.fileno(): self.stdout, popen.stderr.fileno(): self.stderr}

    status: int | None

    def drain(self) -> None:
        """Reads the output that the process has written so far."""
        for stream, lines in self.streams.items():
            with contextlib.suppress(BlockingIOError):
                # A process that does not end its output cannot hold up the others.
                for _ in range(64):
                    if not (data := os.read(stream, _READ_BYTES)):
                        break
                    lines.feed(data)


class _Attempt:
    def __init__(self, grace_seconds: float, console: Console, guard: Guard):
        self._grace_seconds, self._console, self._guard = grace_seconds, console, guard
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._notices, self._notices_of_children = os.pipe()
        self._selector.register(self._notices, selectors.EVENT_READ, self._read_notices)
        self._signals: list[int] = []  # received
        self._num_forwarded = 0
        self._failure: Failure | None = None
        self._deadline: float | None = None  # of the processes after a failure

    def start(self, index: int, program: Program, environment: Mapping[str, str]) -> None:
        settings = [str(os.getpid()), str(self._notices_of_children), str(index), program.kind, program.target]
        popen = start_child(
            [sys.executable, "-u", child.__file__, *settings, *program.arguments],
            environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[self._notices_of_children],
        )
        self._guard.add(popen.pid)
        process = _Process(index, popen, self._console)
        self._processes.append(process)
        for stream, lines in process.streams.items():
            os.set_blocking(stream, False)
            self.watch(stream, lambda stream=stream, lines=lines: self._read(stream, lines))

    def watch(self, pipe: int, read: Callable[[], None]) -> None:
        self._selector.register(pipe, selectors.EVENT_READ, read)

    def receive_signal(self, number: int) -> None:
        """Stores a signal. A second SIGINT kills the processes here, also while this process waits to write its output."""
        self._signals.append(number)
        if self._is_killed_by_user():
            self._kill()

    def wait(self) -> AttemptResult:
        while not self._all_ended():
            seconds = math.inf if self._deadline is None else self._deadline - time.monotonic()
            self._process_events(min(max(seconds, 0.0), _POLL_SECONDS))
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._deadline = None
                self._kill()
        self._end_leftover()
        statuses = tuple(process.status or 0 for process in self._processes)
        return AttemptResult(statuses, self._failure, self._signals[0] if self._signals else None)

    def end(self) -> None:
        """Ends all processes, and closes the pipes."""
        for process in self._processes:
            end_child(process.popen)
            self._guard.remove(process.popen.pid)
            process.drain()
            for stream in (process.popen.stdout, process.popen.stderr):
                assert stream is not None
                stream.close()
            process.stdout.close()
            process.stderr.close()
        self._selector.close()
        os.close(self._notices)
        os.close(self._notices_of_children)

    def _process_events(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()
        self._check_ended()
        self._forward_signals()
        if self._console.is_closed and self._failure is None:  # as a program that SIGPIPE ends
            running = [process for process in self._processes if process.status is None]
            self._fail(Failure(-1, -signal.SIGPIPE, ""), running)

    def _read(self, stream: int, lines: PrefixedLines) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(stream, _READ_BYTES)
            lines.feed(data)
            if not data:
                self._selector.unregister(stream)

    def _read_notices(self) -> None:
        for line in os.read(self._notices, _READ_BYTES).splitlines():
            index, status = map(int, line.split())
            process = next(process for process in self._processes if process.index == index)
            self._note_status(process, status)

    def _check_ended(self) -> None:
        for process in self._processes:
            if process.status is None and (status := exit_status(process.popen)) is not None:
                process.status = status
                self._note_status(process, status)

    def _note_status(self, process: _Process, status: int) -> None:
        """Records the first failure, and lets the other processes end. A signal that was forwarded is not a failure."""
        if status == 0 or self._failure is not None or -status in self._signals or self._is_killed_by_user():
            return
        process.drain()
        failure = Failure(process.index, status, failure_text(process.stderr.tail(), process.stdout.tail()))
        others = [other for other in self._processes if other.status is None and other is not process]
        if others:
            self._console.message(
                f"process {process.index} failed: {status_text(status)}. The other processes of this machine "
                f"({len(others)}) receive SIGTERM, and SIGKILL after {self._grace_seconds:g} seconds."
            )
        self._fail(failure, others)

    def _fail(self, failure: Failure, others: Sequence[_Process]) -> None:
        self._failure = failure
        if others:
            self._deadline = time.monotonic() + self._grace_seconds
        for process in others:
            send_signal(process.popen, signal.SIGTERM)

    def _forward_signals(self) -> None:
        while self._num_forwarded < len(self._signals):
            number = self._signals[self._num_forwarded]
            self._num_forwarded += 1
            if number == signal.SIGINT and number in self._signals[: self._num_forwarded - 1]:
                self._console.message("received a second SIGINT, and killed the processes.")
                continue
            running = [process for process in self._processes if process.status is None]
            for process in running:  # a terminal sends SIGINT to all processes of a group
                send_signal(process.popen, number, to_group=number == signal.SIGINT)
            advice = " A second one kills them." if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            self._console.message(f"received {name}, and forwarded it to {len(running)} processes.{advice}")

    def _kill(self) -> None:
        for process in self._processes:
            send_signal(process.popen, signal.SIGKILL, to_group=True)

    def _is_killed_by_user(self) -> bool:
        return self._signals.count(signal.SIGINT) > 1

    def _all_ended(self) -> bool:
        return all(process.status is not None for process in self._processes)

    def _end_leftover(self) -> None:
        """Waits for the processes that the program started: Python's resource tracker cleans up after its parent."""
        deadline = time.monotonic() + _LEFTOVER_SECONDS
        groups = [process.popen.pid for process in self._processes]
        while groups_with_members(groups) and time.monotonic() < deadline:
            self._process_events(0.02)


@contextlib.contextmanager
def _wake_up_on_signals(attempt: _Attempt) -> Iterator[None]:
    """Forwards signals to `attempt`, and makes its `select` return after a signal and after the end of a process."""

    def receive(number: int, frame: FrameType | None) -> None:
        del frame
        if number != signal.SIGCHLD:
            attempt.receive_signal(number)

    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A signal that is ignored, as SIGHUP by `nohup`, stays ignored.
    numbers = [n for n in _FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, receive) for number in (*numbers, signal.SIGCHLD)}
    attempt.watch(reader, lambda: _discard(reader))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_writer)
        os.close(reader)
        os.close(writer)


def _discard(pipe: int) -> None:
    """Reads from a pipe, and drops the bytes."""
    with contextlib.suppress(BlockingIOError):
        os.read(pipe, _READ_BYTES)


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
