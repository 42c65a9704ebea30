"""Where training begins: with a new state, one that is handed in, or the newest of a checkpointer."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._tree import PyTree
from jdist.callbacks.saving import with_shares
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.data.dataset import DistributedDataset
from jdist.strategies.base import Strategy
from jdist.training.events import Callback
from jdist.training.state import parts_of
from jdist.values.sync_on_read import SyncOnRead


class Beginning(NamedTuple):
    """What training begins with.

    Attributes:
        state: The state.
        position: Where the data go on; None for where they begin.
        kept: What a run before kept beside the state, see `Event.kept`.
    """

    state: PyTree
    position: Mapping[str, Any] | None = None
    kept: Mapping[str, Any] = MappingProxyType({})


def beginning(strategy: Strategy, state: PyTree, make: Callable[[], PyTree] | None, resume: Any) -> Beginning:
    """The newest checkpoint of `resume`, if there is one; else `state`, or what `make` makes.

    Raises:
        ValueError: The checkpoint is of another model.
        TypeError: `resume` is no checkpointer, and no path of one.
    """
    if resume is not None:
        with _opened(resume) as checkpointer:
            if checkpointer.latest is not None:
                like = state if make is None else jax.eval_shape(make)
                found = checkpointer.restore(strategy, like)
                kept, begun = found.extra or {}, found.state
                if kept.get("replicas") == strategy.num_replicas_in_sync:
                    begun = with_shares(begun, kept["shares"], strategy)
                return Beginning(begun, found.data_position, kept)
    return Beginning(state if make is None else make())


def with_seen(nothing: SyncOnRead, totals: Sequence[Any]) -> SyncOnRead:
    """What an epoch has seen before: these totals, if they are of the same metrics."""
    shapes = [np.shape(leaf)[1:] for leaf in jax.tree.leaves(nothing.tree)]
    if [np.shape(total) for total in totals] != shapes:
        return nothing
    return nothing.assign(jax.tree.unflatten(jax.tree.structure(nothing.tree), totals))


def hand_back(callbacks: Sequence[Callback], kept: Mapping[str, Any]) -> None:
    """Gives callbacks what they kept.

    Raises:
        ValueError: What was kept is not of these callbacks.
    """
    takers = {str(number): callback for number, callback in enumerate(callbacks) if hasattr(callback, "set_state")}
    if kept.keys() - takers.keys():
        raise ValueError(
            f"The checkpoint has what callbacks number {', '.join(sorted(kept.keys() - takers.keys()))} kept, and these keep "
            "nothing now. Hand in the callbacks in the order in which they were, new ones behind them."
        )
    for number, tree in kept.items():
        takers[number].set_state(tree)  # type: ignore[attr-defined]


def total_steps(dataset: DistributedDataset, begin: Beginning, steps: int | None) -> int | None:
    """After how many steps training is at its end, those before it included; None if that is not known."""
    try:
        batches = len(dataset)
    except TypeError:
        return steps
    gone = 0
    if begin.position is not None:
        per_epoch = len(dataset.repeated(1))
        gone = begin.position["epoch"] * per_epoch + begin.position["batch"]
    total = int(parts_of(begin.state).step) + batches - gone
    return total if steps is None else min(total, steps)


@contextlib.contextmanager
def _opened(resume: Any):
    if isinstance(resume, Checkpointer):
        resume.wait()
        yield resume
    elif isinstance(resume, (str, os.PathLike)):
        with Checkpointer(resume) as checkpointer:
            yield checkpointer
    else:
        raise TypeError(f"`resume` is a `jdist.Checkpointer`, or a path of checkpoints; got {type(resume).__name__}.")
