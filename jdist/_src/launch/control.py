"""The connections between the launchers of several machines: machine 0 listens, the others connect and stay connected."""

import contextlib
import selectors
import socket
import time
from typing import NamedTuple

from jdist._src.core.connections import is_loopback, listen
from jdist._src.launch.attempt import AttemptSettings
from jdist._src.launch.job import Job
from jdist._src.launch.messages import Alive, Finish, Hello, Message, decode, encode

_ALIVE_SECONDS = 1.0  # between two signs of life
_SEND_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_MESSAGE_SECONDS = 30.0
_FIRST_MESSAGE_SECONDS = 1.0
_CLOSE_SECONDS = 2.0  # in which machines read the end of the job
_STALE_SECONDS = 5.0  # without a message, so that the same machine can connect again
_MAX_LINE_BYTES = 1 << 20


class ConnectionLostError(Exception):
    """The connection to another machine has ended."""


class JobConnection:
    """A connection that carries messages.

    Mutable: it holds the socket, the incomplete line, and the time of the last message in each direction.

    Args:
        connection: The socket.
        limit_seconds: The time without a message after which the connection is lost.
    """

    def __init__(self, connection: socket.socket, limit_seconds: float):
        connection.setblocking(False)
        self.socket, self._limit_seconds = connection, limit_seconds
        self._received, self._send_error = b"", ""
        self._last_received = self._last_sent = time.monotonic()

    def send(self, message: Message) -> None:
        """Sends a message. If the connection is lost, `receive` reports it."""
        self._last_sent = time.monotonic()
        try:
            self.socket.settimeout(_SEND_SECONDS)
            self.socket.sendall(encode(message))
            self.socket.setblocking(False)
        except OSError as error:
            self._send_error = error.strerror or str(error)

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived, and sends a sign of life if none was sent for a second.

        Raises:
            ConnectionLostError: The other launcher has ended, sends something else, or has sent nothing for too long.
        """
        now = time.monotonic()
        if now - self._last_sent > _ALIVE_SECONDS:
            self.send(Alive())
        lines = self._read_lines()
        if self._send_error and not lines:
            raise ConnectionLostError(self._send_error)
        if lines:
            self._last_received = now
        elif now - self._last_received > self._limit_seconds:
            raise ConnectionLostError(f"no answer for {self._limit_seconds:g} seconds")
        try:
            return [message for message in map(decode, lines) if not isinstance(message, Alive)]
        except ValueError as error:
            raise ConnectionLostError(f"it has sent something that is {error}") from error

    def silent_seconds(self) -> float:
        """Returns the time since the last message from the other launcher."""
        return time.monotonic() - self._last_received

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()

    def _read_lines(self) -> list[bytes]:
        try:
            data = self.socket.recv(_MAX_LINE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionLostError(error.strerror or str(error)) from error
        if not data:
            raise ConnectionLostError("its launcher has ended")
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _MAX_LINE_BYTES:
            raise ConnectionLostError("it has sent a line without an end")
        return lines


class Address(NamedTuple):
    """Host and port where machine 0 listens for the launchers of the other machines."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ControlServer:
    """The connections of machine 0 to the other machines.

    Mutable: it holds the connections.

    Args:
        address: Where to listen.
        own: The message with which machine 0 would introduce itself; the others must fit to it.
        job: Receives the machines and their messages.
        limit_seconds: The time without a message after which a machine is lost.

    Raises:
        ValueError: The port is in use.
    """

    def __init__(self, address: Address, own: Hello, job: Job, limit_seconds: float):
        self._own, self._job, self._limit_seconds = own, job, limit_seconds
        self._selector = selectors.DefaultSelector()
        self._new: list[JobConnection] = []
        self._machines: dict[int, JobConnection] = {}
        try:
            self._server = listen(address.host if is_loopback(address.host) else "", address.port)
        except OSError as error:
            raise ValueError(
                f"port {address.port}, which follows the port of --coordinator, cannot be used on this machine for the "
                f"connections between the launchers: {error.strerror}. Pass another port on all machines."
            ) from error
        self._selector.register(self._server, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Returns a file that is readable when a message has arrived."""
        return self._selector.fileno()  # pyright: ignore[reportAttributeAccessIssue]  # of epoll and kqueue

    def poll(self) -> None:
        """Passes messages to the job, and accepts connections."""
        for machine, connection in list(self._machines.items()):
            try:
                for message in connection.receive():
                    self._job.receive(machine, message)
            except ConnectionLostError as error:
                self._lose(machine, str(error))
        with contextlib.suppress(OSError):
            while True:
                connection = JobConnection(self._server.accept()[0], self._limit_seconds)
                self._selector.register(connection.socket, selectors.EVENT_READ)
                self._new.append(connection)
        for connection in list(self._new):
            self._read_hello(connection)

    def close(self) -> None:
        """Closes the connections, after the other machines have read the end of the job."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._machines and time.monotonic() < deadline:
            self._selector.select(0.1)
            self.poll()
        for connection in (*self._new, *self._machines.values()):
            self._close(connection)
        self._selector.close()
        self._server.close()

    def _read_hello(self, connection: JobConnection) -> None:
        try:
            messages = connection.receive()
            if not messages:
                return
        except ConnectionLostError:  # another program, or a launcher that has ended
            messages = []
        self._new.remove(connection)
        hello = messages[0] if messages else None
        if not isinstance(hello, Hello):
            self._close(connection)
        elif problem := self._problem(hello):
            connection.send(Finish(2, problem))
            self._close(connection)
            self._job.refuse(hello.name, problem)
        else:
            self._machines[hello.machine] = connection
            self._job.connect(hello.machine, hello.name, connection.send)

    def _problem(self, hello: Hello) -> str:
        """Returns why a machine cannot take part; an empty string if it can."""
        own = self._own
        if hello.machine not in range(own.num_machines):
            return f"there is no machine {hello.machine!r}."
        for name, label in _COMPARED.items():
            if getattr(hello, name) != getattr(own, name):
                return (
                    f"machine {hello.machine} ({hello.name}) has {label} {getattr(hello, name)!r}, but machine 0 "
                    f"({own.name}) has {getattr(own, name)!r}. Run the same command on every machine."
                )
        previous = self._machines.get(hello.machine)
        if previous is not None and previous.silent_seconds() > _STALE_SECONDS:
            self._lose(hello.machine, "it has connected again")
        elif previous is not None or hello.machine == 0:
            return f"two launchers have --node-rank {hello.machine}. Give each machine its own index."
        return ""

    def _lose(self, machine: int, reason: str) -> None:
        self._close(self._machines.pop(machine))
        self._job.disconnect(machine, reason)

    def _close(self, connection: JobConnection) -> None:
        self._selector.unregister(connection.socket)
        connection.close()


_COMPARED = {
    "protocol": "the protocol",
    "num_machines": "--nodes",
    "num_slots": "the number of processes",
    "program": "the program",
}


def connect_to_job(address: Address, hello: Hello, join_seconds: float, settings: AttemptSettings) -> JobConnection:
    """Returns the connection of another machine to machine 0.

    Args:
        address: Where machine 0 listens.
        hello: The first message.
        join_seconds: The time in which machine 0 must accept the connection.
        settings: The settings of the attempts.

    Raises:
        ValueError: Machine 0 could not be reached.
        InterruptedError: This process has received a signal.
    """
    start = time.monotonic()
    next_message = start + _FIRST_MESSAGE_SECONDS
    while not settings.signals.numbers:
        try:
            connection = socket.create_connection(address, timeout=5.0)
            if connection.getsockname() == connection.getpeername():  # Linux has assigned the port of the address to it
                connection.close()
                raise ConnectionRefusedError("nothing listens there")
            job_connection = JobConnection(connection, settings.answer_seconds)
            job_connection.send(hello)
            return job_connection
        except OSError as error:  # also where the name is not known: in a new cluster, it may be soon
            reason = error.strerror or str(error) or type(error).__name__
        now = time.monotonic()
        if now > start + join_seconds:
            raise ValueError(
                f"machine 0 could not be reached at {address} within {join_seconds:g} seconds: {reason}. Check that `jdist "
                "run` was started there with the same options, and that no firewall closes this port, which follows the port "
                "of --coordinator."
            )
        if now > next_message:
            next_message = now + _MESSAGE_SECONDS
            settings.console.message(f"tries to reach machine 0 at {address}: {reason}.")
        time.sleep(_RETRY_SECONDS)
    raise InterruptedError("A signal was received before the connection was established.")
