"""Checks of the arguments of callbacks."""

import os
import pathlib
from typing import Any


def check_function(name: str, value: Any, argument: str) -> None:
    """Raises TypeError if the argument `name` is not a function of `argument`."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function of {argument}, got {type(value).__name__}.")


def as_path(name: str, value: Any) -> pathlib.Path:
    """Returns the argument `name` as a path.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`{name}` must be a path, got {type(value).__name__}.")
    if not os.fspath(value):
        raise ValueError(f"`{name}` must not be empty.")
    return pathlib.Path(value)  # pyright: ignore[reportArgumentType]


def make_directory(path: pathlib.Path) -> None:
    """Makes a directory, and checks that it is writable.

    Raises:
        ValueError: The directory cannot be made, or is not writable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The directory {str(path)!r} cannot be made: {error}. Pass another path.") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"The directory {str(path)!r} is not writable. Pass another path.")
