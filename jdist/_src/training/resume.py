"""The start of training: a new state, a state from the caller, or a checkpoint; and the callback states in a checkpoint."""

import collections
import contextlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.checkpoint.checkpointer import Checkpointer, latest_step
from jdist._src.core.source_lines import levels_to_user
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, one_line
from jdist._src.data.dataset import DistributedDataset
from jdist._src.strategies.base import Strategy
from jdist._src.training.events import Callback
from jdist._src.training.fit import Fit
from jdist._src.training.state import step_of
from jdist._src.training.state_copies import with_summands
from jdist._src.values.array_checks import check_not_deleted, is_device_array, is_on_mesh
from jdist._src.values.sync_on_read import SyncOnRead

_log = logging.getLogger("jdist")
_SET_IDENTITY = "Set a different string as the attribute `identity` of each, before the checkpoint is saved."


class StartPoint(NamedTuple):
    """The state and the position at which training starts.

    Attributes:
        state: The state.
        position: The position of the data; None for the beginning.
        resume_data: The result of `Event.resume_data` in the run that saved the checkpoint.
    """

    state: PyTree
    position: Mapping[str, Any] | None = None
    resume_data: Mapping[str, Any] = MappingProxyType({})


def start_point(strategy: Strategy, state: PyTree, make: Callable[[], PyTree] | None, resume: Any) -> StartPoint:
    """Returns the newest checkpoint of `resume`; if there is none, `state`, or the result of `make`.

    Raises:
        ValueError: The checkpoint is of another model; `state` was donated, or is partly on the devices of the strategy.
        TypeError: `resume` is neither a checkpointer nor a path, or `state` is not a training state.
    """
    if make is None:
        step_of(state)
        for name, leaf in named_leaves("state", state):
            check_not_deleted(name, leaf)
    if resume is not None:
        with _opened(resume) as checkpointer:
            step = latest_step(checkpointer)
            if step is not None:
                like = state if make is None else jax.eval_shape(make)
                step = None if checkpointer.fallback else step
                checkpoint = checkpointer.restore(strategy, like=like, step=step)
                resume_data, state = checkpoint.extra or {}, checkpoint.state
                if resume_data.get("replicas") == strategy.num_replicas_in_sync:
                    state = with_summands(state, resume_data["shares"], strategy)
                return StartPoint(state, checkpoint.data_position, resume_data)
    return StartPoint(_placed(strategy, state) if make is None else make())


def restore_row_metrics(empty: SyncOnRead, totals: Sequence[Any]) -> SyncOnRead:
    """Returns the metrics since the last row of the history, from a checkpoint; `empty` if the checkpoint has other metrics."""
    shapes = [np.shape(leaf)[1:] for leaf in jax.tree.leaves(empty.tree)]
    if [np.shape(total) for total in totals] != shapes:
        return empty
    return empty.assign(jax.tree.unflatten(jax.tree.structure(empty.tree), totals))


def describe_last_checkpoint(callbacks: Sequence[Callback], resume: Any) -> str:
    """Returns a sentence that names the newest checkpoint of this training run."""
    for source in (*(callback.checkpointer for callback in callbacks), resume):
        if source is None:
            continue
        with contextlib.suppress(Exception), _opened(source) as checkpointer:  # the caller already reports an error
            if checkpointer.latest is not None:
                folder = str(checkpointer.folder)
                return (
                    f"The last checkpoint is that of step {checkpointer.latest}, in {folder!r}: `fit(resume={folder!r})` "
                    "continues from it."
                )
    return (
        "There is no checkpoint to resume from. To save checkpoints during training, pass "
        "`callbacks=[jdist.callbacks.Checkpoint(checkpointer)]`."
    )


def total_steps(dataset: DistributedDataset, start: StartPoint, steps: int | None) -> int | None:
    """Returns the number of steps after which training ends, including previous ones; None if it is not known."""
    try:
        remaining = len(dataset)
    except TypeError:
        return steps
    if start.position is not None:
        batches_per_epoch = len(dataset.repeated(1))
        remaining -= start.position["epoch"] * batches_per_epoch + start.position["batch"]
    total = int(step_of(start.state)) + remaining
    return total if steps is None else min(total, steps)


def stateful_callbacks(callbacks: Sequence[Callback]) -> list[tuple[str, Callback]]:
    """Returns the callbacks whose class overrides `get_state`, each with its identity.

    Call it before the first event, because the `repr` of a callback may change later.

    Example:
        >>> stateful_callbacks([jdist.callbacks.TimeLimit(9), jdist.callbacks.EMA(0.9)])[0][0]
        'EMA(0.9, debias=True)'
    """
    stateful = [callback for callback in callbacks if type(callback).get_state is not Callback.get_state]
    return [(_identity(callback), callback) for callback in stateful]


def saved_callback_states(callbacks: Sequence[tuple[str, Callback]]) -> list[dict[str, PyTree]]:
    """Returns the states of stateful callbacks, in the format of a checkpoint."""
    return [{"of": identity, "memory": callback.get_state()} for identity, callback in callbacks]


def restore_callback_states(callbacks: Sequence[tuple[str, Callback]], entries: Sequence[Mapping[str, Any]]) -> None:
    """Passes to each stateful callback the state that was saved under its identity.

    Callbacks with the same identity get their states in order, with a warning.

    Args:
        callbacks: The stateful callbacks with their identities.
        entries: The result of `saved_callback_states`, as a checkpoint returns it.

    Raises:
        ValueError: A saved state does not belong to a callback, or the numbers of callbacks with one identity differ.
    """
    saved_counts = collections.Counter(entry["of"] for entry in entries)
    counts = collections.Counter(identity for identity, _ in callbacks)
    missing = [name for name in saved_counts if name not in counts]
    if missing:
        present = f"The callbacks with a state are: {', '.join(counts)}" if counts else "No callback has a state"
        raise ValueError(
            f"The checkpoint contains the state of {', '.join(missing)}, which is not in `callbacks`. {present}. Pass "
            "a callback of the same class and options; or continue without the saved callback states: "
            "`fit(state=checkpointer.restore(strategy, like=state).state)`."
        )
    for name, count in saved_counts.items():
        if counts[name] != count:
            raise ValueError(
                f"The checkpoint contains the states of {count} callbacks named {name}, and `callbacks` has {counts[name]} of "
                f"them, which cannot be distinguished. {_SET_IDENTITY}"
            )
        if count > 1:
            message = f"{count} callbacks are named {name}; their states are restored in order. {_SET_IDENTITY}"
            warnings.warn(message, stacklevel=levels_to_user())
    for name in counts:
        if name not in saved_counts:
            _log.warning("The checkpoint contains no state of %s: it starts without one.", name)
    for name in saved_counts:
        states = [entry["memory"] for entry in entries if entry["of"] == name]
        receivers = [callback for identity, callback in callbacks if identity == name]
        for callback, state in zip(receivers, states, strict=True):
            callback.set_state(state)


def _identity(callback: Callback) -> str:
    if callback.identity is not None:
        return callback.identity
    kind = type(callback)
    if kind.__repr__ is object.__repr__:
        return kind.__qualname__
    return f"{kind.__qualname__} {re.sub(r' at 0x[0-9a-fA-F]+', '', repr(callback))}"


@contextlib.contextmanager
def _opened(resume: Any) -> Iterator[Checkpointer]:
    if isinstance(resume, Checkpointer):
        resume.wait()
        yield resume
    elif isinstance(resume, (str, os.PathLike)):
        with Checkpointer(resume) as checkpointer:
            yield checkpointer
    else:
        raise TypeError(
            f"`resume` must be a `jdist.Checkpointer` or the path of its folder, got {type(resume).__name__}."
        )


def check_is_state(state: PyTree) -> None:
    """Raises TypeError if the argument `state` of `fit` is a record, a number, or text, with the argument that is meant."""
    if isinstance(state, Fit):
        raise TypeError("`state` is a `Fit`. Pass the state in it: `fit(state=earlier.state)`.")
    if isinstance(state, (int, float, str, np.generic)):
        raise TypeError(
            f"`state` must be a training state, got {one_line(state)}. Pass the `state` of an earlier `Fit` or the result of "
            "`trainer.init`; to continue from a checkpoint, write `resume=path`, and to take a number of steps, `steps=`."
        )


def _placed(strategy: Strategy, state: PyTree) -> PyTree:
    """Returns `state`, which no checkpoint replaces, on the devices of the strategy.

    Raises:
        TypeError: It contains shapes without values.
        ValueError: A part of it is on these devices, and another part is not.
    """
    leaves = named_leaves("state", state)
    shapes = [name for name, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if shapes:
        raise TypeError(
            f"{shapes[0]} is a shape without a value, and there is no checkpoint to restore. Pass a state with values, or "
            "leave `state` out."
        )
    shardings = jax.tree.leaves(strategy.shardings(state))
    is_on_devices = [
        is_device_array(leaf) and leaf.sharding.device_set == sharding.device_set
        for (_, leaf), sharding in zip(leaves, shardings, strict=True)
    ]
    if all(is_on_devices):
        return state
    # Not an array that JAX created on its default device, and not a random key, which cannot be on the host.
    from_strategy = [
        name
        for (name, leaf), is_placed in zip(leaves, is_on_devices, strict=True)
        if is_placed and is_on_mesh(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    if from_strategy:
        name, leaf = leaves[is_on_devices.index(False)]
        place = f"on {', '.join(map(str, leaf.sharding.device_set))}" if is_device_array(leaf) else "on the host"
        raise ValueError(
            f"{name} ({dtype_and_shape(leaf)}) is {place}, and {from_strategy[0]} is on the devices of the strategy: a part of "
            "the state was replaced. Place all of it: `fit(state=strategy.put(state))`."
        )
    return strategy.put(state)
