"""Runs all processes of a program, forwards output and signals, and returns how each process ended."""

import contextlib
import math
import multiprocessing.connection
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jdist._src.launch.answers import AnswerLimit, StoppedProcesses
from jdist._src.launch.child_processes import Guard
from jdist._src.launch.command import Command, CommandProcess, Report
from jdist._src.launch.end_rules import AttemptResult, EndRules, EndTimes, RunningProcess
from jdist._src.launch.output import Console
from jdist._src.launch.signals import ReceivedSignals

_LEFTOVER_SECONDS = 2.0  # in which processes that the program started may end after it
_LEFTOVER_SECONDS_AFTER_FAILURE = 0.2
_LEFTOVER_POLL_SECONDS = 0.05
_POLL_SECONDS = 1.0  # signals, output and the end of a process wake up the launcher earlier


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

    @property
    def sends_answers(self) -> bool:
        """Whether the processes send answers."""
        return not math.isinf(self.answer_seconds)


class Attempt:
    """The running processes of an attempt, on this machine or elsewhere, and the rules that end them.

    Mutable: it stores the processes and their exit statuses.

    Args:
        settings: The settings.
        check: Called after each event, and every second. It may end the processes.

    Attributes:
        processes: The processes.
        rules: The rules.
    """

    def __init__(self, settings: AttemptSettings, check: Callable[[EndRules], None]):
        self.processes: list[RunningProcess] = []
        self.rules = EndRules(self.processes, settings.times, settings.console, settings.signals.numbers)
        self._console, self._signals, self._check = settings.console, settings.signals, check
        self._answers = AnswerLimit(settings.answer_seconds, settings.console)

    def add(self, index: int, send_signal: Callable[[int, bool], None]) -> None:
        """Adds a process that has started.

        Args:
            index: Its index.
            send_signal: Sends a signal to the process, or with True to its process group.
        """
        self.processes.append(RunningProcess(index, *self._console.lines(index), send_signal))

    def receive(self, process: RunningProcess, report: Report, reason: str = "") -> None:
        """Applies a report of a process.

        Args:
            process: The process.
            report: The report.
            reason: The reason to end the process, if it did not end by itself.
        """
        process.stdout.feed(report.stdout)
        process.stderr.feed(report.stderr)
        for notice in report.notices:
            process.answer_time = time.monotonic()
            self.rules.note(process, notice)
        if report.status is not None and process.status is None:
            process.status = report.status
            self.rules.note_status(process, report.status, reason)

    def wait(self, receive_reports: Callable[[float], None]) -> AttemptResult:
        """Waits until all processes have ended.

        Args:
            receive_reports: Waits for events, at most some seconds, and calls `receive`.
        """
        self._signals.listener = self.rules.kill_if_requested
        while not self.rules.all_ended():
            self.process_events(receive_reports, min(self.rules.seconds_left(), _POLL_SECONDS))
        return self.rules.result()

    def process_events(self, receive_reports: Callable[[float], None], seconds: float) -> None:
        """Waits for events, at most some seconds, and ends processes if the rules require it."""
        receive_reports(seconds)
        self._answers.kill_silent(self.processes, self.rules)
        self._check(self.rules)
        self.rules.apply()

    def close(self) -> None:
        """Writes incomplete last lines, and stops to listen to signals."""
        self._signals.listener = lambda: None
        for process in self.processes:
            process.stdout.close()
            process.stderr.close()


def run_attempt(
    command: Command,
    environments: Mapping[int, Mapping[str, str]],
    settings: AttemptSettings,
    check: Callable[[EndRules], None] = lambda rules: None,
) -> AttemptResult:
    """Runs a command in one process per environment, and returns when all have ended.

    After the first failure, the other processes receive SIGTERM, and SIGKILL after the grace period. The received signals are
    forwarded; a second SIGINT kills all. All processes have ended when the function returns, those that the program started
    too, on Linux also if they left their process group. If this process is killed, they are killed.

    Args:
        command: The command.
        environments: The environment variables of each process of this machine, by the index of the process.
        settings: The settings.
        check: Called after each event, and every second. It may end the processes.
    """
    children: list[CommandProcess] = []
    attempt = Attempt(settings, check)
    stopped = StoppedProcesses(settings.console)

    def receive_reports(seconds: float) -> None:
        pipes = [pipe for child in children for pipe in child.open_pipes]
        multiprocessing.connection.wait([settings.signals.wake_up, *pipes], seconds)
        settings.signals.discard_wake_ups()
        for process, child in zip(attempt.processes, children, strict=True):
            attempt.receive(process, child.report())
        running = zip(attempt.processes, children, strict=True)
        stopped.report({process.index: child.pid for process, child in running if process.status is None})

    def end() -> None:
        for process, child in zip(attempt.processes, children, strict=True):
            report = child.end()
            process.stdout.feed(report.stdout)
            process.stderr.feed(report.stderr)
        attempt.close()

    with Guard() as guard, contextlib.ExitStack() as stack:
        stack.callback(end)
        for index, environment in environments.items():
            child = CommandProcess(command, environment, guard, settings.sends_answers)
            children.append(child)
            attempt.add(index, child.send_signal)
        result = attempt.wait(receive_reports)
        # Python's resource tracker, which the program started, cleans up after its parent.
        seconds = _LEFTOVER_SECONDS if result.exit_status == 0 else _LEFTOVER_SECONDS_AFTER_FAILURE
        deadline = time.monotonic() + seconds
        groups = [child.pid for child in children]
        while time.monotonic() < deadline and guard.has_members(groups):
            attempt.process_events(receive_reports, _LEFTOVER_POLL_SECONDS)
        return attempt.rules.result()
