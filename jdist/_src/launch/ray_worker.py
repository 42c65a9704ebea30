"""The Ray actor of one process: it starts the process on its node, and returns the output that the process writes."""

import contextlib
import importlib
import os
import select
import socket
import subprocess
from collections.abc import Mapping
from typing import Any, NamedTuple

from jdist._src.launch.attempt import Program, start_program
from jdist._src.launch.child_processes import Guard, end_child, exit_status, send_signal
from jdist._src.launch.notices import Notice, parse_notices
from jdist._src.launch.variables import usable_cores

_READ_BYTES = 1 << 16


class Node(NamedTuple):
    """The node of an actor.

    Attributes:
        id: The identifier of the node.
        address: The IP address of the node.
        cores: The number of cores that the actor can use.
    """

    id: str
    address: str
    cores: int


class Report(NamedTuple):
    """What happened to a process since the report before.

    Attributes:
        stdout: New standard output.
        stderr: New standard error.
        notices: The notices of the process.
        status: The exit status, after all output was reported; else None.
    """

    stdout: bytes
    stderr: bytes
    notices: list[Notice]
    status: int | None


class RayWorker:
    """The Ray actor of one process. Mutable: it holds the process.

    All methods run in the main thread of the actor, with which Linux ends the process.
    """

    def __init__(self) -> None:
        self._port = socket.socket()
        self._popen: subprocess.Popen[bytes] | None = None
        self._guard = Guard()

    def node(self) -> Node:
        """Returns the node."""
        ray: Any = importlib.import_module("ray")
        return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), usable_cores())

    def reserve_port(self) -> int:
        """Returns a port that no other program of the node gets while the actor exists."""
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port.bind(("", 0))
        return self._port.getsockname()[1]

    def start(
        self, program: Program, index: int, folder: str, variables: Mapping[str, str], sends_answers: bool
    ) -> None:
        """Starts the process.

        Args:
            program: The program.
            index: The index of the process.
            folder: The working directory.
            variables: Environment variables, in addition to the variables of the actor.
            sends_answers: Whether the process answers every second.

        Raises:
            FileNotFoundError: The folder or the script does not exist on this node.
        """
        os.chdir(folder)
        if program.kind == "script" and not os.path.isfile(program.target):
            raise FileNotFoundError(program.target)
        self._guard.__enter__()
        self._notices, notices = os.pipe()
        environment = {**os.environ, **variables, **self._guard.variables}
        self._popen = start_program(program, index, environment, notices, sends_answers=sends_answers)
        self._guard.add(self._popen.pid)
        os.close(notices)
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self._pipes = [self._popen.stdout.fileno(), self._popen.stderr.fileno(), self._notices]
        for pipe in self._pipes:
            os.set_blocking(pipe, False)
        self._open = set(self._pipes)

    def poll(self, seconds: float) -> Report:
        """Returns a report, after at most `seconds`."""
        assert self._popen is not None
        status = exit_status(self._popen)
        if status is None:
            select.select(self._open, [], [], seconds)
        stdout, stderr, notices = map(self._read, self._pipes)
        if stdout or stderr:
            status = None  # further output may follow
        return Report(stdout, stderr, list(parse_notices(notices)), status)

    def send_signal(self, number: int, to_group: bool) -> None:
        """Sends a signal to the process, or to its process group."""
        if self._popen is not None:
            send_signal(self._popen, number, to_group=to_group)

    def end(self) -> None:
        """Ends the process, and the processes that it started."""
        if self._popen is not None:
            end_child(self._popen)
            self._guard.remove(self._popen.pid)
            self._guard.__exit__()

    def _read(self, pipe: int) -> bytes:
        data: Any = b""
        if pipe in self._open:
            with contextlib.suppress(BlockingIOError):
                data = os.read(pipe, _READ_BYTES)
                if not data:
                    self._open.discard(pipe)
        return data
