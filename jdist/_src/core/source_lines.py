"""Lines of source code: where the user's own code made an equation, raised an error, or calls jdist."""

import functools
import os
import sys
import sysconfig
import traceback
from typing import NamedTuple

import jax

from jdist._src.core.jax_compat import Equation


class Frame(NamedTuple):
    """A place in source code.

    Attributes:
        file: Path of the file.
        line: Line number, from 1.
        function: Name of the function that the line is in.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        here = os.getcwd() + os.sep
        return f"{self.file.removeprefix(here)}:{self.line}"


def equation_frame(equation: Equation) -> Frame | None:
    """The line of the user's own code that made `equation`: the innermost that is in no library below the user.

    None if jdist made it by itself, to bring an argument to the replicas.
    """
    stack = equation.source_info.traceback
    frames = [Frame(f.file_name, f.line_num, f.function_name) for f in stack.frames] if stack else []
    outside_jax = [frame for frame in frames if not _absolute(frame.file).startswith(_folders("jax", "jaxlib"))]
    if not outside_jax or _absolute(outside_jax[0].file).startswith(_PLACING):
        return None
    own = (frame for frame in outside_jax if not _in_library(_absolute(frame.file)))
    return next(own, outside_jax[0])


def error_frame(error: BaseException) -> Frame | None:
    """Returns the innermost line of the user's own code that `error` passed through."""
    frames = [Frame(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    outside_jax = [f for f in frames if not _absolute(f.file).startswith(_folders("jax", "jaxlib"))]
    return next((f for f in reversed(outside_jax) if not _in_library(_absolute(f.file))), None)


def is_in_jdist(frame: Frame) -> bool:
    """Whether a line is one of jdist's own."""
    return _absolute(frame.file).startswith(_JDIST)


def caller_frame() -> Frame | None:
    """The innermost line of the user's own code that is running now, on the host."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        file = _absolute(code.co_filename)
        if not file.startswith(_folders("jax", "jaxlib")) and not _in_library(file):
            return Frame(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def is_from_file(equation: Equation, package: str, word: str) -> bool:
    """Whether a file of `package` with `word` in its name made `equation`."""
    stack = equation.source_info.traceback
    files = [_absolute(frame.file_name) for frame in stack.frames] if stack else []
    return any(file.startswith(_folders(package)) and word in os.path.basename(file) for file in files)


def _in_library(file: str) -> bool:
    in_standard = file.startswith(sysconfig.get_paths()["stdlib"]) and "site-packages" not in file
    return in_standard or file.startswith(_folders("flax", "optax", "chex")) or file.startswith(_JDIST)


@functools.cache
def _folders(*packages: str) -> tuple[str, ...]:
    # The folders beside jax: a package that is not imported need not be imported for this.
    site = os.path.dirname(os.path.dirname(_absolute(jax.__file__)))
    return tuple(os.path.join(site, name) + os.sep for name in packages)


@functools.cache
def _absolute(file: str) -> str:
    return os.path.abspath(file)


_JDIST = os.path.dirname(os.path.dirname(os.path.dirname(_absolute(__file__)))) + os.sep
_PLACING = os.path.join(_JDIST, "_src", "values") + os.sep
