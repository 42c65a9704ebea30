"""Daemon threads that are stopped when the interpreter exits: a thread inside JAX at that time crashes the process.

A thread that may never end is abandoned: the interpreter waits a few seconds for it, and not at all for the pools that it uses.
"""

import atexit
import concurrent.futures.thread as concurrent_futures_thread
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jdist._src.core import activity

STOP_SECONDS = 5  # limit for waiting for threads that have been requested to end
# At exit, Python waits for the threads of all pools, also for daemons, and does not have a public function to change that
# (https://github.com/python/cpython/issues/80961).
_pool_threads: Any = concurrent_futures_thread._threads_queues
# Of the threads that have not ended: one whose function has returned may still free its arrays, which is a call of JAX. It then
# keeps no function, which may reference the thread.
_stop_functions: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None] | None] = weakref.WeakKeyDictionary()


def start_thread(
    target: Callable[..., None], args: Sequence[Any], *, name: str, stop: Callable[[], None] | None
) -> threading.Thread:
    """Starts and returns a daemon thread that calls `target(*args)`.

    Args:
        target: The function of the thread.
        args: Its arguments.
        name: The name of the thread.
        stop: Requests the thread to end; None if it ends without a request. Called when the interpreter exits, which then
            waits for the thread for up to `STOP_SECONDS`.
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
    """Returns the daemon threads of thread pools, which other daemon threads have started."""
    threads = (reference() for reference in _pool_threads.keyrefs())
    return {thread for thread in threads if thread is not None and thread.daemon}


def abandon(threads: Iterable[threading.Thread]) -> None:
    """Lets the interpreter exit although these daemon threads never end, and reports of hangs ignore them."""
    threads = list(threads)
    activity.abandon(threads)
    for thread in threads:
        _pool_threads.pop(thread, None)


@atexit.register
def _stop_threads() -> None:
    deadline = time.monotonic() + STOP_SECONDS
    # Not an iteration over the dict: another thread may start one meanwhile.
    threads = [thread for reference in _stop_functions.keyrefs() if (thread := reference()) is not None]
    for thread in threads:
        if (stop := _stop_functions[thread]) is not None:
            stop()
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
