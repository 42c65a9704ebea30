"""What the training loop tells, and what it may be told: events, answers, and the record that it ends with."""

import dataclasses
import enum
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jdist._tree import PyTree
from jdist.replicate import Proof
from jdist.strategies.base import Strategy
from jdist.strategies.description import Description
from jdist.training.history import History
from jdist.training.report import report


class Moment(enum.Enum):
    """When an event is."""

    START = "before the first step"
    STEP = "after a call of the step"
    EPOCH = "after the last step of an epoch, and its validation"
    END = "after the last step"


@dataclasses.dataclass(frozen=True)
class Event:
    """What a callback is told.

    Attributes:
        moment: When it is. After the last step of an epoch there are two events: STEP, then EPOCH.
        step: How many steps the state has gone through, those before a resume included.
        epoch: Which epoch the last step was of, from 0.
        state: The training state. The next step takes its memory over: copy, within the call, what is to be kept.
        position: Where the data go on behind the last step, as `DistributedIterator.get_state` gives it.
        rows: How many examples were taken since the start of this `fit`, over all replicas.
        seconds: How long this `fit` has run.
        stalled: Which part of the steps had to wait for their batch, 0 to 1.
        total_steps: After how many steps training is at its end, if that is known.
        validation: What evaluation on the validation data gave; of EPOCH events, else empty.
        strategy: Where it runs.
        history: What was recorded so far.
        kept: Gives what a resumed run needs besides state and position: what callbacks and this epoch have seen, the history.
        is_sound: Waits for the last step, and says whether no step was refused because its loss was not finite.
        read: Gives the metrics of this epoch so far. See `metrics`.
        ends_epoch: Whether the last step was the last of its epoch; of STEP events, an EPOCH event follows then.
    """

    moment: Moment
    step: int
    epoch: int
    state: PyTree
    position: Mapping[str, Any]
    rows: int
    seconds: float
    stalled: float
    total_steps: int | None
    validation: Mapping[str, float]
    strategy: Strategy
    history: History
    kept: Callable[[], dict[str, Any]]
    is_sound: Callable[[], bool]
    read: Callable[[], Mapping[str, float]]
    ends_epoch: bool = False

    @property
    def metrics(self) -> Mapping[str, float]:
        """The loss and the metrics of this epoch so far, exact over all its examples; read from the devices when asked for.

        With several processes, which would all have to ask at once, within an epoch it is the last loss that is known.
        """
        return self.read()

    @property
    def logs(self) -> dict[str, float]:
        """`metrics`, and those of the validation with `val_` before their names."""
        return {**self.metrics, **{f"val_{name}": value for name, value in self.validation.items()}}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a callback may return: that training stops, or goes on with another state.

    Attributes:
        stop: A sentence that says why; None to go on.
        state: What to go on, or to end, with; None for what there is.
    """

    stop: str | None = None
    state: PyTree = None


@runtime_checkable
class Callback(Protocol):
    """A function of events. At each event all callbacks are told the same; then what they answer is done.

    One that has begun something may have a method `close()`: it is called in the end, whatever happened. One that remembers
    what a resumed run needs has two more: `get_state()` gives it as a dict of arrays and numbers (it may hold further dicts
    and lists), which is saved with each checkpoint; `set_state(tree)` takes the same back, as arrays on the host, before the
    START event.
    """

    def __call__(self, event: Event, /) -> Answer | None:
        """Called at every event, in the order in which callbacks were handed in."""
        ...


@dataclasses.dataclass(frozen=True)
class Fit:
    """How training ended.

    Attributes:
        state: The training state after the last step.
        history: What was recorded: a row an epoch, and the loss of every step.
        steps: How many steps were taken, those before a resume included. A state of an earlier step that a callback ended
            with, the best one, says in its `step` which it is.
        stop: Why training stopped, a sentence.
        description: Where it ran, and where the state lies.
        proof: What was proved of the step; None if there was none.
    """

    state: PyTree
    history: History
    steps: int
    stop: str
    description: Description | None = None
    proof: Proof | None = None

    def report(self, path: str | os.PathLike[str], *, title: str = "Training") -> pathlib.Path:
        """Writes one page of HTML: how it ended, pictures, the epochs, where it ran, what was proved, the environment.

        Args:
            path: Where to write it; on several processes the first one does. Nothing else belongs to the page.
            title: What it is called.

        Returns:
            The path.

        Raises:
            ModuleNotFoundError: matplotlib is missing; the message says how to install it.
            OSError: The page cannot be written there.

        Example:
            >>> import tempfile
            >>> history = History([{"epoch": 0, "step": 9, "loss": 0.5}], {1: 0.9, 9: 0.4})
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Fit(None, history, 9, "Every step was taken.").report(folder + "/run.html").name
            'run.html'
        """
        return report(self, path, title=title)
