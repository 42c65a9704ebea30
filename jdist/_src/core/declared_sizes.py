"""Sizes of dimensions that a program is meant to be compiled for, such as the widths of `jdist.data.Buckets`."""

from collections.abc import Iterable, Sequence

_declared: set[int] = set()


def declare_sizes(sizes: Iterable[int]) -> None:
    """Declares that a dimension of an input may have each of these sizes."""
    _declared.update(sizes)


def are_declared(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes differ in declared sizes only."""
    return len(shape) == len(other) and _declared.issuperset(
        size for pair in zip(shape, other, strict=True) if pair[0] != pair[1] for size in pair
    )
