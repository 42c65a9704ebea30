"""Daemon threads that are stopped when the interpreter exits: a thread inside JAX at that time crashes the process."""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdist._src.core import activity

STOP_SECONDS = 5  # limit for waiting for threads that have been requested to end
_stop_functions: dict[threading.Thread, Callable[[], None]] = {}  # of the running threads


def start_thread(
    target: Callable[..., None], args: Sequence[Any], *, name: str, stop: Callable[[], None]
) -> threading.Thread:
    """Starts and returns a daemon thread that calls `target(*args)`.

    Args:
        target: The function of the thread.
        args: Its arguments.
        name: The name of the thread.
        stop: Requests the thread to end. Called when the interpreter exits, which then waits for the thread for up to
            `STOP_SECONDS`.
    """
    thread = threading.Thread(target=_run, args=(target, *args), name=name, daemon=True)
    _stop_functions[thread] = stop
    thread.start()
    return thread


def _run(target: Callable[..., None], *args: Any) -> None:
    try:
        with activity.background_thread():
            target(*args)
    finally:
        _stop_functions.pop(threading.current_thread(), None)


@atexit.register
def _stop_threads() -> None:
    deadline = time.monotonic() + STOP_SECONDS
    for stop in list(_stop_functions.values()):
        stop()
    for thread in list(_stop_functions):
        thread.join(max(0, deadline - time.monotonic()))
