"""Chains of causes: the explanation of a fact about a value, and its lines in the user's code."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from jdist._src.core.source_lines import Frame

SiteT = TypeVar("SiteT", covariant=True)


class Cause(NamedTuple, Generic[SiteT]):
    """Why a value has a property: the end of a chain of causes from where the property begins.

    Attributes:
        site: The input of the program, or the equation, that began the property or propagated it.
        parent: The cause of the operand that it was propagated from; None where the property begins.
        depth: The number of causes before this one.
    """

    site: SiteT
    parent: "Cause[SiteT] | None" = None
    depth: int = 0

    def chain(self) -> list[SiteT]:
        """Returns the sites from where the property begins to this one."""
        sites: list[SiteT] = []
        cause: Cause[SiteT] | None = self
        while cause is not None:
            sites.append(cause.site)
            cause = cause.parent
        return sites[::-1]


def lines_of_places(places: Iterable[tuple[Frame, str]]) -> list[str]:
    """Returns a line for each place in the user's code, given the place and the name of each operation in order."""
    lines = []
    for place, group in itertools.groupby(places, key=lambda pair: pair[0]):
        names = list(dict.fromkeys(name for _, name in group))
        operations = ", ".join(names if len(names) <= 3 else [names[0], "...", names[-1]])
        lines.append(f"{operations} at {place} in {place.function}")
    return lines


def shortened(lines: Sequence[str], limit: int) -> list[str]:
    """Returns `limit` lines at most: the first ones, the number of those that are left out, and the last two."""
    if len(lines) <= limit:
        return list(lines)
    return [*lines[: limit - 3], f"... {len(lines) - limit + 1} more places ...", *lines[-2:]]
