"""`Scope`: the context manager that makes a strategy the current strategy."""

import contextlib
from contextvars import ContextVar
from typing import Any

from jdist._src.replica.context import (
    CrossReplicaContext,
    current_context,
    enter_context,
    in_replica_function,
    require_cross_replica_context,
)
from jdist._src.strategies.keras_distribution import keras_distribution

# Not in the `Scope` object, which several threads may enter. `with` exits the scope that was entered last first.
_entries: ContextVar[tuple[contextlib.ExitStack, ...]] = ContextVar("jdist_scopes", default=())


class Scope(contextlib.ContextDecorator):
    """Makes a strategy the current strategy of this thread or task while the block runs.

    An object can be entered any number of times: nested, again later, and in several threads. `as` binds the strategy. If
    Keras 3 on JAX is imported, its own `compile` and `fit` in the block are data-parallel over the devices.

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
        is_merging = in_replica_function()
        entry = contextlib.ExitStack()
        entry.enter_context(enter_context(CrossReplicaContext(self._strategy, merging=is_merging, axes=axes)))
        if not is_merging:
            entry.enter_context(keras_distribution(self._strategy))
        _entries.set((*_entries.get(), entry))
        return self._strategy

    def __exit__(self, *exception: Any) -> None:
        if not _entries.get():
            raise RuntimeError(f"`{self!r}` was exited in a thread or task that has not entered it.")
        *outer_entries, entry = _entries.get()
        _entries.set(tuple(outer_entries))
        entry.__exit__(*exception)
