"""One attempt: starts all processes of a program, forwards output and signals, and returns how each process ended."""

import contextlib
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
from jdist._src.launch.end_rules import FORWARDED, AttemptResult, EndRules
from jdist._src.launch.output import Console, PrefixedLines

_LEFTOVER_SECONDS = 2.0  # in which processes that the program started may end after it
_POLL_SECONDS = 1.0  # signals, output and the end of a process wake up the launcher earlier
_READ_BYTES = 1 << 16


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


def start_program(
    program: Program, index: int, environment: Mapping[str, str], notices: int
) -> subprocess.Popen[bytes]:
    """Starts a process of a program, with pipes for its output.

    Args:
        program: The program.
        index: The index of the process.
        environment: The environment variables.
        notices: The pipe to which the process writes `INDEX STATUS` if it has an error.
    """
    settings = [str(os.getpid()), str(notices), str(index), program.kind, program.target]
    return start_child(
        [sys.executable, "-u", child.__file__, *settings, *program.arguments],
        environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[notices],
    )


class _Process:
    """One process: its streams, and its exit status once known."""

    def __init__(self, index: int, popen: subprocess.Popen[bytes], console: Console):
        assert popen.stdout is not None and popen.stderr is not None
        self.index, self.popen, self.status = index, popen, None
        self.stdout, self.stderr = console.stdout_lines(index), console.stderr_lines(index)
        self.streams = {popen.stdout.fileno(): self.stdout, popen.stderr.fileno(): self.stderr}

    status: int | None

    def send_signal(self, number: int, *, to_group: bool = False) -> None:
        """Sends a signal to the process, or to its process group."""
        send_signal(self.popen, number, to_group=to_group)

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
        self._console, self._guard = console, guard
        self._processes: list[_Process] = []
        self.rules = EndRules(self._processes, grace_seconds, console)
        self._selector = selectors.DefaultSelector()
        self._notices, self._notices_of_children = os.pipe()
        self.watch(self._notices, self._read_notices)

    def start(self, index: int, program: Program, environment: Mapping[str, str]) -> None:
        popen = start_program(program, index, environment, self._notices_of_children)
        self._guard.add(popen.pid)
        process = _Process(index, popen, self._console)
        self._processes.append(process)
        for stream, lines in process.streams.items():
            self.watch(stream, lambda stream=stream, lines=lines: self._read(stream, lines))

    def watch(self, pipe: int, read: Callable[[], None]) -> None:
        os.set_blocking(pipe, False)
        self._selector.register(pipe, selectors.EVENT_READ, read)

    def wait(self) -> AttemptResult:
        while not self.rules.all_ended():
            self._process_events(min(self.rules.seconds_left(), _POLL_SECONDS))
        self._end_leftover()
        return self.rules.result()

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
        for process in self._processes:
            if process.status is None and (status := exit_status(process.popen)) is not None:
                process.status = status
                self.rules.note_status(process, status)
        self.rules.apply()

    def _read(self, stream: int, lines: PrefixedLines) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(stream, _READ_BYTES)
            lines.feed(data)
            if not data:
                self._selector.unregister(stream)

    def _read_notices(self) -> None:
        for line in os.read(self._notices, _READ_BYTES).splitlines():
            index, status = map(int, line.split())
            self.rules.note_status(next(p for p in self._processes if p.index == index), status)

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
            attempt.rules.receive_signal(number)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A signal that is ignored, as SIGHUP by `nohup`, stays ignored.
    numbers = [n for n in FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
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
