"""A command, and one process that runs it: its pipes for output and notices, its signals and its end."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jdist._src.launch import child
from jdist._src.launch.child_processes import Guard, end_child, exit_status, send_signal, start_child

_READ_BYTES = 1 << 16
_MAX_READS = 64  # of a pipe per report: a process that writes without end does not delay the reports of the others


class Command(NamedTuple):
    """A Python program with its arguments.

    Attributes:
        kind: `"script"` or `"module"`.
        target: The path of the script, or the name of the module.
        arguments: The arguments.
    """

    kind: str
    target: str
    arguments: Sequence[str]


class Report(NamedTuple):
    """The output, the notices and the end of a process since its previous report.

    Attributes:
        stdout: New standard output.
        stderr: New standard error, including all that was written before the notices.
        notices: The notices of the process, as in the module `notices`.
        status: The exit status, `-n` after signal `n`; None while it runs.
    """

    stdout: bytes
    stderr: bytes
    notices: list[str]
    status: int | None


class CommandProcess:
    """One process of a command. Mutable: it holds the process and its pipes.

    Args:
        command: The command.
        environment: The environment variables.
        guard: Kills the process if this process ends.
        sends_answers: Whether a thread of the process writes an answer every second.

    Attributes:
        pid: The id of the process, and of its group.
        open_pipes: The pipes whose end was not read.
    """

    def __init__(self, command: Command, environment: Mapping[str, str], guard: Guard, sends_answers: bool):
        self._notices, notices = os.pipe()
        settings = [str(os.getpid()), str(notices), str(int(sends_answers)), command.kind, command.target]
        self._popen = start_child(
            [sys.executable, "-u", child.__file__, *settings, *command.arguments],
            {**environment, **guard.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[notices],
        )
        os.close(notices)
        self.pid, self._guard = self._popen.pid, guard
        guard.add(self.pid)
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self._pipes = [self._notices, self._popen.stdout.fileno(), self._popen.stderr.fileno()]
        for pipe in self._pipes:
            os.set_blocking(pipe, False)
        self.open_pipes = set(self._pipes)

    def report(self) -> Report:
        """Returns the output, the notices and the exit status since the last call."""
        status = exit_status(self._popen)
        notices, stdout, stderr = map(self._read, self._pipes)
        return Report(stdout, stderr, notices.decode().splitlines(), status)

    def send_signal(self, number: int, to_group: bool = False) -> None:
        """Sends a signal to the process, or to its process group."""
        send_signal(self._popen, number, to_group=to_group)

    def end(self) -> Report:
        """Kills the process and the processes in its group, closes the pipes, and returns the last report."""
        end_child(self._popen)
        self._guard.remove(self.pid)
        report = self.report()
        os.close(self._notices)
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()
        self.open_pipes.clear()
        return report

    def _read(self, pipe: int) -> bytes:
        parts: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while pipe in self.open_pipes and len(parts) < _MAX_READS:
                parts.append(os.read(pipe, _READ_BYTES))
                if not parts[-1]:
                    self.open_pipes.discard(pipe)
        return b"".join(parts)
