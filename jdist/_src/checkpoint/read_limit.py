"""A limit for reads of a checkpoint: a file system or an object store may never answer, and no signal ends such a read."""

import concurrent.futures
import contextvars
import logging
import pathlib
from collections.abc import Callable
from typing import TypeVar

from jdist._src.core import activity
from jdist._src.core.background_threads import abandon, pool_threads, start_thread
from jdist._src.core.source_lines import caller_text
from jdist._src.faults.time_limit import WARNING_INTERVAL, WORK_LIMIT, seconds_of

T = TypeVar("T")
_LOG = logging.getLogger("jdist")
_POLL_SECONDS = 0.5  # interval in which the wait reacts to Ctrl-C: a signal that arrives just before it does not end it


def read_limits() -> tuple[float, float]:
    """Returns the seconds between two warnings about a read, and the limit of a read.

    Raises:
        ValueError: The variable `JDIST_WARNING_SECONDS` or `JDIST_WORK_SECONDS` is not a positive number.
    """
    return seconds_of("JDIST_WARNING_SECONDS", WARNING_INTERVAL), seconds_of("JDIST_WORK_SECONDS", WORK_LIMIT)


def read_within_limit(path: pathlib.Path, step: int, read: Callable[[], T]) -> T:
    """Returns `read()`, which runs in a thread. A warning every 30 seconds reports that it has not ended.

    The variables `JDIST_WARNING_SECONDS` and `JDIST_WORK_SECONDS` change the interval and the limit. Time in which this process
    is stopped does not count. After the limit, or Ctrl-C, the thread is abandoned: the interpreter waits a few seconds
    for it when it exits.

    Args:
        path: The file or folder that is read.
        step: The step of the checkpoint.
        read: Reads it. JAX's configuration contexts do not apply in it, since they are thread-local.

    Raises:
        TimeoutError: The read has not ended at the limit.
    """
    interval, limit = read_limits()
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    other_threads = pool_threads()
    args = (result, contextvars.copy_context(), read)
    try:
        thread = start_thread(_read, args, name="jdist checkpoint read", stop=None)
    except RuntimeError:  # the interpreter exits, and cannot start threads
        return read()
    try:
        with activity.working(f"reads {path}"):
            _wait(result, f"The read of {path}, of the checkpoint of step {step}", interval, limit)
    finally:
        if not result.done():
            abandon([thread, *(pool_threads() - other_threads)])
    try:
        return result.result()
    finally:
        del result, args  # an error refers to this frame


def _read(result: "concurrent.futures.Future[T]", context: contextvars.Context, read: Callable[[], T]) -> None:
    try:
        result.set_result(context.run(read))
    except BaseException as error:  # of any type: it is raised in the thread that waits
        result.set_exception(error)
        del result  # as above


def _wait(result: "concurrent.futures.Future[T]", subject: str, interval: float, limit: float) -> None:
    waited, next_warning = 0.0, interval
    while True:
        seconds = min(_POLL_SECONDS, next_warning - waited, limit - waited)
        if concurrent.futures.wait([result], seconds).done:
            return
        waited += seconds
        if waited < min(next_warning, limit):
            continue
        line = caller_text()
        if waited >= limit:
            raise TimeoutError(
                f"{subject}{line}, has not ended after {limit:g} seconds: the file system or the object store does not "
                "answer. Check the store and the connection to it, and start the program again; the checkpoint may be "
                "undamaged. The environment variable JDIST_WORK_SECONDS changes the limit."
            )
        _LOG.warning("%s%s, has not ended after %.0f seconds.", subject, line, waited)
        next_warning += interval
