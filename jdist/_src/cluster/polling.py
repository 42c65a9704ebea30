"""Repeated requests to a service until all processes of a cluster run."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def poll(request: Callable[[float], tuple[T, Exception | None]], timeout_seconds: float) -> T:
    """Returns the result of the first request without a problem. Raises the problem at the deadline.

    The pauses between the requests are 0.1 to 5 seconds.

    Args:
        request: Returns a result and its problem or None. It receives the deadline, on the clock of `time.monotonic`.
        timeout_seconds: The time limit for all requests together.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = 0.1
    while True:
        result, problem = request(deadline)
        if problem is None:
            return result
        if time.monotonic() + pause > deadline:
            raise problem
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
