"""Events of the training loop, and the base class of the callbacks that receive them."""

import dataclasses
import enum
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast, final

from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.core.migration_hints import attribute_hint
from jdist._src.core.paths import absolute
from jdist._src.core.tree import PyTree, one_line
from jdist._src.strategies.base import Strategy
from jdist._src.training.history import History
from jdist._src.training.history_columns import VALIDATION_PREFIX


class Moment(enum.StrEnum):
    """The point of training at which an event is sent.

    A moment is equal to its name in lower case. Comparing it with any other string raises ValueError.

    Attributes:
        START: Before the first step.
        STEP: After a call of the step.
        VALIDATION: After a validation within an epoch, with `fit(validate_every=...)`.
        EPOCH: After the last step of an epoch, and the validation if one follows it.
        END: After the last step.

    Example:
        >>> Moment.EPOCH == "epoch", Moment.EPOCH in ("start", "end")
        (True, False)
    """

    START = "start"
    STEP = "step"
    VALIDATION = "validation"
    EPOCH = "epoch"
    END = "end"

    # A misspelled name would otherwise compare unequal at every event, silently.
    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and str(other) not in _MOMENTS:
            raise ValueError(f"There is no moment {other!r}. The moments are {', '.join(map(repr, _MOMENTS))}.")
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


_MOMENTS = tuple(map(str, Moment))


@dataclasses.dataclass(frozen=True)
class Event:
    """The argument of a callback: the state of training at one moment.

    Attributes:
        moment: The moment. After the last step of an epoch there are two events: STEP, then EPOCH; after any other step that
            a validation follows, STEP, then VALIDATION.
        step: The number of steps taken so far, including those before a resume.
        epoch: The epoch of the last step, from 0.
        read_state: Returns the training state.
        position: The position of the data after the last step, as `DistributedIterator.get_state` returns it.
        examples: The number of examples since the start of this `fit`, over all replicas.
        seconds: The duration of this `fit` so far.
        stalled_fraction: The fraction of steps that had to wait for their batch, 0 to 1.
        total_steps: The number of steps after which training ends, if known.
        validation: The loss and the metrics of the validation data; empty except in VALIDATION and EPOCH events. With several
            sets, the names begin with the name of the set: `easy_loss`.
        strategy: The strategy of the trainer.
        history: The rows and losses recorded so far.
        resume_data: Returns the data that a resumed run needs in addition to state and position: the states of the callbacks,
            the metrics since the last row of the history, the history.
        is_finite: Waits for the last step. Returns False if it was rejected because its loss or a gradient was not finite, or
            if parameters are infinite or NaN. With several processes, all of them have to call it.
        read_metrics: Returns the metrics since the last row of the history. See `metrics`.
        ends_epoch: Whether the last step was the last of its epoch. After such a STEP event follows an EPOCH event.
        metric_names: The names in `logs` after a validation, if known in advance.
        validates: Whether a validation follows this STEP event, and after it a VALIDATION or an EPOCH event.

    Example:
        >>> def print_loss(event):
        ...     if event.moment == "epoch":
        ...         print(event.step, event.metrics["loss"])
        >>> callbacks = [print_loss]
    """

    moment: Moment
    step: int
    epoch: int
    read_state: Callable[[], PyTree]
    position: Mapping[str, Any]
    examples: int
    seconds: float
    stalled_fraction: float
    total_steps: int | None
    validation: Mapping[str, float]
    strategy: Strategy
    history: History
    resume_data: Callable[[], dict[str, Any]]
    is_finite: Callable[[], bool]
    read_metrics: Callable[[], Mapping[str, float]]
    ends_epoch: bool = False
    metric_names: Sequence[str] | None = None
    validates: bool = False

    @functools.cached_property
    def state(self) -> PyTree:
        """The training state. Its buffers are donated to the next step: copy what you need later during the call."""
        return self.read_state()

    @property
    def metrics(self) -> Mapping[str, float]:
        """The loss, the metrics and the norms since the last row of the history, exact over all examples since then.

        The last row is the end of the last epoch, or with `fit(validate_every=...)` the last validation if it is later.
        `tokens_per_second` and `mfu` are included if `fit` records them. Every access reads the values from the devices.

        With several processes, reading them is a collective. In a STEP event, where possibly one process reads them, this is
        the last loss that was fetched.
        """
        return self.read_metrics()

    @property
    def logs(self) -> dict[str, float]:
        """The entries of `metrics` and of `validation`, the latter with the prefix `val_`."""
        validation = {f"{VALIDATION_PREFIX}{name}": value for name, value in self.validation.items()}
        return {**self.metrics, **validation}


@dataclasses.dataclass(frozen=True)
class CallbackResult:
    """The result of a callback that stops training or replaces the state.

    Attributes:
        stop_reason: The reason to stop, a sentence, which becomes `Fit.stop_reason`; None to continue.
        state: The state to continue or end with; None for the current state.

    Raises:
        TypeError: `stop_reason` is not a string.

    Example:
        >>> def stop_below(event):
        ...     if event.moment == "epoch" and event.metrics["loss"] < 0.1:
        ...         return jdist.callbacks.CallbackResult("The loss is below 0.1.")
        >>> callbacks = [stop_below]
    """

    stop_reason: str | None = None
    state: PyTree = None

    def __post_init__(self) -> None:
        if not isinstance(self.stop_reason, str | None):
            raise TypeError(
                "`stop_reason` must be a sentence that explains why training stops, got "
                f'{one_line(self.stop_reason)}: `CallbackResult(stop_reason="The loss is below 0.1.")`.'
            )


class Callback:
    """Base class of callbacks. Subclasses override `__call__`, and the other methods if they need them.

    At each event all callbacks receive the same event; their results take effect after the last of them was called. A plain
    function of an event is accepted wherever a callback is.

    Attributes:
        identity: The name under which a checkpoint stores the state of this callback. By default it is the class and the
            `repr`, if the class defines one. Two callbacks of one class need different identities.
        destination: The file or directory that this callback writes to. `fit` refuses two callbacks with one destination.
        checkpointer: The checkpointer that this callback saves with. Such callbacks are called after the others, so that a
            checkpoint contains the states of the others at the same event.
        is_collective: Whether all processes must have this callback, because it uses collectives or replaces the state. `fit`
            raises an error on all processes if one has it, or one with other options, and another does not. A callback with a
            `checkpointer` is collective.
        step_interval_seconds: The number of seconds between two STEP events that suffices for this callback; 0 for an event
            after each call of the step. `fit` uses the smallest of its callbacks. The first call, and the last one before a
            validation or the end of an epoch, have an event in any case.

    Example:
        >>> class BestLoss(jdist.callbacks.Callback):
        ...     best = float("inf")
        ...     def __call__(self, event):
        ...         if event.moment == "epoch":
        ...             self.best = min(self.best, event.metrics["loss"])
        ...     def get_state(self):
        ...         return {"best": self.best}
        ...     def set_state(self, state):
        ...         self.best = float(state["best"])
    """

    identity: str | None = None
    destination: pathlib.Path | None = None
    checkpointer: Checkpointer | None = None
    is_collective: bool = False
    step_interval_seconds: float = 0.0

    def __call__(self, event: Event, /) -> CallbackResult | None:
        """Called at every event, in the order of the callbacks in `fit(callbacks=)`."""
        return None

    def get_state(self) -> dict[str, Any]:
        """Returns the state of this callback that checkpoints store: a dict of arrays, numbers, and further dicts and lists.

        Called for callbacks whose class overrides it.
        """
        return {}

    def set_state(self, state: Mapping[str, Any], /) -> None:
        """Restores what `get_state` returned, with arrays on the host. Called before the START event of a resumed run."""

    def close(self) -> None:
        """Releases resources. Called once at the end of `fit`, also after an error."""


CallbackFunction: TypeAlias = Callable[[Event], CallbackResult | None]


@final
class FunctionCallback(Callback):
    """A function as a `Callback`."""

    def __init__(self, function: CallbackFunction):
        self.function = function

    def __call__(self, event: Event, /) -> CallbackResult | None:
        """Calls the function."""
        return self.function(event)


def as_callbacks(callbacks: Sequence[Callback | CallbackFunction]) -> list[Callback]:
    """Returns `callbacks` as `Callback` objects in calling order, those with a checkpointer last.

    Raises:
        TypeError: `callbacks` is not a list, or one of them is not a callback.
        ValueError: Two callbacks write to one destination.
    """
    if callable(callbacks) or not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise TypeError(f"`callbacks` must be a list of callbacks, got {one_line(callbacks)}. Write `callbacks=[...]`.")
    adapted = [_as_callback(callback) for callback in callbacks]
    writers: dict[pathlib.Path, Callback] = {}
    for callback in adapted:
        if callback.destination is None:
            continue
        path = absolute(callback.destination)
        if path in writers:
            names = " and ".join(type(writer).__name__ for writer in (writers[path], callback))
            raise ValueError(f"Two callbacks, {names}, write to {str(path)!r}. Pass a different path to each.")
        writers[path] = callback
    return sorted(adapted, key=lambda callback: callback.checkpointer is not None)


# Names of callbacks that Keras or Lightning have too.
_FOREIGN_NAMES = ("Callback", "CSVLog", "EarlyStopping", "TensorBoard", "TimeLimit")


def _as_callback(callback: Any) -> Callback:
    if isinstance(callback, Callback):
        return callback
    if not callable(callback) or isinstance(callback, type):
        name = f"the class {callback.__name__}: call it" if isinstance(callback, type) else one_line(callback)
        kind = type(callback).__name__
        hint = attribute_hint("jdist.callbacks", kind) or (
            f"Write `jdist.callbacks.{kind}(...)`." if kind in _FOREIGN_NAMES else ""
        )
        raise TypeError(
            f"`callbacks` must contain `jdist.callbacks.Callback` objects or functions of an event, got {name}. {hint}".rstrip()
        )
    ignored = [name for name in ("get_state", "set_state", "close") if hasattr(callback, name)]
    if ignored:
        name = type(callback).__name__
        raise TypeError(
            f"{name} has the method `{ignored[0]}`, which is called for subclasses of `jdist.callbacks.Callback` only. Write "
            f"`class {name}(jdist.callbacks.Callback)`."
        )
    return FunctionCallback(cast(CallbackFunction, callback))
