"""Choices by name: wherever one of a few is asked for, its name does as well, in any case."""

import enum
from typing import TypeVar

E = TypeVar("E", bound=enum.Enum)


def choice(kind: type[E], value: E | str, wrong: str) -> E:
    """The member of `kind` of that name.

    Raises:
        ValueError: There is none: `wrong`, and which there are.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    raise ValueError(f"{wrong}; take one of {', '.join(map(repr, kind.__members__))}.")
