"""Files of checkpoints: a folder of jdist's own, with a folder a step, which orbax reads and writes.

A step is written under another name, and renamed when it is complete. One that is too old is first moved aside, so that
what carries the name of a step is always whole, wherever a process ends. orbax takes a second to import, so it is imported
when it is needed.
"""

import asyncio
import functools
import gc
import logging
import os
import pathlib
import re
import shutil
import warnings
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

MARKER_FILE = "jdist.json"
_ABOUT = '{"holds": "checkpoints of jdist, a folder a step; STEP/manifest/manifest.json says what is in one"}\n'
ARRAYS, MANIFEST = "arrays", "manifest"
MANIFEST_FILE = "manifest.json"
DELETED = ".old"

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or not be read. The state that was to be saved is as it was.

    Example:
        >>> issubclass(CheckpointError, RuntimeError)
        True
    """


def short_message(error: BaseException) -> str:
    """What an error of orbax, or of the system, comes down to."""
    if isinstance(error, CheckpointError):
        return str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}."
    number = re.search(r"os_error_code='(\d+)'", str(error))
    if number:  # at the end of a long line
        return f"{os.strerror(int(number[1]))}."
    first, *_ = str(error).strip().splitlines() or ["it says nothing"]
    return f"{type(error).__name__}: {first[:400]}".rstrip(".") + "."


def open_folder(path: Any) -> pathlib.Path:
    """The folder of checkpoints at `path`, made if there is none.

    Raises:
        ValueError: There is something else.
        CheckpointError: It cannot be made.
    """
    if "://" in str(path):
        raise ValueError(f"`path` is {str(path)!r}, and checkpoints are files: mount it, and give the folder.")
    folder = pathlib.Path(path).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`path` is the file {folder}. Give a folder for the checkpoints.")
    if (folder / MARKER_FILE).exists():
        return folder
    names = sorted(child.name for child in folder.iterdir()) if folder.exists() else []
    if names and MARKER_FILE not in names:  # which another process may have written by now
        raise ValueError(
            f"`path` is {folder}, which has other things in it ({', '.join(names[:3])}) and no {MARKER_FILE}, the sign of "
            "a folder of checkpoints. Give a new folder, or an empty one."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER_FILE).write_text(_ABOUT)
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints cannot be written to {folder}: {error.strerror or error}. Give a folder that can be written to."
        ) from error
    return folder


def complete_steps(folder: pathlib.Path) -> tuple[int, ...]:
    """The steps with a complete checkpoint, in ascending order."""
    found = [
        child
        for child in folder.iterdir()
        if child.name.isdecimal() and manifest_path(folder, int(child.name)).exists()
    ]
    return tuple(sorted(int(child.name) for child in found))


def incomplete_folders(folder: pathlib.Path, after: int) -> tuple[pathlib.Path, ...]:
    """Returns the folders of steps later than `after` that have no manifest, in ascending order of their steps."""
    found = [child for child in folder.iterdir() if child.name.isdecimal() and int(child.name) > after]
    missing = [child for child in found if not manifest_path(folder, int(child.name)).exists()]
    return tuple(sorted(missing, key=lambda child: int(child.name)))


def set_aside(folder: pathlib.Path, step: int) -> None:
    """Renames the damaged folder of a step to `STEP.damaged`, in place of an earlier one of this name."""
    damaged = folder / f"{step}.damaged"
    if (folder / str(step)).exists():
        shutil.rmtree(damaged, ignore_errors=True)
        (folder / str(step)).rename(damaged)


def manifest_path(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Where the manifest of a step is."""
    return folder / str(step) / MANIFEST / MANIFEST_FILE


def read(folder: pathlib.Path, step: int, shapes: Mapping[int, Any]) -> dict[int, Any]:
    """The arrays of a checkpoint, by their numbers.

    Args:
        folder: The folder of checkpoints.
        step: Which one.
        shapes: For each array a `jax.ShapeDtypeStruct` with the sharding in which it is read, or a numpy array like it.

    Raises:
        CheckpointError: A file is damaged, or cannot be read.
    """
    import orbax.checkpoint as ocp

    silence_orbax()
    wanted = {str(number): shape for number, shape in shapes.items()}
    # What orbax had begun when it gave up is never awaited, and Python says so when the error, which holds it, is gone.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        # Not by a `Checkpointer`, which lets the processes wait for each other: one that fails would not come.
        handler = ocp.StandardCheckpointHandler()
        try:
            where: Any = folder / str(step) / ARRAYS
            found = handler.restore(where, args=ocp.args.StandardRestore(wanted or {"none": np.zeros(1)}))
            return {number: found[str(number)] for number in shapes}
        except Exception as error:
            problem = short_message(error)
        finally:
            handler.close()
        gc.collect()
    raise CheckpointError(problem)


def empty_deleted(folder: Any) -> None:
    """Deletes what was moved aside."""
    if jax.process_index() == 0:
        shutil.rmtree(pathlib.Path(folder) / DELETED, ignore_errors=True)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in pathlib.Path(record.pathname).parts


@functools.cache
def silence_orbax() -> None:
    """Makes orbax print nothing: neither its log nor tracebacks of reads and writes that end after an error.

    Errors are raised with messages of jdist.
    """
    logging.getLogger("absl").addFilter(_is_not_of_orbax)
    from orbax.checkpoint._src import asyncio_utils

    # orbax closes its event loop at the first error. A read or write that ends later finds the loop closed, and Python
    # prints a traceback. orbax has no option for it, and all of its loops run in this function.
    run_sync = getattr(asyncio_utils, "run_sync", None)
    if run_sync is not None:
        asyncio_utils.run_sync = lambda coro: run_sync(_until_all_end(coro))


async def _until_all_end(coro: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `coro` when all other tasks of its event loop have ended too."""
    try:
        return await coro
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
