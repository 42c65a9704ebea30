"""Saves that are not finished: the interpreter waits for them at exit, and ends with exit status 1 if one of them fails.

Without it, the interpreter would stop the thread pools of orbax before a checkpoint is complete, and orbax's threads would end
without a word, or wait for each other forever.
"""

import atexit
import concurrent.futures.thread as concurrent_futures_thread
import contextlib
import functools
import os
import pathlib
import sys
import threading
import weakref
from typing import Any, NamedTuple

from jdist._src.checkpoint.storage import FolderLock
from jdist._src.checkpoint.writer import Writer

_EXIT_STATUS = 1


class _Unfinished(NamedTuple):
    """A save that may be in progress.

    Attributes:
        owner: The checkpointer that has started the save. The program may drop it: `Checkpointer(path).save(1, state)`.
        lock: The lock on the folder, which must not end with the owner either; None if this process does not hold it.
    """

    owner: weakref.ref[Any]
    lock: FolderLock | None


_unfinished: dict[Writer, _Unfinished] = {}


def add(writer: Writer, owner: Any, lock: FolderLock | None) -> None:
    """Lets the interpreter wait at exit until the write of `writer` is complete, unless it is removed before.

    Raises:
        RuntimeError: The interpreter is exiting, in a function of `atexit`.
    """
    if not threading.main_thread().is_alive():
        raise RuntimeError("the interpreter is exiting, and cannot start the threads that write")
    _install_exit_function()
    _unfinished[writer] = _Unfinished(weakref.ref(owner), lock)


def remove(writer: Writer) -> None:
    """Removes a writer whose write is complete, or whose error was raised."""
    _unfinished.pop(writer, None)


def finish_dropped(folder: pathlib.Path) -> None:
    """Waits for the saves into a folder whose owners do not exist any more. Their errors are printed."""
    for writer, save in list(_unfinished.items()):
        if writer.folder == folder and save.owner() is None:
            _finish(writer, save)


def _finish(writer: Writer, save: _Unfinished) -> None:
    try:
        writer.finish()
    except Exception as error:
        _end_with_failure(str(error))
    finally:
        remove(writer)
        if save.lock is not None and save.owner() is None:
            save.lock.release()


@functools.cache
def _install_exit_function() -> None:
    # A function of `atexit` would run too late: when `concurrent.futures` has stopped its thread pools. Python has no public
    # function for it; those of this one run in reverse order, so `concurrent.futures` has to be imported before.
    _ = concurrent_futures_thread
    threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]


def _finish_all() -> None:
    try:
        while _unfinished:
            _finish(*next(iter(_unfinished.items())))
    except KeyboardInterrupt:
        count = len(_unfinished) + 1  # with the one that was removed while the interrupt was raised
        _print(f"Interrupted while {count} checkpoint{'s were' if count > 1 else ' was'} being written at exit.")
        _exit()  # now: the threads that write are not daemons, and would be waited for again


def _end_with_failure(message: str) -> None:
    """Prints a message, and lets the interpreter end with the exit status of a failure."""
    _print(f"{message} The program ends with exit status {_EXIT_STATUS}.")
    atexit.unregister(_exit)
    atexit.register(_exit)


def _print(message: str) -> None:
    with contextlib.suppress(Exception):  # of any type: the stream may be replaced or closed
        print(f"jdist: {message}", file=sys.stderr, flush=True)


def _exit() -> None:
    """Ends the process as the interpreter would, except for the exit status, which Python lets no exit function change."""
    atexit.unregister(_exit)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # as above
            stream.flush()
    os._exit(_EXIT_STATUS)


if hasattr(os, "register_at_fork"):  # a forked child has no threads that write
    os.register_at_fork(after_in_child=_unfinished.clear)
