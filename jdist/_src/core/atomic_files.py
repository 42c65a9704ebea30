"""Atomic writes of files and folders: complete or absent. With several processes, process 0 writes."""

import contextlib
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from jdist._src.core import activity
from jdist._src.core.paths import absolute, as_path, is_file, is_url

Path: TypeAlias = str | os.PathLike[str]
_COPY_BYTES = 16 * 2**20


def check_path(call: str, path: Any, second: Any = None) -> None:
    """Checks the first argument of a function that reads or writes files.

    Args:
        call: How the function is called, for the message: `weights.save(path, tree)`.
        path: The first argument.
        second: The second argument, to recognize swapped ones.

    Raises:
        TypeError: `path` is neither a string nor an `os.PathLike`.
    """
    if isinstance(path, (str, os.PathLike)):
        return
    is_swapped = isinstance(second, (str, os.PathLike))
    swapped = f" The path {os.fspath(second)!r} is the second argument: swap the two." if is_swapped else ""
    raise TypeError(
        f"`path` must be a string or an `os.PathLike`, got {type(path).__name__}.{swapped} Call `jdist.{call}`."
    )


def write_on_process_0(
    path: Path,
    write: Callable[[pathlib.Path], None],
    may_replace: Callable[[pathlib.Path], bool] = is_file,
) -> None:
    """Writes the file or folder `path` atomically on process 0. The other processes wait, and raise if process 0 fails.

    Args:
        path: The final path, as in `replace_atomically`.
        write: Called with the path of a new file or folder beside `path`.
        may_replace: As in `replace_atomically`.

    Raises:
        FileNotFoundError: The parent folder does not exist.
        FileExistsError: `path` exists and `may_replace` returns False.
        RuntimeError: Process 0 failed, and this is another process.
    """
    problem: BaseException | None = None
    if jax.process_index() == 0:
        try:
            with activity.working(f"writes {path}"), replace_atomically(path, may_replace) as new:
                write(new)
        except BaseException as error:  # of any type: the other processes wait for the result
            problem = error
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        label = activity.Label(f"the write of {path} by process 0", is_collective=True)
        failed = bool(activity.launch(label, multihost_utils.broadcast_one_to_all, np.int32(problem is not None)))
        if failed and problem is None:
            raise RuntimeError(f"Process 0 could not write {path}. Its error states the reason.")
    if problem is not None:
        raise problem


@contextlib.contextmanager
def replace_atomically(path: Path, may_replace: Callable[[pathlib.Path], bool] = is_file) -> Iterator[pathlib.Path]:
    """Yields the local path of a new file or folder, which replaces `path` when the `with` block ends without an error.

    Args:
        path: The final path. An existing file or folder stays until the new one is complete. A link stays a link. To a URL,
            a file is copied when the block ends; an object store writes it completely or not at all.
        may_replace: Whether an existing file or folder may be replaced.

    Raises:
        FileNotFoundError: The parent folder does not exist.
        FileExistsError: `path` exists and `may_replace` returns False.
        ValueError: `path` is a URL, and the block writes a folder.
    """
    path = absolute(as_path(path))
    if is_url(path):
        with tempfile.TemporaryDirectory() as folder:
            new = pathlib.Path(folder) / path.name
            yield new
            if new.is_dir():
                raise ValueError(
                    f"The folder {path} cannot be written to a URL. Write it to a local path, and copy it."
                )
            with open(new, "rb") as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The folder {path.parent} does not exist. Create it before writing {path.name} to it.")
    if path.exists() and not may_replace(path):
        raise FileExistsError(
            f"{path} exists and is not a file or folder of the kind to be written. Use another path, or remove it."
        )
    new, old = (path.parent / f".{path.name}.{secrets.token_hex(4)}.{suffix}" for suffix in ("new", "old"))
    try:
        yield new
        for file in new.iterdir() if new.is_dir() else [new]:  # the content reaches the disk before the name does
            with open(file, "rb+") as opened:
                os.fsync(opened.fileno())
        if path.is_dir():  # a folder cannot replace a folder atomically: between the two renames it is at `old`
            path.rename(old)
        try:
            new.replace(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)
