"""What arguments may be: one of a few by its name, in any case; whole numbers."""

import enum
import operator
from collections.abc import Mapping
from typing import Any, TypeVar

E = TypeVar("E", bound=enum.Enum)


def enum_member(kind: type[E], value: E | str, wrong: str) -> E:
    """The member of `kind` of that name.

    Raises:
        ValueError: There is none: `wrong`, and which there are.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    raise ValueError(f"{wrong}; take one of {', '.join(map(repr, kind.__members__))}.")


def keyword_arguments(word: str, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments by name of a call of `word`.

    Raises:
        TypeError: `kwargs` is not a mapping from names.
    """
    if kwargs is None or (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        return dict(kwargs or {})
    got = "an array" if hasattr(kwargs, "dtype") else type(kwargs).__name__
    raise TypeError(
        f"`kwargs` maps the names of arguments to values, got {got}: write "
        f'`{word}(fn, kwargs={{"x": value}})`, or pass arguments by position: `{word}(fn, args=(value,))`.'
    )


def as_int(said: str, value: Any, least: int | None = None) -> int:
    """`value` as a whole number; True and False are none.

    Args:
        said: The argument, as messages say it: "`steps`".
        value: Any object.
        least: The least that may be; None if the caller looks.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is less than `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        up = "" if least is None else f" from {least} up"
        raise (TypeError if number is None else ValueError)(f"{said} is a whole number{up}, got {value!r}.")
    return number
