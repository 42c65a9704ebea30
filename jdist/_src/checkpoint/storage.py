"""Files of checkpoints: a folder with a marker file and one folder per step, which orbax writes and reads.

    FOLDER/jdist.json                       marks a folder of checkpoints; the lock is held on it
    FOLDER/STEP/arrays/                     the arrays, in the format of orbax
    FOLDER/STEP/manifest/manifest.json      the manifest

orbax writes a step under a temporary name and renames it when it is complete. An old step is first moved to `.old` and then
deleted. So a folder with the name of a step is always complete, whenever a process ends. An object store cannot rename folders:
there, a complete step contains the file `commit_success.txt`.
"""

import gc
import os
import pathlib
import re
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.checkpoint.orbax_compat import configure_orbax, import_orbax
from jdist._src.checkpoint.read_limit import read_within_limit
from jdist._src.core.arguments import as_int
from jdist._src.core.paths import as_path, is_url, remove_tree
from jdist._src.core.source_lines import levels_to_user

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ARRAYS, MANIFEST = "arrays", "manifest"
MANIFEST_FILE = "manifest.json"
DELETED = ".old"
NO_ARRAYS = {"none": np.zeros(1)}  # in place of zero arrays, which orbax refuses
_COMMITTED_FILE = "commit_success.txt"  # of orbax
_SUPPORTED_URLS = ("gs://", "s3://")
_MARKER_FILE = "jdist.json"
_MARKER_TEXT = '{"holds": "checkpoints of jdist, one folder per step; STEP/manifest/manifest.json describes a step"}\n'


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The training state is unchanged.

    Example:
        >>> issubclass(jdist.CheckpointError, RuntimeError)
        True
    """


def short_message(error: BaseException) -> str:
    """Returns the message of the first cause of an error, in one line: errors of orbax are long and nested."""
    if isinstance(error, CheckpointError) or (isinstance(error, TimeoutError) and error.errno is None):
        return str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}."
    number = re.search(r"os_error_code='(\d+)'", str(error))
    if number:  # at the end of a long line
        return f"{os.strerror(int(number[1]))}."
    first_line, *_ = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {first_line[:400]}".rstrip(".") + "."


def write_error(folder: pathlib.Path, step: int, error: BaseException) -> CheckpointError:
    """Returns the error for a checkpoint that could not be written, with the steps of the complete checkpoints."""
    try:
        steps = complete_steps(folder)
        complete = (
            f"Complete checkpoints: {listed(steps)}." if steps else "The folder does not contain a complete checkpoint."
        )
    except OSError:
        complete = "The folder cannot be read either."
    return CheckpointError(
        f"The checkpoint of step {step} could not be written to {folder}: {short_message(error)} {complete}"
    )


def listed(steps: Sequence[int]) -> str:
    """Returns the text of at least one step.

    Example:
        >>> listed([3]), listed([3, 4])
        ('step 3', 'steps 3, 4')
    """
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def open_folder(path: Any) -> pathlib.Path:
    """Returns the absolute path of a folder of checkpoints. Creates the folder if it does not exist.

    Raises:
        ValueError: The path is a file or an unsupported URL, or the folder contains other files.
        ImportError: The package for this kind of URL is not installed.
        CheckpointError: The folder cannot be created, or the object store does not answer.
    """
    if is_url(path) and not os.fspath(path).startswith(_SUPPORTED_URLS):
        raise ValueError(
            f"`path` is the URL {str(path)!r}, and the arrays of checkpoints are written to {' and '.join(_SUPPORTED_URLS)} "
            "only. Mount the folder, and pass the path of the mounted folder."
        )
    folder = as_path(path)
    if is_url(folder):
        configure_orbax(folder)  # its error comes now, and not at the first save
    else:
        folder = folder.expanduser().resolve()
    try:
        _mark(folder)
    except ValueError:
        raise
    except Exception as error:  # an object store raises errors of the library of the store
        cause = f"{error.strerror}." if isinstance(error, OSError) and error.strerror else short_message(error)
        advice = (
            "Check the credentials, the region and the endpoint"
            if is_url(folder)
            else "Pass a folder with write permission"
        )
        raise CheckpointError(f"Checkpoints cannot be written to {folder}: {cause} {advice}.") from error
    return folder


def _mark(folder: pathlib.Path) -> None:
    """Creates the folder of checkpoints with its marker file, if it does not exist."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`path` is the file {folder}. Pass a folder for the checkpoints.")
    if (folder / _MARKER_FILE).exists():
        return
    names = sorted(child.name for child in folder.iterdir()) if folder.exists() else []
    if names and _MARKER_FILE not in names:  # another process may have written it by now
        raise ValueError(
            f"The folder {folder} contains other files ({', '.join(names[:3])}) and no {_MARKER_FILE}, which marks a folder of "
            "checkpoints. Pass a new or an empty folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER_FILE).write_text(_MARKER_TEXT)


def is_complete(folder: pathlib.Path, step: int) -> bool:
    """Returns whether a step has a complete checkpoint.

    In a file system, the folder of a step gets its name when it is complete. In an object store, orbax writes a file last.
    """
    return (folder / str(step) / _last_file(folder)).exists()


def _last_file(folder: pathlib.Path) -> str:
    return _COMMITTED_FILE if is_url(folder) else f"{MANIFEST}/{MANIFEST_FILE}"


def manifest_path(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Returns the path of the manifest of a step."""
    return folder / str(step) / MANIFEST / MANIFEST_FILE


def complete_steps(folder: pathlib.Path) -> tuple[int, ...]:
    """Returns the steps with a complete checkpoint, in ascending order."""
    steps = [int(child.name) for child in folder.iterdir() if child.name.isdecimal()]
    return tuple(sorted(step for step in steps if is_complete(folder, step)))


def incomplete_folders(folder: pathlib.Path, after: int) -> tuple[pathlib.Path, ...]:
    """Returns the folders of steps later than `after` that are not complete, in ascending order of their steps."""
    later = [child for child in folder.iterdir() if child.name.isdecimal() and int(child.name) > after]
    incomplete = [child for child in later if not is_complete(folder, int(child.name))]
    return tuple(sorted(incomplete, key=lambda child: int(child.name)))


def find_step(folder: pathlib.Path, step: int | None) -> int:
    """Returns `step`, or for None the step of the newest complete checkpoint.

    Raises:
        FileNotFoundError: The folder does not contain this checkpoint.
    """
    steps = complete_steps(folder)
    if step is None and steps:
        return steps[-1]
    missing = _last_file(folder)
    incomplete = "".join(f" {child} does not contain {missing}." for child in incomplete_folders(folder, -1))
    if step is None:
        raise FileNotFoundError(f"Found no complete checkpoint in {folder}.{incomplete}")
    if as_int("`step`", step, 0) not in steps:
        others = f"Complete steps: {', '.join(map(str, steps))}." if steps else "Complete steps: none."
        raise FileNotFoundError(f"Found no complete checkpoint of step {step} in {folder}. {others}{incomplete}")
    return step


def warn_of_incomplete(folder: pathlib.Path, newest: int | None) -> None:
    """Warns, on process 0, about incomplete folders of steps later than the newest complete checkpoint."""
    incomplete = incomplete_folders(folder, -1 if newest is None else newest)
    if not incomplete or jax.process_index() != 0:
        return
    complete = (
        "The folder does not contain a complete checkpoint."
        if newest is None
        else f"The newest complete checkpoint is that of step {newest}."
    )
    missing = _last_file(folder)
    effect = "deletes it" if is_url(folder) else f"renames the damaged folder to {incomplete[-1].name}.damaged"
    warnings.warn(
        f"{', '.join(map(str, incomplete))} is damaged: {missing} is missing. {complete} A `save` of the same step {effect}.",
        stacklevel=levels_to_user(),
    )


def rename_damaged(folder: pathlib.Path, step: int) -> None:
    """Renames the damaged folder of a step to `STEP.damaged`. An earlier folder of this name is deleted.

    In an object store, an incomplete folder is deleted: orbax would also delete the renamed one.
    """
    damaged = folder / f"{step}.damaged"
    if is_url(folder) and not is_complete(folder, step):
        remove_tree(folder / str(step))
    if (folder / str(step)).exists():
        remove_tree(damaged)
        (folder / str(step)).rename(damaged)


def remove_deleted(folder: pathlib.Path) -> None:
    """Deletes old checkpoints that orbax moved to `.old`."""
    if jax.process_index() == 0 and not is_url(folder):
        remove_tree(folder / DELETED)


def read_arrays(folder: pathlib.Path, step: int, shapes: Mapping[int, Any]) -> dict[int, Any]:
    """Returns the arrays of a checkpoint by their numbers.

    Args:
        folder: The folder of checkpoints.
        step: The step.
        shapes: For each array a `jax.ShapeDtypeStruct` with its sharding, or a numpy array of its shape and
            dtype, for an array on the host.

    Raises:
        CheckpointError: A file is damaged, or cannot be read.
        TimeoutError: The read has not ended at its limit.
    """
    configure_orbax(folder)
    path = folder / str(step) / ARRAYS
    enable_x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    def read() -> dict[int, Any]:
        with jax.enable_x64(enable_x64), jax.transfer_guard("allow"):  # pyright: ignore
            return _read_arrays(path, shapes)

    # Coroutines that orbax had created before an error are never awaited. Python warns of that when the error, which refers
    # to them, is garbage collected. Not in the thread, which would restore the filters of today whenever it ends.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        return read_within_limit(path, step, read)


def _read_arrays(path: Any, shapes: Mapping[int, Any]) -> dict[int, Any]:
    ocp = import_orbax()

    items = {str(number): shape for number, shape in shapes.items()}
    # Not with orbax's `Checkpointer`, which has barriers between the processes: a process that fails would not reach them.
    handler = ocp.PyTreeCheckpointHandler()
    try:
        items = items or NO_ARRAYS
        restore_args = ocp.checkpoint_utils.construct_restore_args(items)
        # Partial, because a checkpoint may contain further arrays.
        arrays = handler.restore(path, args=ocp.args.PyTreeRestore(items, restore_args, partial_restore=True))
        return {number: arrays[str(number)] for number in shapes}
    except Exception as error:
        message = short_message(error)
    finally:
        handler.close()
    gc.collect()  # while the filter of the caller applies
    raise CheckpointError(message)


class FolderLock:
    """A lock on a folder of checkpoints, so that only one job at a time writes into it. Reading does not need the lock.

    The lock is held from the creation until `release`, or until this object is garbage collected. The operating system releases
    it when the process ends, also by SIGKILL. On Windows, on file systems without locks and on object stores it has no effect.

    Mutable: it can be released.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: Another process, or another lock of this process, holds the lock.
        OSError: The marker file cannot be opened.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._close: weakref.finalize[Any, Any] | None = None
        if fcntl is None or is_url(folder):
            return
        try:
            file = os.open(folder / _MARKER_FILE, os.O_RDWR)  # over NFS, an exclusive lock needs a writable file
        except OSError:
            file = os.open(folder / _MARKER_FILE, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise CheckpointError(self._refusal()) from None
        except OSError:  # a file system without locks
            os.close(file)
            return
        self._close = weakref.finalize(self, os.close, file)
        _locks.add(self)

    def release(self) -> None:
        """Releases the lock. A second call has no effect."""
        if self._close is not None:
            self._close()

    def _refusal(self) -> str:
        if any(lock._close.alive and lock._folder == self._folder for lock in _locks if lock._close):
            return (
                f"Another `Checkpointer` of this process saves to {self._folder}. Close it first, with `with` or `close()`, or "
                "use one `Checkpointer` for both."
            )
        return (
            f"Another process saves to {self._folder}. Use another folder, or end that process first: its lock is released "
            "when it ends."
        )


_locks: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()  # all locks that this process has created


def _release_inherited_locks() -> None:
    """Releases the locks in a forked child, which inherits the files and would hold the locks longer than its parent."""
    for lock in list(_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_inherited_locks)
