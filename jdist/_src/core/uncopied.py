"""`Uncopied`: a base class of objects that are their own copies."""

from typing import Any, Self


class Uncopied:
    """An object that `copy.copy` and `copy.deepcopy` return itself, as they do functions."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
