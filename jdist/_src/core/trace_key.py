"""Adds the context that a replica function reads to JAX's trace cache key.

`jax.jit` does not track Python context variables: a jitted helper that reads one would keep the value of its first trace.
Every context variable that a traced function can read is therefore set together with `keyed`.
"""

import contextlib
from collections.abc import Hashable, Iterator
from contextvars import ContextVar

import jax
import numpy as np
from jax.sharding import Mesh

_NO_MESH = Mesh(np.empty((), object), ())
_key = jax.make_user_context(default_value=())
_parts: ContextVar[tuple[Hashable, ...] | None] = ContextVar("jdist_trace_key", default=None)
# Leaving a context restores the value before it. This one was entered when no value was set, so leaving it unsets the value.
_unset = _key(())
_unset.__enter__()
_unset.__exit__(None, None, None)


def keyed(part: Hashable) -> contextlib.AbstractContextManager[None]:
    """Adds `part` to the cache key of everything that JAX traces inside the `with` block.

    Args:
        part: Equal where a traced function may be reused. It must not hold the strategy or a tracer, because JAX's caches
            hold it: use a weak reference, or `object()` for a context that nothing shares.
    """
    return _Block((*(_parts.get() or ()), part))


def unkeyed() -> contextlib.AbstractContextManager[None]:
    """Removes the added parts from the cache key inside the `with` block."""
    return _Block(())


@contextlib.contextmanager
def outside_mesh() -> Iterator[None]:
    """Leaves the host's contexts: `strategy.scope()`, in which programs would be compiled again, and `jax.set_mesh`."""
    with unkeyed(), jax.set_mesh(_NO_MESH):
        yield


def is_keyed() -> bool:
    """Whether a part has been added in this context."""
    return _key.value != ()


def set_outermost_key(part: Hashable) -> None:
    """Sets the part of all threads outside any `keyed` block; None for no part."""
    _key.set_global(() if part is None else (part,))


class _Block:
    """The context manager of `keyed` and `unkeyed`. A class: a call of a step in a scope enters one (`Program`)."""

    __slots__ = ("_parts", "_token")

    def __init__(self, parts: tuple[Hashable, ...]):
        self._parts = parts

    def __enter__(self) -> None:
        self._token = _parts.set(self._parts)
        _set_key()

    def __exit__(self, *exception: object) -> None:
        try:
            _parts.reset(self._token)
        finally:  # also if Ctrl-C interrupts this
            _set_key()


def _set_key() -> None:
    """Sets JAX's key from the context variable: asyncio tasks may leave their blocks in another order than they entered."""
    parts = _parts.get()
    if parts is None:
        _unset.__exit__(None, None, None)
    else:
        _key(parts).__enter__()
