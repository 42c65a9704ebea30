"""The rendezvous: process 0 compares all processes before they join JAX's coordination service.

The service ends all processes with SIGABRT, which Python cannot catch, if one is missing or has another version, or if two have
the same index; and a process that connects later with such an index ends a job that already runs. So the processes first
connect to process 0 at the coordinator's address, where the service does not listen yet. Process 0 answers each with the same
result: "join", or the error that all of them raise.
"""

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import jax

from jdist._src.cluster.settings import check_coordinator
from jdist._src.core.connections import json_line, listen, read_lines
from jdist._src.core.version import __version__

_LOG = logging.getLogger("jdist")
_PROTOCOL = "jdist-rendezvous-1"
_PROGRESS_SECONDS = 2.0  # between two messages of process 0 to the processes that wait
_WARNING_SECONDS = 30.0  # between two log messages
_FIRST_WARNING_SECONDS = 10.0
_ANSWER_SECONDS = 10.0  # for the first answer of process 0
_RETRY_SECONDS = 0.05
_LATE_SECONDS = 3.0  # in which further processes still receive the error
_SERVICE_SECONDS = 2.0  # for the start of JAX's service
_PROBE_SECONDS = 1.0  # between two connections of process 0 to its address


@dataclasses.dataclass(frozen=True)
class Participant:
    """The description of a process, which it sends to process 0.

    Attributes:
        index: The index of the process.
        count: The number of processes that it expects.
        jax: The version of JAX.
        jdist: The version of jdist.
        program: The file name of its script, or the name of its module.
        host: The name of its machine.
        pid: Its process id.
    """

    index: int
    count: int
    jax: str
    jdist: str
    program: str
    host: str
    pid: int

    @classmethod
    def this_process(cls, index: int, count: int) -> "Participant":
        """Returns the description of this process."""
        return cls(index, count, jax.__version__, __version__, _program(), socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        return f"process {self.index} on {self.host} (pid {self.pid})"


def compare_processes(address: str, index: int, count: int, timeout_seconds: float, bind_host: str = "") -> None:
    """Returns when all processes have connected to process 0 and may join JAX's coordination service.

    Args:
        address: Host and port of the coordinator; process 0 listens there.
        index: The index of this process.
        count: The number of processes.
        timeout_seconds: The time in which all processes must connect.
        bind_host: The address of the interface at which process 0 listens; empty for all.

    Raises:
        ValueError: The address is not a host and a port.
        RuntimeError: The processes do not fit together, or some of them are missing; the same on all that are connected. Or
            process 0 cannot listen at the port, or this process cannot reach it.
    """
    host, port = split_address(address)
    participant = Participant.this_process(index, count)
    if index == 0:
        _Coordinator(host, port, bind_host, participant).run(time.monotonic() + timeout_seconds)
    else:
        _connect_to_process_0(host, port, participant, timeout_seconds)


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `"host:port"`; of `"[::1]:8476"`, the host without brackets.

    Raises:
        ValueError: It is not a host and a port.

    Example:
        >>> split_address("10.0.0.1:8476"), split_address("[::1]:8476")
        (('10.0.0.1', 8476), ('::1', 8476))
    """
    host, _, port = check_coordinator(address, "The coordinator's address").rpartition(":")
    return host.strip("[]"), int(port)


def await_service(address: str) -> None:
    """Waits until JAX's coordination service listens, at most 2 seconds. Called after `compare_processes`, except on process 0.

    JAX would try a refused connection again only a second later.

    Args:
        address: Host and port of the coordinator.
    """
    deadline = time.monotonic() + _SERVICE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(split_address(address), timeout=_SERVICE_SECONDS).close()
            return
        time.sleep(0.01)


class _Coordinator:
    """Process 0: receives the descriptions of the other processes, compares them, and sends the result to all of them.

    Mutable: it holds the connections.

    Args:
        host: The host of the coordinator's address.
        port: Its port.
        bind_host: The address of the interface to listen on; empty for all.
        this: This process.
    """

    def __init__(self, host: str, port: int, bind_host: str, this: Participant):
        self._host, self._port, self._bind_host, self._this = host, port, bind_host, this
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytes] = {}
        self._participants: dict[socket.socket, Participant] = {}
        self._problem = ""
        self._token = uuid.uuid4().hex

    def run(self, deadline: float) -> None:
        """Receives the other processes until all are connected, one does not fit, or the time is over.

        Raises:
            RuntimeError: Process 0 cannot listen, a process does not fit, or some are missing.
        """
        start = next_progress = time.monotonic()
        next_warning = start + _FIRST_WARNING_SECONDS
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            self._selector.register(stack.enter_context(self._listen()), selectors.EVENT_READ)
            stack.enter_context(self._probes())
            while self._missing() and time.monotonic() < deadline:
                self._receive(0.1)
                if self._problem:
                    deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
                if time.monotonic() >= next_progress:
                    next_progress += _PROGRESS_SECONDS
                    self._send({"missing": self._missing()})
                if time.monotonic() >= next_warning and not self._problem:
                    next_warning += _WARNING_SECONDS
                    _LOG.warning("%s", self._waiting_text(time.monotonic() - start))
            if self._missing() and not self._problem:
                self._problem = (
                    f"{self._waiting_text(time.monotonic() - start)} Check that each was started and has not failed, and that "
                    "its machine can reach this address: the name resolves there, and no firewall closes the port."
                )
            self._send({"error": self._problem} if self._problem else {"join": True})
        if self._problem:
            raise RuntimeError(self._problem)

    def _listen(self) -> socket.socket:
        """Returns the socket that accepts connections."""
        in_use = self._cannot_listen("another program, or another process 0, already accepts connections at this port")
        if problem := self._probe(in_use):
            raise RuntimeError(problem)
        try:
            # A launcher may hold the port with a socket that does not listen, which needs `reuse_port`. JAX's service sets it.
            return listen(self._bind_host, self._port, reuse_port=True)
        except OSError as error:
            raise RuntimeError(self._cannot_listen(error.strerror or str(error))) from error

    def _cannot_listen(self, reason: str) -> str:
        return (
            f"The coordinator's address is {self._host}:{self._port}, and this is process 0, which listens there: {reason}. "
            "Choose another port in the address, the same on every process, or end the program that uses it."
        )

    @contextlib.contextmanager
    def _probes(self) -> Iterator[None]:
        """Connects to the address, to find another process 0 there, while other processes are missing.

        Two processes with the index 0 do not connect to each other otherwise: each would wait for the other processes, also at
        the same port, which they can share.
        """
        end = threading.Event()

        def probe() -> None:
            while not end.wait(_PROBE_SECONDS):
                problem = self._probe("")  # the address may be that of a proxy
                if problem and not end.is_set():
                    self._problem = self._problem or problem

        threading.Thread(target=probe, daemon=True).start()
        try:
            yield
        finally:
            end.set()

    def _probe(self, other_program: str) -> str:
        """Returns the error of another process 0 that listens at the address, or `other_program` if another program does.

        An empty string if this process listens there, or none.
        """
        try:
            with socket.create_connection((self._host, self._port), timeout=1) as connection:
                lines = read_lines(connection)
                try:
                    greeting = json.loads(next(lines))
                    if greeting["protocol"] != _PROTOCOL:
                        return other_program
                    if greeting["token"] == self._token:
                        return ""
                except (ValueError, TypeError, KeyError, OSError):
                    return other_program
                connection.settimeout(_ANSWER_SECONDS)
                connection.sendall(json_line(dataclasses.asdict(self._this)))
                while "error" not in (message := json.loads(next(lines))):
                    pass
                return message["error"]
        except OSError:  # the address cannot be reached from here, or the other process has ended
            return ""

    def _receive(self, seconds: float) -> None:
        """Accepts connections and reads messages for some time."""
        for key, _ in self._selector.select(seconds):
            connection: Any = key.fileobj
            if connection not in self._received:
                self._accept(connection)
                continue
            try:
                data = connection.recv(4096)
            except OSError:
                data = b""
            if not data:  # the process has closed the connection: it, or one that replaces it, may connect again
                self._forget(connection)
                continue
            self._received[connection] += data
            if b"\n" in data or len(self._received[connection]) > 4096:
                self._add(connection)

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.setblocking(False)
            self._received[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)
            connection.sendall(json_line({"protocol": _PROTOCOL, "token": self._token}))

    def _add(self, connection: socket.socket) -> None:
        try:
            participant = Participant(**json.loads(self._received[connection]))
            if any(type(value) is not type(getattr(self._this, name)) for name, value in vars(participant).items()):
                raise TypeError
        except (ValueError, TypeError):  # another program, or `jax.distributed.initialize` without jdist
            _LOG.warning("A program that does not use jdist connected to process 0 at port %d.", self._port)
            self._forget(connection)
            return
        self._problem = self._problem or self._difference(participant)
        self._participants[connection] = participant

    def _difference(self, other: Participant) -> str:
        """Returns why `other` cannot join; an empty string if it can."""
        this = self._this
        if other.count != this.count:
            return (
                f"The processes expect different numbers of processes: {this} expects {this.count}, and {other} {other.count}. "
                "Start all with the same number."
            )
        if not 0 <= other.index < this.count:
            valid = f"{this.count} processes have the indices 0 to {this.count - 1}"
            return f"An index is out of range: {other}, but {valid}. Correct it."
        taken = next((one for one in (this, *self._participants.values()) if one.index == other.index), None)
        if taken is not None:
            first, second = sorted((_location(taken), _location(other)))  # two processes 0 report the same text
            return (
                f"Two processes have the index {other.index}: {first} and {second}. Give each of the {this.count} processes "
                f"its own index, from 0 to {this.count - 1}."
            )
        for name in ("jax", "jdist"):
            if getattr(other, name) != getattr(this, name):
                return (
                    f"The processes have different versions of {name}: {this} has {getattr(this, name)}, and {other} has "
                    f"{getattr(other, name)}. Install the same version on every machine."
                )
        if other.program != this.program:
            return (
                f"The processes run different programs: {this} runs {this.program}, and {other} runs {other.program}. Start "
                "the same script on every process."
            )
        return ""

    def _missing(self) -> list[int]:
        present = {0, *(participant.index for participant in self._participants.values())}
        return [index for index in range(self._this.count) if index not in present]

    def _waiting_text(self, seconds: float) -> str:
        missing = self._missing()
        names = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return (
            f"After {seconds:.0f} seconds, {names} of {self._this.count} "
            f"ha{'ve' if len(missing) > 1 else 's'} not joined process 0 at {self._host}:{self._port}."
        )

    def _send(self, message: dict[str, Any]) -> None:
        for connection in list(self._participants):
            try:
                connection.sendall(json_line(message))
            except OSError:
                self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._received.pop(connection)
        self._participants.pop(connection, None)
        connection.close()

    def _close(self) -> None:
        for connection in list(self._received):
            self._forget(connection)
        self._selector.close()


def _connect_to_process_0(host: str, port: int, this: Participant, timeout_seconds: float) -> None:
    """Connects to process 0, again until it answers, and waits for its result."""
    start, reason = time.monotonic(), ""
    next_warning = start + _FIRST_WARNING_SECONDS
    while (remaining := start + timeout_seconds - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(remaining, _ANSWER_SECONDS)) as connection:
                connection.settimeout(_ANSWER_SECONDS)
                _await_result(connection, this, f"{host}:{port}", start, timeout_seconds)
                while connection.recv(4096):  # until process 0 has closed its port
                    pass
                return
        except OSError as error:  # also where the name is not known: in a new cluster, it may be soon
            reason = error.strerror or str(error) or type(error).__name__
        if time.monotonic() > next_warning:
            next_warning += _WARNING_SECONDS
            waited = time.monotonic() - start
            _LOG.warning(
                "Process %d has tried for %.0f seconds to reach process 0 at %s:%d: %s.",
                this.index,
                waited,
                host,
                port,
                reason,
            )
        time.sleep(_RETRY_SECONDS)
    raise RuntimeError(
        f"Process {this.index} (on {this.host}) could not reach process 0 at {host}:{port} within {timeout_seconds:.0f} "
        f"seconds: {reason}. Check that process 0 was started and has not failed, that this is the address of its machine, and "
        "that no firewall closes the port."
    )


def _await_result(
    connection: socket.socket, this: Participant, address: str, start: float, timeout_seconds: float
) -> None:
    """Waits until process 0 lets this process join.

    Raises:
        RuntimeError: Another program listens there, or the processes do not fit together, or some of them are missing.
        OSError: The connection is lost.
    """
    lines, missing = read_lines(connection), []
    problem = ""
    try:
        if json.loads(next(lines))["protocol"] != _PROTOCOL:
            problem = "answered, but not as process 0 of a jdist program does"
    except (ValueError, TypeError, KeyError):
        problem = "answered, but not as process 0 of a jdist program does"
    except TimeoutError:
        problem = f"accepts connections, and did not answer within {_ANSWER_SECONDS:.0f} seconds"
    if problem:
        raise RuntimeError(
            f"Process {this.index} cannot join: a program at {address} {problem}. Either another program uses this port: "
            "choose another one. Or process 0 called `jax.distributed.initialize` itself, or its group is complete without "
            f"this process: check the number of processes and the index {this.index}."
        )
    connection.sendall(json_line(dataclasses.asdict(this)))
    next_warning = start + _FIRST_WARNING_SECONDS
    while True:
        now = time.monotonic()
        if now > start + timeout_seconds + _ANSWER_SECONDS:
            raise RuntimeError(
                f"Process {this.index} has waited for {now - start:.0f} seconds at {address}, and the processes {missing} have "
                "not joined. Check that each was started and has not failed."
            )
        message = json.loads(next(lines))
        if "error" in message:
            raise RuntimeError(message["error"])
        if "join" in message:
            return
        missing = message["missing"]
        if now > next_warning:
            next_warning += _WARNING_SECONDS
            _LOG.warning("Process %d waits at %s for the processes %s.", this.index, address, missing)


def _location(participant: Participant) -> str:
    return f"{participant.host} (pid {participant.pid}, {participant.program})"


def _program() -> str:
    """Returns the file name of the script, or the name of the module after `-m`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec else os.path.basename(getattr(main, "__file__", None) or "(interactive)")
