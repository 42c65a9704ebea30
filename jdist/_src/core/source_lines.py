"""Source lines of the user's code: where an equation was traced, an error raised, or jdist called."""

import functools
import linecache
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation


def levels_to_user() -> int:
    """Returns the `stacklevel` for a warning in the caller that names the first frame outside this package."""
    package = f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}"
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, levels = frame.f_back, levels + 1
    return levels


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
        cell = _cell_name(self.file)
        return f"{cell}, line {self.line}" if cell else f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.line}"


def _cell_name(file: str) -> str | None:
    """Returns "cell In[3]" for the temporary file of a notebook cell, as IPython's tracebacks do."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    format_code_name = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: None)
    name = format_code_name(file)
    return f"cell {name[1]}" if name else None


def equation_frame(equation: Equation) -> Frame | None:
    """Returns the innermost frame of user code that traced `equation`; if only libraries did, their innermost frame.

    None if jdist traced it to place an argument on the replicas.
    """
    return stack_frame(equation.source_info.traceback)


def stack_frame(stack: Any) -> Frame | None:
    """Returns the innermost frame of user code in a traceback that JAX has recorded. See `equation_frame`."""
    frames = [Frame(f.file_name, f.line_num, f.function_name) for f in stack.frames] if stack else []
    outside_jax = _outside_jax(frames)
    if not outside_jax or _absolute(outside_jax[0].file).startswith(_VALUES_PACKAGE):
        return None
    return user_frame(outside_jax)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Returns the first of `frames`, from the innermost, in user code; if all are in libraries, the first outside JAX."""
    outside_jax = _outside_jax(frames)
    user_frames = (frame for frame in outside_jax if not _in_library(_absolute(frame.file)))
    return next(user_frames, outside_jax[0] if outside_jax else None)


def _outside_jax(frames: Sequence[Frame]) -> list[Frame]:
    files = (*_folders("jax", "jaxlib"), _absolute(jax_compat.__file__))  # `jax_compat` calls JAX for other modules
    return [frame for frame in frames if not _absolute(frame.file).startswith(files)]


def is_user_frame(frame: Frame) -> bool:
    """Whether `frame` is a line of user code, and not of a library."""
    return not _in_library(_absolute(frame.file))


def warning_frame(equation: Equation) -> Frame | None:
    """Returns the line of user code that a warning about `equation` names.

    It is the line that traced the equation; if only libraries did, as in a `jdist.train_step`, the line of the current call.
    """
    frame = equation_frame(equation)
    return caller_frame() or frame if frame and _in_library(_absolute(frame.file)) else frame


def call_frame(equation: Equation, calls: Sequence[Equation]) -> Frame | None:
    """Returns the user's line of an equation. See `calling_equation` for the arguments."""
    return equation_frame(calling_equation(equation, calls))


def calling_equation(equation: Equation, calls: Sequence[Equation]) -> Equation:
    """Returns the equation that calls the function of JAX that contains `equation`, such as `jax.random.bernoulli`, or itself.

    JAX caches the jaxprs of its functions, so the equation has the line of the first call of the function; the equation
    that calls the function has the line of this call.

    Args:
        equation: The equation.
        calls: The equations that call the functions that contain it, from the outermost.
    """
    for call in reversed(calls):
        if not jax_compat.is_function_of(call, _folders("jax")):
            break
        equation = call
    return equation


def error_frame(error: BaseException) -> Frame | None:
    """Returns the innermost frame of user code in the traceback of `error`."""
    frames = [Frame(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return next((f for f in reversed(_outside_jax(frames)) if not _in_library(_absolute(f.file))), None)


def caller_frame(frame: FrameType | None = None) -> Frame | None:
    """Returns the innermost frame of user code on the call stack of `frame`, by default on the current one."""
    frame = frame or sys._getframe()
    while frame is not None:
        code = frame.f_code
        file = _absolute(code.co_filename)
        if not file.startswith(_folders("jax", "jaxlib")) and not _in_library(file):
            return Frame(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def caller_text(frame: FrameType | None = None) -> str:
    """Returns the line of `caller_frame` for messages: " (`next(batches)` at loader.py:88)"; empty if there is none."""
    caller = caller_frame(frame)
    return f" ({code_at(caller)})" if caller else ""


def warn_at_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line of user code on the call stack."""
    frame = caller_frame()
    warnings.warn_explicit(message, category, frame.file if frame else "", frame.line if frame else 0)


def reader_frame() -> Frame | None:
    """Returns the innermost frame of user code that calls jdist or JAX; None if jdist calls JAX, which is not a user's line."""
    frame = sys._getframe()
    while frame is not None and _absolute(frame.f_code.co_filename).startswith(_JDIST):
        frame = frame.f_back
    while frame is not None and _in_jax(_absolute(frame.f_code.co_filename)):
        frame = frame.f_back
    is_user = frame is not None and not _absolute(frame.f_code.co_filename).startswith(_JDIST)
    return caller_frame(frame) if is_user else None


def _in_jax(file: str) -> bool:
    return file.startswith(_folders("jax", "jaxlib", "numpy"))


def code_at(frame: Frame) -> str:
    """Returns the text of a line of source code and its place: "`next(batches)` at loader.py:88"."""
    code = linecache.getline(frame.file, frame.line).strip() or frame.function
    return f"`{code[:_CODE_CHARACTERS]}{'…' * (len(code) > _CODE_CHARACTERS)}` at {frame}"


_CODE_CHARACTERS = 80


def is_in_jdist(frame: Frame) -> bool:
    """Whether `frame` is a line of jdist."""
    return _absolute(frame.file).startswith(_JDIST)


def is_from_jdist(equation: Equation, file: str, function: str) -> bool:
    """Whether `function`, or one inside it, in a module of jdist such as `"sync/accumulation.py"` traced `equation`."""
    stack, path = equation.source_info.traceback, os.path.join(_JDIST, "_src", file)
    frames = stack.frames if stack else ()
    return any(_absolute(f.file_name) == path and f.function_name.startswith(function) for f in frames)


def functions_in_file(equation: Equation, package: str, file_name_part: str) -> list[str]:
    """Returns the functions that traced `equation` and are in a file of `package` whose name contains `file_name_part`."""
    stack = equation.source_info.traceback
    return [
        frame.function_name
        for frame in (stack.frames if stack else ())
        if (file := _absolute(frame.file_name)).startswith(_folders(package))
        and file_name_part in os.path.basename(file)
    ]


_LIBRARIES = "flax", "optax", "chex", "keras", "optree", "haiku", "equinox", "distrax"


@functools.cache
def _in_library(file: str) -> bool:
    in_standard = file.startswith(sysconfig.get_paths()["stdlib"]) and "site-packages" not in file
    return in_standard or file.startswith(_folders(*_LIBRARIES)) or file.startswith(_JDIST)


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
