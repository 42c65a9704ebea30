"""Requests to a cloud metadata server, with one deadline per request."""

import concurrent.futures
import contextlib
import http.client
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

MetadataResponse: TypeAlias = tuple[int, str | None, str]
_MAX_BYTES = 1 << 20


def metadata_server(variables: Mapping[str, str]) -> str:
    """Returns the host of the metadata server; the variables that Google's libraries read replace it."""
    return variables.get("GCE_METADATA_HOST") or variables.get("GCE_METADATA_IP") or "metadata.google.internal"


def get_attribute(deadline: float, server: str, path: str) -> MetadataResponse:
    """Returns status, `Metadata-Flavor` and text of the response to `GET path`. Retries if the server is busy (status 503).

    A socket timeout applies per read and per address, and does not cover the name lookup, so a server that sends one byte at a
    time could block this process. Therefore a thread sends the request, and is abandoned at the deadline.

    Args:
        deadline: The latest time of the response, on the clock of `time.monotonic`.
        server: Host, or `host:port`.
        path: The path to request.

    Raises:
        TimeoutError: The response is not complete at the deadline.
        OSError: The server cannot be reached.
        http.client.HTTPException: The response, or the address, is not HTTP.
        UnicodeError: The response is not text.
    """
    response: concurrent.futures.Future[MetadataResponse] = concurrent.futures.Future()

    def send() -> None:
        try:
            response.set_result(_request(deadline, server, path))
        except BaseException as error:  # raised where the response is awaited
            response.set_exception(error)

    # Not an executor: Python joins its threads at exit (https://github.com/python/cpython/issues/80961).
    threading.Thread(target=send, daemon=True).start()
    return response.result(timeout=max(deadline - time.monotonic(), 0))


def _request(deadline: float, server: str, path: str, pauses: Sequence[float] = (0.2, 0.5)) -> MetadataResponse:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    # Not `urllib`, which would use proxies and follow redirects.
    with contextlib.closing(http.client.HTTPConnection(server, timeout=remaining)) as connection:
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        with connection.getresponse() as response:
            if response.status != 503 or not pauses:
                text = response.read(_MAX_BYTES).decode().strip()
                return response.status, response.getheader("Metadata-Flavor"), text
    time.sleep(pauses[0])
    return _request(deadline, server, path, pauses[1:])
