"""Paths: local ones as `pathlib.Path`, and URLs of object stores, such as `gs://`, as `etils.epath.Path`.

`epath` is a dependency of orbax. Its paths have the methods of `pathlib.Path`; the functions here cover the differences. An
object store writes an object when it is closed, completely or not at all. It does not have empty folders, links or locks.
"""

import functools
import importlib.util
import os
import pathlib
import re
import shutil
from typing import Any

from jdist._src.core.optional_import import optional_import

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://")
_COLLAPSED_URL = re.compile(r"(gs|s3|az|hf):/[^/]")
# The name in fsspec, and the argument of pip for the package, of each scheme.
_SCHEMES = {
    "gs": ("gcs", "jdist[gcs]"),
    "s3": ("s3", "jdist[s3]"),
    "az": ("az", "adlfs"),
    "hf": ("hf", "huggingface_hub"),
}


def as_path(path: Any) -> pathlib.Path:
    """Returns a path: a local one as `pathlib.Path`, a URL as `epath.Path`, which has its methods.

    Raises:
        ValueError: The URL has an unknown scheme, or was passed through `pathlib.Path`, which changes it.
        ImportError: The package for the scheme is not installed; the message contains the command that installs it.

    Example:
        >>> as_path("run/log.csv").name, is_url(as_path("run/log.csv"))
        ('log.csv', False)
    """
    text = os.fspath(path)
    if _COLLAPSED_URL.match(text):
        raise ValueError(f"The path {text!r} is a URL that `pathlib.Path` has changed. Pass the URL as a string.")
    if not (url := _URL.match(text)):
        return pathlib.Path(path)
    if url[1] not in _SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise ValueError(
            f"The path {text!r} is a URL of an unknown kind. jdist reads and writes local paths, {schemes}."
        )
    from etils import epath

    name, requirement = _SCHEMES[url[1]]
    if url[1] != "gs" or importlib.util.find_spec("tensorflow") is None:
        import fsspec

        _use_fsspec()
        with optional_import(f"Paths such as {text!r} need a package", requirement):
            fsspec.get_filesystem_class(name)
    return epath.Path(text)  # pyright: ignore[reportReturnType]


@functools.cache
def _use_fsspec() -> None:
    """Makes epath use fsspec for all URLs except `gs://`, also where TensorFlow is installed.

    epath prefers TensorFlow, which implements `gs://` only.
    """
    from etils import epath
    from etils.epath import backend, gpath

    @epath.register_path_cls([f"{scheme}://" for scheme in _SCHEMES if scheme != "gs"])
    class _FsspecPath(gpath.PosixGPath):
        @property
        def _backend(self) -> backend.Backend:
            return backend.fsspec_backend


def is_url(path: Any) -> bool:
    """Returns whether a path is a URL, not a path of the local file system."""
    return _URL.match(os.fspath(path)) is not None


def absolute(path: pathlib.Path) -> pathlib.Path:
    """Returns the absolute path, without links. A URL is returned unchanged."""
    return path if is_url(path) else path.resolve()


def is_file(path: pathlib.Path) -> bool:
    """Returns whether a path is a file."""
    return path.exists() and not path.is_dir()


def remove_tree(path: Any) -> None:
    """Removes a folder with its contents, if it exists. Errors of the local file system are ignored."""
    if is_url(path):
        path.rmtree(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def append_text(path: pathlib.Path, text: str) -> None:
    """Appends `text` to a file. An object of a store is written again: it cannot be appended to."""
    if is_url(path):
        path.write_text((path.read_text() if path.exists() else "") + text)
        return
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)
