"""Shapes that a program may be compiled for, such as the shapes of the batches of `jdist.data.Buckets`."""

from collections.abc import Iterable

Shape = tuple[int, ...]
_declared: set[Shape] = set()


def declare_shapes(shapes: Iterable[Shape]) -> None:
    """Declares that an input may change between these shapes and those that were declared before."""
    _declared.update(shapes)


def are_declared(*shapes: Shape) -> bool:
    """Whether each of these shapes is declared."""
    return _declared.issuperset(shapes)
