"""Saves that are not finished: the interpreter waits for them at exit, and ends with exit status 1 if one of them fails.

Without this wait, the interpreter would stop the thread pools of orbax before a checkpoint is complete, and orbax's threads
would end silently, or wait for each other forever.
"""

import functools
import os
import pathlib
import weakref
from typing import Any

from jdist._src.checkpoint.storage import FolderLock
from jdist._src.checkpoint.writer import Writer
from jdist._src.core import exit_work

# For each save that may be in progress: its checkpointer, which the program may drop (`Checkpointer(path).save(1, state)`), and
# the lock on the folder, which must not end with the checkpointer either; None if this process does not hold it.
_unfinished: dict[Writer, tuple[weakref.ref[Any], FolderLock | None]] = {}


def add(writer: Writer, owner: Any, lock: FolderLock | None) -> None:
    """Lets the interpreter wait at exit until the write of `writer` is complete, unless it is removed before.

    Raises:
        RuntimeError: The interpreter is exiting, in a function of `atexit`.
    """
    owner_ref = weakref.ref(owner)
    if not exit_work.add(writer, functools.partial(_finish, writer, owner_ref, lock), "a checkpoint was being written"):
        raise RuntimeError("the interpreter is exiting, and cannot start the threads that write")
    _unfinished[writer] = owner_ref, lock


def remove(writer: Writer) -> None:
    """Removes a writer whose write is complete, or whose error was raised."""
    exit_work.remove(writer)
    _unfinished.pop(writer, None)


def finish_dropped(folder: pathlib.Path) -> None:
    """Waits for the saves into a folder whose checkpointers were garbage collected. Their errors are printed."""
    for writer, (owner, lock) in list(_unfinished.items()):
        if writer.folder == folder and owner() is None:
            _finish(writer, owner, lock)


def _finish(writer: Writer, owner: weakref.ref[Any], lock: FolderLock | None) -> None:
    try:
        writer.finish()
    except Exception as error:
        exit_work.end_with_failure(str(error))
    finally:
        remove(writer)
        if lock is not None and owner() is None:
            lock.release()


if hasattr(os, "register_at_fork"):  # a forked child has no threads that write
    os.register_at_fork(after_in_child=_unfinished.clear)
