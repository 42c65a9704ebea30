"""Source lines of the user's code: where an equation was traced, an error raised, or jdist called."""

import functools
import os
import sys
import sysconfig
import traceback
from typing import NamedTuple

import jax

from jdist._src.core.jax_compat import Equation


class Frame(NamedTuple):
    """A line of source code.

    Attributes:
        file: Path of the file.
        line: Line number, from 1.
        function: Name of the function that contains the line.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.line}"


def equation_frame(equation: Equation) -> Frame | None:
    """Returns the innermost frame of user code that traced `equation`; if only libraries did, the innermost frame of those.

    None if jdist traced it to place an argument on the replicas.
    """
    stack = equation.source_info.traceback
    frames = [Frame(f.file_name, f.line_num, f.function_name) for f in stack.frames] if stack else []
    outside_jax = [frame for frame in frames if not _absolute(frame.file).startswith(_folders("jax", "jaxlib"))]
    if not outside_jax or _absolute(outside_jax[0].file).startswith(_VALUES_PACKAGE):
        return None
    user_frames = (frame for frame in outside_jax if not _in_library(_absolute(frame.file)))
    return next(user_frames, outside_jax[0])


def error_frame(error: BaseException) -> Frame | None:
    """Returns the innermost frame of user code in the traceback of `error`."""
    frames = [Frame(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    outside_jax = [f for f in frames if not _absolute(f.file).startswith(_folders("jax", "jaxlib"))]
    return next((f for f in reversed(outside_jax) if not _in_library(_absolute(f.file))), None)


def caller_frame() -> Frame | None:
    """Returns the innermost frame of user code on the current call stack."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        file = _absolute(code.co_filename)
        if not file.startswith(_folders("jax", "jaxlib")) and not _in_library(file):
            return Frame(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def is_in_jdist(frame: Frame) -> bool:
    """Whether `frame` is a line of jdist."""
    return _absolute(frame.file).startswith(_JDIST)


def is_from_file(equation: Equation, package: str, file_name_part: str) -> bool:
    """Whether `equation` was traced in a file of `package` whose name contains `file_name_part`."""
    stack = equation.source_info.traceback
    files = [_absolute(frame.file_name) for frame in stack.frames] if stack else []
    return any(file.startswith(_folders(package)) and file_name_part in os.path.basename(file) for file in files)


def _in_library(file: str) -> bool:
    in_standard = file.startswith(sysconfig.get_paths()["stdlib"]) and "site-packages" not in file
    return in_standard or file.startswith(_folders("flax", "optax", "chex")) or file.startswith(_JDIST)


@functools.cache
def _folders(*packages: str) -> tuple[str, ...]:
    # Packages are searched beside jax, so that none has to be imported for this.
    site = os.path.dirname(os.path.dirname(_absolute(jax.__file__)))
    return tuple(os.path.join(site, name) + os.sep for name in packages)


@functools.cache
def _absolute(file: str) -> str:
    return os.path.abspath(file)


_JDIST = os.path.dirname(os.path.dirname(os.path.dirname(_absolute(__file__)))) + os.sep
_VALUES_PACKAGE = os.path.join(_JDIST, "_src", "values") + os.sep  # places arguments on the devices
