"""Daemon threads that are stopped when the interpreter exits: a thread inside JAX at that time crashes the process.

Threads that may never end are abandoned instead: the interpreter does not wait for them.
"""

import atexit
import concurrent.futures.thread as concurrent_futures_thread
import threading
import time
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

from jdist._src.core import activity

STOP_SECONDS = 5  # limit for waiting for threads that have been requested to end
# At exit, Python waits for the threads of all pools, also for daemons, and has no public function to change that.
_pool_threads: Any = concurrent_futures_thread._threads_queues
# Of the threads that have not ended; None after the function of one, which then still frees its arrays, a call of JAX.
_stop_functions: MutableMapping[threading.Thread, Callable[[], None] | None] = weakref.WeakKeyDictionary()


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
        _stop_functions[threading.current_thread()] = None


def pool_threads() -> set[threading.Thread]:
    """Returns the daemon threads of thread pools: those of pools that other daemon threads have started."""
    threads = (reference() for reference in _pool_threads.keyrefs())
    return {thread for thread in threads if thread is not None and thread.daemon}


def abandon(threads: Iterable[threading.Thread]) -> None:
    """Lets the interpreter exit without waiting for these daemon threads, and reports of hangs ignore them."""
    threads = list(threads)
    activity.abandon(threads)
    for thread in threads:
        _pool_threads.pop(thread, None)


@atexit.register
def _stop_threads() -> None:
    deadline = time.monotonic() + STOP_SECONDS
    for stop in filter(None, list(_stop_functions.values())):
        stop()
    for thread in list(_stop_functions):
        thread.join(max(0, deadline - time.monotonic()))
