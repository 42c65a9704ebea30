"""Child processes: each leads its own process group, and is ended together with the processes that it started."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from jdist._src.launch import guard


def start_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts a process with an empty standard input, in its own process group: Ctrl-C interrupts only the parent.

    Args:
        command: The program and its arguments.
        environment: The environment variables.
        stdout: The standard output.
        stderr: The standard error.
        pass_fds: Open files that the process inherits.
    """
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        process_group=0,
    )


def exit_status(child: subprocess.Popen[bytes]) -> int | None:
    """Returns the exit status of a process, `-n` after signal `n`, or None while it runs.

    The process stays a zombie where the system permits this, so that the system does not assign its id to another process yet.
    """
    if child.returncode is not None or not hasattr(os, "waitid"):
        return child.poll()
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def send_signal(child: subprocess.Popen[bytes], number: int, *, to_group: bool = False) -> None:
    """Sends a signal to a process that was not waited for, or to its process group."""
    if child.returncode is None:  # otherwise another process may have its id
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if to_group else os.kill)(child.pid, number)


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Kills a process, if it was not waited for, and the processes in its group; waits for its end."""
    send_signal(child, signal.SIGKILL, to_group=True)
    child.wait()


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """Returns an address on the loopback interface that no other program gets while the block runs.

    The socket does not listen. The coordinator can bind the same port, because gRPC sets SO_REUSEPORT too.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


class Guard:
    """A process that kills the added process groups when the block ends, or this process for any reason.

    On Linux it also kills the processes that have left their group, in a session of their own. They inherit a mark as an
    environment variable.

    Mutable: it stores the groups. Use it as a context manager.

    Attributes:
        variables: The environment variables of the processes to kill.
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self.variables = {guard.MARK: self._mark}

    def __enter__(self) -> "Guard":
        # In a new session, it does not end together with the process group or the terminal of this process. Without the mark,
        # it outlives a launcher that is a process of another launch.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            env={name: value for name, value in os.environ.items() if name != guard.MARK},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._send(f"={self._mark}\n")
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def has_members(self, groups: Sequence[int]) -> bool:
        """Whether a process of a group, or with the mark, is running. Only Linux lists them: elsewhere False."""
        for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
                if state != "Z" and int(group) in groups:
                    return True
        return bool(guard.marked_processes(self._mark))

    def add(self, group: int) -> None:
        """Adds a process group."""
        self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Removes a process group, before the system can assign its id to another one."""
        self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
