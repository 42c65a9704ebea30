"""Where training begins: with a new state, one that is handed in, or the newest of a checkpointer."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._src.callbacks.checkpoint import Checkpoint, with_shares
from jdist._src.callbacks.log_rows import check_destinations
from jdist._src.callbacks.progress import Progress
from jdist._src.callbacks.progress import progress as display
from jdist._src.checkpoint.checkpointer import Checkpointer, newest_step
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.data.dataset import DistributedDataset
from jdist._src.strategies.base import Strategy
from jdist._src.training.events import Callback
from jdist._src.training.state import state_fields
from jdist._src.values.arrays import check_not_deleted, is_device_array
from jdist._src.values.sync_on_read import SyncOnRead


class StartPoint(NamedTuple):
    """What training begins with.

    Attributes:
        state: The state.
        position: Where the data go on; None for where they begin.
        kept: What a run before kept beside the state, see `Event.kept`.
    """

    state: PyTree
    position: Mapping[str, Any] | None = None
    kept: Mapping[str, Any] = MappingProxyType({})


def start_point(strategy: Strategy, state: PyTree, make: Callable[[], PyTree] | None, resume: Any) -> StartPoint:
    """The newest checkpoint of `resume`, if there is one; else `state`, or what `make` makes.

    Raises:
        ValueError: The checkpoint is of another model; or the memory of `state` was given away, or it is not on the devices.
        TypeError: `resume` is no checkpointer, and no path of one; or `state` is no state.
    """
    if make is None:
        _check(state)
    if resume is not None:
        with _opened(resume) as checkpointer:
            newest = newest_step(checkpointer)
            if newest is not None:
                like = state if make is None else jax.eval_shape(make)
                found = checkpointer.restore(strategy, like, newest)
                kept, begun = found.extra or {}, found.state
                if kept.get("replicas") == strategy.num_replicas_in_sync:
                    begun = with_shares(begun, kept["shares"], strategy)
                return StartPoint(begun, found.data_position, kept)
    return StartPoint(state if make is None else make())


def with_seen(nothing: SyncOnRead, totals: Sequence[Any]) -> SyncOnRead:
    """What an epoch has seen before: these totals, if they are of the same metrics."""
    shapes = [np.shape(leaf)[1:] for leaf in jax.tree.leaves(nothing.tree)]
    if [np.shape(total) for total in totals] != shapes:
        return nothing
    return nothing.assign(jax.tree.unflatten(jax.tree.structure(nothing.tree), totals))


def last_checkpoint(callbacks: Sequence[Callback], resume: Any) -> str:
    """Returns a sentence that names the newest checkpoint of this training run."""
    saving = [callback.checkpointer for callback in callbacks if isinstance(callback, Checkpoint)]
    for place in (*saving, resume):
        if place is None:
            continue
        with contextlib.suppress(Exception), _opened(place) as checkpointer:  # an error is being reported already
            if checkpointer.latest is not None:
                return (
                    f"The last checkpoint is that of step {checkpointer.latest}, in {str(checkpointer.folder)!r}: "
                    f"`fit(resume={str(checkpointer.folder)!r})` goes on from there."
                )
    return (
        "There is no checkpoint to go on from. To have one, save while training: "
        "`callbacks=[jdist.callbacks.Checkpoint(checkpointer)]`."
    )


def total_steps(dataset: DistributedDataset, begin: StartPoint, steps: int | None) -> int | None:
    """After how many steps training is at its end, those before it included; None if that is not known."""
    try:
        batches = len(dataset)
    except TypeError:
        return steps
    gone = 0
    if begin.position is not None:
        per_epoch = len(dataset.repeated(1))
        gone = begin.position["epoch"] * per_epoch + begin.position["batch"]
    total = int(state_fields(begin.state).step) + batches - gone
    return total if steps is None else min(total, steps)


def callbacks_in_order(callbacks: Any, progress: str) -> list[Callback]:
    """Returns the callbacks in the order in which they are called, with the display of progress.

    Raises:
        TypeError: One is not a function of an event, or `progress` is not a name.
        ValueError: Two write to one place, or `progress` is not the name of a display.
    """
    if callable(callbacks) or not isinstance(callbacks, Sequence):
        raise TypeError(f"`callbacks` is a list of functions of an event, got {callbacks!r}.")
    for callback in callbacks:
        if not callable(callback) or isinstance(callback, type):
            what = f"the class {callback.__name__}: call it" if isinstance(callback, type) else repr(callback)
            raise TypeError(f"A callback is a function of an event, and among `callbacks` there is {what}.")
    check_destinations(callbacks)
    if not isinstance(progress, str):
        made = "display" if isinstance(progress, Progress) else type(progress).__name__
        raise TypeError(
            f'`progress` is the name of a display, such as "auto", "lines" or "off"; got a {made}. What '
            "`jdist.callbacks.progress(...)` returns is a callback: pass it as `callbacks=[jdist.callbacks.progress(...)]`."
        )
    # What other callbacks remember of an event is to be in the checkpoint of it.
    told: list[Callback] = sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))
    displays = progress != "off" and not any(isinstance(callback, Progress) for callback in told)
    return [*told, display(progress)] if displays else told  # type: ignore[arg-type]


def require(word: str, **needed: Any) -> None:
    """Raises TypeError if an argument of the trainer is None that `word` needs."""
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise TypeError(
            f"To {word}, a trainer needs `{'`, `'.join(missing)}`: `jdist.Trainer(model, optimizer, loss)`, such as "
            "`jdist.Trainer(model, optax.adamw(1e-3), optax.softmax_cross_entropy_with_integer_labels)`."
        )


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


def _check(state: PyTree) -> None:
    state_fields(state)
    for name, leaf in named_leaves("state", state):
        check_not_deleted(name, leaf)
        if not is_device_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name} is {dtype_and_shape(leaf)} on the host, and `fit` takes a state on the devices of the strategy. Place it: "
                "`strategy.put(state)`."
            )
