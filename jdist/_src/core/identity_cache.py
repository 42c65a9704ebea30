"""What is remembered of a function for as long as it lives."""

import types
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IdentityCache(Generic[T]):
    """Values made for functions, by identity; a function that is gone takes its value with it.

    Equal functions are not the same one: two lambdas that are written alike may close over different things. A bound
    method, which Python makes anew at every mention, is known by its object and its function. The value must not hold
    the function, or neither would ever go: `make` is given a weak reference to call.

    Mutable: `get` fills it.

    Example:
        >>> cache = IdentityCache()
        >>> fn = lambda: 1
        >>> cache.get(fn, lambda ref: [ref]) is cache.get(fn, lambda ref: [ref])
        True
        >>> del fn
        >>> len(cache)
        0
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[Callable[[], Any], T]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, fn: Callable[..., Any], make: Callable[[Callable[[], Any]], T]) -> T:
        """The value of `fn`, made by `make(reference to fn)` the first time."""
        key = _key(fn)
        kept = self._kept.get(key)
        if kept is not None:
            return kept[1]
        reference = self._reference(fn, key)
        value = make(reference)
        self._kept[key] = reference, value
        return value

    def _reference(self, fn: Callable[..., Any], key: tuple[int, ...]) -> Callable[[], Any]:
        def forget(_: Any, kept: dict[Any, Any] = self._kept) -> None:
            kept.pop(key, None)

        try:
            if isinstance(fn, types.MethodType):
                return weakref.WeakMethod(fn, forget)
            return weakref.ref(fn, forget)
        except TypeError:  # an object that cannot be weakly referenced is held
            return lambda: fn


def _key(fn: Callable[..., Any]) -> tuple[int, ...]:
    return (id(fn.__self__), id(fn.__func__)) if isinstance(fn, types.MethodType) else (id(fn),)
