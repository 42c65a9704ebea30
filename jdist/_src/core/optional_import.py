"""Imports of packages that an extra of jdist installs."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def optional_import(purpose: str, requirement: str) -> Iterator[None]:
    """Lets a failed import in the block raise an error with the command that installs the package.

    Args:
        purpose: The beginning of the message, "Charts need matplotlib".
        requirement: The argument of pip, "jdist[plot]".

    Raises:
        ModuleNotFoundError: The package is not installed, or a package or library that it needs.

    Example:
        >>> with optional_import("Charts need matplotlib", "jdist[plot]"):
        ...     import matplotlib
    """
    try:
        yield
    except ImportError as error:
        command = f'`python -m pip install "{requirement}"`'
        raise ModuleNotFoundError(
            f"{purpose}, which cannot be imported ({error}): {command}.", name=error.name
        ) from error
