"""Argument checks: enum members by name, keyword arguments, integers."""

import enum
import functools
import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jdist._src.core.tree import has_dtype, one_line

E = TypeVar("E", bound=enum.Enum)


def enum_member(enum_class: type[E], value: E | str, problem: str) -> E:
    """Returns `value` if it is a member of `enum_class`, else the member of that name, in any case.

    Args:
        enum_class: The enum.
        value: A member or its name.
        problem: The first half of the error message; the valid names follow it.

    Raises:
        ValueError: `enum_class` does not have a member of that name.
    """
    if isinstance(value, enum_class):
        return value
    if isinstance(value, str) and value.upper() in enum_class.__members__:
        return enum_class[value.upper()]
    raise ValueError(f"{problem}; take one of {', '.join(map(repr, enum_class.__members__))}.")


def keyword_arguments(call: str, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the argument `kwargs` of the function named `call` as a dict; empty for None.

    Raises:
        TypeError: `kwargs` is not a mapping with string keys.
    """
    if kwargs is None or (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        return dict(kwargs or {})
    actual = "an array" if has_dtype(kwargs) else type(kwargs).__name__
    raise TypeError(
        f"`kwargs` must be a mapping from argument names to values, got {actual}. Write "
        f'`{call}(fn, kwargs={{"x": value}})`, or pass positional arguments: `{call}(fn, args=(value,))`.'
    )


def as_int(name: str, value: Any, minimum: int | None = None) -> int:
    """Returns `value` as a Python int. Booleans are not integers.

    Args:
        name: The name of the argument as the error shows it: "`steps`".
        value: Any object.
        minimum: The smallest valid value; None for no check.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is less than `minimum`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and number < minimum):
        bound = "" if minimum is None else f" >= {minimum}"
        raise (TypeError if number is None else ValueError)(f"{name} must be an integer{bound}, got {one_line(value)}.")
    return number


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError if the argument `name` is not a positive, finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"`{name}` must be a positive number of seconds, got {one_line(value)}.")


def check_callable(fn: Any) -> None:
    """Raises TypeError if `fn` is not callable."""
    if not callable(fn):
        raise TypeError(f"`fn` must be a function, got {type(fn).__name__}.")


def function_name(fn: Callable[..., Any]) -> str:
    """Returns the name of a function for messages and profiles; for other callables the name of their class."""
    name = getattr(fn, "__name__", None)
    return name or (function_name(fn.func) if isinstance(fn, functools.partial) else type(fn).__name__)
