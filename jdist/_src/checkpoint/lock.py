"""A lock on a folder of checkpoints, so that one job at a time writes into it. Reading needs no lock.

The operating system releases the lock when the process ends, also by SIGKILL. Windows and file systems without locks are
not covered: there, two jobs in one folder are not noticed.
"""

import os
import pathlib
import weakref

from jdist._src.checkpoint.storage import MARKER_FILE, CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_locks: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()  # all that this process has made


class FolderLock:
    """The right to write into a folder of checkpoints, from its creation until `release`.

    Mutable: it can be released.

    Args:
        folder: The folder; it has the file that marks a folder of checkpoints.
        owner: The lock is released, too, when this object is garbage collected.

    Raises:
        CheckpointError: Another process, or another lock of this one, has it.
        OSError: The file cannot be opened.
    """

    def __init__(self, folder: pathlib.Path, owner: object):
        self._folder = folder
        self._file: int | None = None
        if fcntl is None:
            return
        file = _opened(folder / MARKER_FILE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise CheckpointError(self._refusal()) from None
        except OSError:  # this file system has no locks
            os.close(file)
            return
        self._file = file
        _locks.add(self)
        weakref.finalize(owner, self.release)

    def release(self) -> None:
        """Releases the lock; a second time, it does nothing."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _refusal(self) -> str:
        if any(lock._file is not None and lock._folder == self._folder for lock in _locks):
            return (
                f"Another `Checkpointer` of this process saves to {self._folder}. Close it first, by `with` or `close()`, or "
                "use one `Checkpointer` for both."
            )
        return f"Another process saves to {self._folder}. Use another folder, or end that process first: its lock ends with it."


def _opened(path: pathlib.Path) -> int:
    try:
        return os.open(path, os.O_RDWR)  # over NFS, an exclusive lock needs a file that can be written to
    except OSError:
        return os.open(path, os.O_RDONLY)


def _close_inherited() -> None:
    """A forked child inherits the files and would hold the locks after the end of its parent."""
    for lock in list(_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
