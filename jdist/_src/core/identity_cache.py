"""A cache of values by function identity, with weak references to the functions."""

import types
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IdentityCache(Generic[T]):
    """Caches one value per function, by identity, until the function is garbage-collected.

    Equality does not identify a function: two lambdas with the same source may close over different values. A bound method,
    which Python creates anew on every access, is identified by its object and its function. The value must not reference
    the function, else neither would be collected: `make` receives a weak reference, which it can call.

    Mutable: `get` adds entries.

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
        self._entries: dict[tuple[int, ...], tuple[Callable[[], Any], T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, fn: Callable[..., Any], make: Callable[[Callable[[], Any]], T]) -> T:
        """Returns the value of `fn`. The first call computes it as `make(reference to fn)`."""
        is_method = isinstance(fn, types.MethodType)
        key = (id(fn.__self__), id(fn.__func__)) if is_method else (id(fn),)
        if key in self._entries:
            return self._entries[key][1]

        def remove(_: Any, entries: dict[Any, Any] = self._entries) -> None:
            entries.pop(key, None)

        try:
            reference = weakref.WeakMethod(fn, remove) if is_method else weakref.ref(fn, remove)
        except TypeError:  # the object cannot be weakly referenced: hold it
            reference = lambda: fn
        value = make(reference)
        self._entries[key] = reference, value
        return value
