"""Checks of arguments that are paths."""

import os
import pathlib
from typing import Any

from jdist._src.core import paths


def path_argument(name: str, value: Any) -> pathlib.Path:
    """Returns the argument `name` as a path.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty, or a URL of an unknown kind.
        ImportError: The package for this kind of URL is not installed.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`{name}` must be a path, got {type(value).__name__}.")
    if not os.fspath(value):
        raise ValueError(f"`{name}` must not be empty.")
    return paths.as_path(value)


def local_path_argument(name: str, value: Any) -> pathlib.Path:
    """Returns the argument `name` as a path of the local file system.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty, or a URL.
    """
    if isinstance(value, (str, os.PathLike)) and paths.is_url(value):
        raise ValueError(f"`{name}` must be a path of a local file system, got the URL {os.fspath(value)!r}.")
    return path_argument(name, value)


def make_directory(path: pathlib.Path) -> None:
    """Makes a directory, and checks that it is writable. Object stores do not have directories, so a URL is not checked.

    Raises:
        ValueError: The directory cannot be made, or is not writable.
    """
    if paths.is_url(path):
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The directory {str(path)!r} cannot be made: {error}. Pass another path.") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"The directory {str(path)!r} is not writable. Pass another path.")
