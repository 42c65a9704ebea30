"""One request to a metadata server, with a deadline for all of it."""

import concurrent.futures
import contextlib
import http.client
import threading
import time
from collections.abc import Sequence
from typing import TypeAlias

MetadataResponse: TypeAlias = tuple[int, str | None, str]
_MOST_BYTES = 1 << 20


def get_attribute(deadline: float, server: str, path: str) -> MetadataResponse:
    """Status, `Metadata-Flavor` and text of the server's answer to `GET path`; a busy server is asked again.

    The time-out of a socket is one per read and per address, and does not cover the look-up of the name: a server that sends
    a byte now and then would hold this process. So a thread sends the request, and is abandoned at the deadline.

    Args:
        deadline: When to give up, on the clock of `time.monotonic`.
        server: Host, or `host:port`.
        path: What to request.

    Raises:
        TimeoutError: There is no complete answer at the deadline.
        OSError: The server cannot be reached.
        http.client.HTTPException: The answer, or the address, is not HTTP.
        UnicodeError: The answer is not text.
    """
    answer: concurrent.futures.Future[MetadataResponse] = concurrent.futures.Future()
    # Not an executor: Python joins its threads when the program ends.
    threading.Thread(target=_settle, args=(answer, deadline, server, path), daemon=True).start()
    return answer.result(timeout=max(deadline - time.monotonic(), 0))


def _settle(answer: concurrent.futures.Future[MetadataResponse], deadline: float, server: str, path: str) -> None:
    try:
        answer.set_result(_answer(deadline, server, path))
    except BaseException as error:  # raised where the answer is awaited
        answer.set_exception(error)


def _answer(deadline: float, server: str, path: str, pauses: Sequence[float] = (0.2, 0.5)) -> MetadataResponse:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    # Not `urllib`, which would go through a proxy, and follow where another server sends it.
    with contextlib.closing(http.client.HTTPConnection(server, timeout=remaining)) as connection:
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        with connection.getresponse() as response:
            if response.status != 503 or not pauses:
                return (
                    response.status,
                    response.getheader("Metadata-Flavor"),
                    response.read(_MOST_BYTES).decode().strip(),
                )
    time.sleep(pauses[0])
    return _answer(deadline, server, path, pauses[1:])
