"""Sets of times as sorted disjoint intervals."""

from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]  # start and end in nanoseconds


def union(intervals: Iterable[Interval], within: Interval | None = None) -> list[Interval]:
    """Returns the union of `intervals`, sorted and disjoint; of their parts in `within`, if it is given.

    Example:
        >>> union([(5, 7), (0, 2), (1, 3)], within=(1, 6))
        [(1, 3), (5, 6)]
    """
    if within is not None:
        low, high = within
        intervals = [(max(start, low), min(end, high)) for start, end in intervals]
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def difference(intervals: list[Interval], removed: list[Interval]) -> list[Interval]:
    """Returns the parts of `intervals` outside `removed`. Both are results of `union`.

    Example:
        >>> difference([(0, 10)], [(2, 3), (8, 12)])
        [(0, 2), (3, 8)]
    """
    rest: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(removed) and removed[first][1] <= start:
            first += 1
        number = first
        while number < len(removed) and removed[number][0] < end:
            low, high = removed[number]
            if low > start:
                rest.append((start, low))
            start = max(start, high)
            number += 1
        if start < end:
            rest.append((start, end))
    return rest


def length(intervals: Iterable[Interval]) -> int:
    """Returns the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)
