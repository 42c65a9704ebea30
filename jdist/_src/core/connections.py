"""TCP connections that carry one JSON object per line."""

import json
import socket
from collections.abc import Iterator
from typing import Any


def is_loopback(host: str) -> bool:
    """Whether `host` is a name or an address of the loopback interface."""
    return host in ("localhost", "::1") or host.startswith("127.")


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Returns a socket that accepts connections at a port.

    Args:
        host: The address of the interface; empty for all.
        port: The port.
        reuse_port: Whether other sockets that permit it may have the port, too.

    Raises:
        OSError: The port is in use, or the address does not belong to this machine.
    """
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    server = socket.create_server(
        (host, port), family=family, backlog=1024, reuse_port=reuse_port, dualstack_ipv6=is_dual
    )
    server.setblocking(False)
    return server


def json_line(message: dict[str, Any]) -> bytes:
    r"""Returns a message as a line of JSON.

    Example:
        >>> json_line({"index": 1})
        b'{"index": 1}\n'
    """
    return json.dumps(message).encode() + b"\n"


def read_lines(connection: socket.socket) -> Iterator[bytes]:
    """Yields the lines that a connection receives.

    Raises:
        ConnectionError: The other process closed the connection.
        TimeoutError: No line came within the time limit of the socket.
    """
    buffer = b""
    while True:
        while b"\n" not in buffer:
            data = connection.recv(4096)
            if not data:
                raise ConnectionResetError("the other process closed the connection")
            buffer += data
        line, _, buffer = buffer.partition(b"\n")
        yield line
