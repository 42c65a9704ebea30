"""One attempt: starts all processes of a program, forwards output and signals, and returns how each process ended."""

import contextlib
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jdist._src.launch import child
from jdist._src.launch.answers import AnswerTimes, StoppedProcesses
from jdist._src.launch.child_processes import (
    Guard,
    end_child,
    exit_status,
    send_signal,
    start_child,
)
from jdist._src.launch.end_rules import AttemptResult, EndRules, EndTimes, RunningProcess
from jdist._src.launch.notices import parse_notices
from jdist._src.launch.output import Console, PrefixedLines
from jdist._src.launch.signals import ReceivedSignals

_LEFTOVER_SECONDS = 2.0  # in which processes that the program started may end after it
_LEFTOVER_SECONDS_AFTER_FAILURE = 0.2
_LEFTOVER_POLL_SECONDS = 0.05
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


class AttemptSettings(NamedTuple):
    """The settings of all attempts of a program.

    Attributes:
        times: The time that processes have to end.
        console: Receives the output and the messages.
        signals: The signals that this process receives.
        answer_seconds: The time after which a process that does not answer is killed, and has failed.
    """

    times: EndTimes
    console: Console
    signals: ReceivedSignals
    answer_seconds: float = math.inf


def run_attempt(
    program: Program,
    environments: Mapping[int, Mapping[str, str]],
    settings: AttemptSettings,
    check: Callable[[EndRules], None] = lambda rules: None,
) -> AttemptResult:
    """Runs a program in one process per environment, and returns when all have ended.

    After the first failure, the other processes receive SIGTERM, and SIGKILL after the grace period. The received signals are
    forwarded; a second SIGINT kills all. All processes have ended when the function returns, those that the program started
    too, on Linux also if they left their process group. If this process is killed, they are killed.

    Args:
        program: The program.
        environments: The environment variables of each process of this machine, by the index of the process.
        settings: The settings.
        check: Called after each event, and every second. It may end the processes.
    """
    with contextlib.ExitStack() as stack:
        attempt = _Attempt(settings, stack.enter_context(Guard()), check)
        stack.callback(attempt.end)
        for index, environment in environments.items():
            attempt.start(index, program, environment)
        return attempt.wait()


def end_rules(processes: Sequence[RunningProcess], settings: AttemptSettings) -> EndRules:
    """Returns the rules that end the processes of an attempt."""
    return EndRules(processes, settings.times, settings.console, settings.signals.numbers)


def start_program(
    program: Program, index: int, environment: Mapping[str, str], notices: int, *, sends_answers: bool = False
) -> subprocess.Popen[bytes]:
    """Starts a process of a program, with pipes for its output.

    Args:
        program: The program.
        index: The index of the process.
        environment: The environment variables.
        notices: The pipe to which the process writes notices.
        sends_answers: Whether a thread of the process writes an answer every second.
    """
    settings = [str(os.getpid()), str(notices), str(index), str(int(sends_answers)), program.kind, program.target]
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
    def __init__(self, settings: AttemptSettings, guard: Guard, check: Callable[[EndRules], None]):
        self._console, self._signals, self._guard, self._check = settings.console, settings.signals, guard, check
        self._processes: list[_Process] = []
        self._rules = end_rules(self._processes, settings)
        self._answers = AnswerTimes(settings.answer_seconds, settings.console)
        self._stopped = StoppedProcesses(settings.console)
        self._sends_answers = not math.isinf(settings.answer_seconds)
        self._selector = selectors.DefaultSelector()
        self._notices, self._notices_of_children = os.pipe()
        os.set_blocking(self._notices, False)
        self._watch(self._notices, self._read_notices)
        self._watch(self._signals.wake_up, self._signals.discard_wake_ups)
        self._signals.listener = self._rules.kill_if_requested

    def start(self, index: int, program: Program, environment: Mapping[str, str]) -> None:
        environment = {**environment, **self._guard.variables}
        popen = start_program(program, index, environment, self._notices_of_children, sends_answers=self._sends_answers)
        self._guard.add(popen.pid)
        process = _Process(index, popen, self._console)
        self._processes.append(process)
        self._answers.note(index)
        for stream, lines in process.streams.items():
            os.set_blocking(stream, False)
            self._watch(stream, lambda stream=stream, lines=lines: self._read(stream, lines))

    def wait(self) -> AttemptResult:
        while not self._rules.all_ended():
            self._process_events(min(self._rules.seconds_left(), _POLL_SECONDS))
        self._end_leftover()
        return self._rules.result()

    def end(self) -> None:
        """Ends all processes, and closes the pipes."""
        self._signals.listener = lambda: None
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

    def _watch(self, file: int, read: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, read)

    def _process_events(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()
        for process in self._processes:
            if process.status is None and (status := exit_status(process.popen)) is not None:
                self._read_notices()  # the last ones of the process
                process.status = status
                self._rules.note_status(process, status)
        self._answers.kill_silent(self._processes, self._rules)
        self._stopped.report({p.index: p.popen.pid for p in self._processes if p.status is None})
        self._check(self._rules)
        self._rules.apply()

    def _read(self, stream: int, lines: PrefixedLines) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(stream, _READ_BYTES)
            lines.feed(data)
            if not data:
                self._selector.unregister(stream)

    def _read_notices(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for notice in parse_notices(os.read(self._notices, _READ_BYTES)):
                self._answers.note(notice.process)
                self._rules.note(notice)

    def _end_leftover(self) -> None:
        """Waits for the processes that the program started: Python's resource tracker cleans up after its parent."""
        seconds = _LEFTOVER_SECONDS if self._rules.result().exit_status == 0 else _LEFTOVER_SECONDS_AFTER_FAILURE
        deadline = time.monotonic() + seconds
        groups = [process.popen.pid for process in self._processes]
        while time.monotonic() < deadline and self._guard.has_members(groups):
            self._process_events(_LEFTOVER_POLL_SECONDS)
