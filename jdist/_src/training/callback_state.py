"""The memory of callbacks in a checkpoint, found again by class and options."""

import collections
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jdist._src.core.tree import PyTree
from jdist._src.training.events import Callback

_log = logging.getLogger("jdist")


class Memory(NamedTuple):
    """A callback that has something to remember.

    Attributes:
        identity: Its class and options, as text.
        callback: The callback, with `get_state` and `set_state`.
    """

    identity: str
    callback: Any


def memories_of(callbacks: Sequence[Callback]) -> list[Memory]:
    """Returns the callbacks with `get_state` and `set_state`, each with its identity.

    Call it before the first event: a `repr` may change later.

    Example:
        >>> import jdist
        >>> memories_of([jdist.callbacks.time_limit(9), jdist.callbacks.EMA(0.9)])[0].identity
        'EMA(0.9, debias=True)'
    """
    able = [one for one in callbacks if hasattr(one, "get_state") and hasattr(one, "set_state")]
    return [Memory(_identity(callback), callback) for callback in able]


def saved_memories(memories: Sequence[Memory]) -> list[dict[str, PyTree]]:
    """Returns what the callbacks remember, for a checkpoint."""
    return [{"of": identity, "memory": callback.get_state()} for identity, callback in memories]


def restore_memories(memories: Sequence[Memory], saved: Sequence[Mapping[str, Any]]) -> None:
    """Gives each callback the memory that was saved of it.

    Callbacks of one identity get their memories in order, with a warning.

    Raises:
        ValueError: A memory has no callback, or there are more or fewer callbacks of one identity than were saved.
    """
    names = [entry["of"] for entry in saved]
    counts, now = collections.Counter(names), collections.Counter(memory.identity for memory in memories)
    missing = [name for name in counts if name not in now]
    if missing:
        there = f"These have one: {', '.join(now)}" if now else "No callback has one"
        raise ValueError(
            f"The checkpoint has the memory of {', '.join(missing)}, and `callbacks` has no such callback. {there}. Pass a "
            "callback of the same class and options; or go on without any: `checkpointer.restore(strategy, like).state` as "
            "`fit(state=)`."
        )
    for name, count in counts.items():
        if now[name] != count:
            raise ValueError(
                f"The checkpoint has the memory of {count} callbacks {name}, and `callbacks` has {now[name]} of them, which "
                f"nothing tells apart. {_TELL_APART}"
            )
        if count > 1:
            warnings.warn(
                f"{count} callbacks are {name}, and get their memories from the checkpoint by their order. {_TELL_APART}",
                stacklevel=3,
            )
    for identity in now:
        if identity not in counts:
            _log.warning("The checkpoint has no memory of %s: it begins anew.", identity)
    for name in counts:
        trees = [entry["memory"] for entry in saved if entry["of"] == name]
        takers = [memory.callback for memory in memories if memory.identity == name]
        for callback, tree in zip(takers, trees, strict=True):
            callback.set_state(tree)


_TELL_APART = "Give each an attribute `identity`, a string of its own, before the checkpoint is saved."


def _identity(callback: Any) -> str:
    identity = getattr(callback, "identity", None)
    if isinstance(identity, str):
        return identity
    kind = type(callback)
    if kind.__repr__ is object.__repr__:
        return kind.__qualname__
    return f"{kind.__qualname__} {re.sub(r' at 0x[0-9a-fA-F]+', '', repr(callback))}"
