"""Files and folders that are there whole or not at all, written by one process of several."""

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

Path: TypeAlias = str | os.PathLike[str]


def check_path(call: str, path: Any, second: Any = None) -> None:
    """Checks the first argument of a function that reads or writes files.

    Args:
        call: How the function is called, for the message: `weights.save(path, tree)`.
        path: The first argument.
        second: The second argument, to recognize swapped ones.

    Raises:
        TypeError: `path` is neither a string nor an `os.PathLike`.
    """
    if _is_path(path):
        return
    swapped = f" The path {os.fspath(second)!r} is the second argument: swap the two." if _is_path(second) else ""
    raise TypeError(
        f"`path` must be a string or an `os.PathLike`, got {type(path).__name__}.{swapped} Call `jdist.{call}`."
    )


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def write_on_process_0(
    path: Path,
    write: Callable[[pathlib.Path], None],
    may_replace: Callable[[pathlib.Path], bool] = pathlib.Path.is_file,
) -> None:
    """Has `write` make the file or folder `path`, on process 0; the others wait for it, and fail where it does.

    Args:
        path: Where it is to be, as in `replaced`.
        write: Called with the path of a new file or folder beside it.
        may_replace: As in `replaced`.

    Raises:
        FileNotFoundError: There is no folder for it.
        FileExistsError: There is something that may not be replaced.
        RuntimeError: Process 0 failed, and this is another.
    """
    problem: BaseException | None = None
    if jax.process_index() == 0:
        try:
            with replace_atomically(path, may_replace) as new:
                write(new)
        except BaseException as error:  # the others wait for a word of it, whatever it is
            problem = error
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = bool(multihost_utils.broadcast_one_to_all(np.int32(problem is not None)))
        if failed and problem is None:
            raise RuntimeError(f"Process 0 could not write {path}; it says why.")
    if problem is not None:
        raise problem


@contextlib.contextmanager
def replace_atomically(
    path: Path, may_replace: Callable[[pathlib.Path], bool] = pathlib.Path.is_file
) -> Iterator[pathlib.Path]:
    """The path of a new file or folder, to be written, that takes the place of `path` when all went well.

    Args:
        path: Where it is to be. What is there stays until the new one is whole. A link stays a link.
        may_replace: Whether what is there may be replaced.

    Raises:
        FileNotFoundError: There is no folder for it.
        FileExistsError: There is something that may not be replaced.
    """
    path = pathlib.Path(path).resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} to write {path.name} in. Make it first.")
    if path.exists() and not may_replace(path):
        raise FileExistsError(
            f"{path} is there already, and nothing of the kind that would be written. Take another path, or remove it."
        )
    new, old = (path.parent / f".{path.name}.{secrets.token_hex(4)}.{word}" for word in ("new", "old"))
    try:
        yield new
        _flush(new)
        if path.is_dir():  # no folder takes the place of another at once: between the two lines, it is at `old`
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


def _flush(path: pathlib.Path) -> None:
    """Has the disk take what was written, before its name does."""
    for file in path.iterdir() if path.is_dir() else [path]:
        with open(file, "rb+") as opened:
            os.fsync(opened.fileno())
