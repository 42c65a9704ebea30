"""What callbacks ask of their arguments."""

import math
import os
import pathlib
from typing import Any

import numpy as np


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError if `value` is no positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value < math.inf:
        raise ValueError(f"`{name}` is a positive number of seconds, got {value!r}.")


def check_function(name: str, value: Any, of: str) -> None:
    """Raises TypeError if `value` cannot be called."""
    if not callable(value):
        raise TypeError(f"`{name}` is a function of {of}, got {type(value).__name__}.")


def path_of(name: str, value: Any) -> pathlib.Path:
    """`value` as a path.

    Raises:
        TypeError: It is none.
        ValueError: It is empty.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`{name}` is a path, got {type(value).__name__}.")
    if not os.fspath(value):
        raise ValueError(f"`{name}` is empty: say where to write.")
    return pathlib.Path(value)  # pyright: ignore[reportArgumentType]


def make_directory(path: pathlib.Path) -> None:
    """Makes a directory that can be written to.

    Raises:
        ValueError: It cannot be made, or not be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The directory {str(path)!r} cannot be made: {error}. Give one that can.") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"The directory {str(path)!r} cannot be written to. Give one that can.")
