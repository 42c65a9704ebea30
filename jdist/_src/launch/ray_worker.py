"""The Ray actor of one process: it starts the process on its node, and returns the output that the process writes."""

import importlib
import os
import select
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from jdist._src.launch.child_processes import Guard
from jdist._src.launch.command import Command, CommandProcess, Report
from jdist._src.launch.variables import usable_cores


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


class RayWorker:
    """The Ray actor of one process. Mutable: it holds the process.

    All methods run in the main thread of the actor, with which Linux ends the process.
    """

    def __init__(self) -> None:
        self._port = socket.socket()
        self._process: CommandProcess | None = None
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

    def start(self, command: Command, folder: str, variables: Mapping[str, str], sends_answers: bool) -> None:
        """Starts the process.

        Args:
            command: The command.
            folder: The working directory.
            variables: Environment variables, in addition to the variables of the actor.
            sends_answers: Whether the process answers every second.

        Raises:
            FileNotFoundError: The folder or the script does not exist on this node.
        """
        os.chdir(folder)
        if command.kind == "script" and not os.path.isfile(command.target):
            raise FileNotFoundError(command.target)
        self._guard.__enter__()
        self._process = CommandProcess(command, {**os.environ, **variables}, self._guard, sends_answers)

    def poll(self, seconds: float) -> Report:
        """Returns a report, after at most `seconds`."""
        assert self._process is not None
        select.select(self._process.open_pipes, [], [], seconds)
        return self._process.report()

    def send_signal(self, number: int, to_group: bool) -> None:
        """Sends a signal to the process, or to its process group."""
        if self._process is not None:
            self._process.send_signal(number, to_group)

    def end(self) -> None:
        """Ends the process, and the processes that it started."""
        if self._process is not None:
            self._process.end()
            self._guard.__exit__()
