"""`Scope`: the context manager that makes a strategy the current strategy."""

import contextlib
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from jdist._src.replica.context import (
    CrossReplicaContext,
    current_context,
    enter_context,
    in_replica_function,
    require_cross_replica_context,
)

# Not in the `Scope` object, which several threads may enter. `with` exits the scope that was entered last first.
_entries: ContextVar[tuple[AbstractContextManager[None], ...]] = ContextVar("jdist_scopes", default=())


class Scope(contextlib.ContextDecorator):
    """Makes a strategy the current strategy of this thread or task while the block runs.

    An object can be entered any number of times: nested, again later, and in several threads. `as` binds the strategy.

    Raises:
        RuntimeError: On entry, the scope of another strategy is current, or a replica function is running.
    """

    def __init__(self, strategy: Any):
        self._strategy = strategy

    def __repr__(self) -> str:
        return f"{self._strategy!r}.scope()"

    def __enter__(self) -> Any:
        require_cross_replica_context("scope", "enter it around the call that runs the function")
        outer = current_context().strategy
        if outer is not None and outer is not self._strategy:
            raise RuntimeError(
                f"The scope of {self._strategy!r} is inside the scope of {outer!r}. Exit that one first "
                "(`set_strategy(None)`, if `set_strategy` entered it)."
            )
        axes = getattr(current_context(), "axes", ())  # of a `merge_call` around this scope
        entry = enter_context(CrossReplicaContext(self._strategy, merging=in_replica_function(), axes=axes))
        entry.__enter__()
        _entries.set((*_entries.get(), entry))
        return self._strategy

    def __exit__(self, *exception: object) -> None:
        if not _entries.get():
            raise RuntimeError(f"`{self!r}` was exited in a thread or task that has not entered it.")
        *outer_entries, entry = _entries.get()
        _entries.set(tuple(outer_entries))
        entry.__exit__(None, None, None)
