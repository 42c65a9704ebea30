"""What the training loop tells, and what it may be told: events, answers, and the record that it ends with."""

import copy
import dataclasses
import enum
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core import html
from jdist._src.core.tree import PyTree
from jdist._src.execution.replicate import Proof
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.description import Description
from jdist._src.training.history import History
from jdist._src.training.report.page import report
from jdist._src.training.summary import is_spent, last_row, state_in_words, table
from jdist._src.values.arrays import is_device_array


class Moment(enum.StrEnum):
    """When an event is.

    A moment is equal to its name in lower case. A comparison with any other text raises ValueError.

    Attributes:
        START: Before the first step.
        STEP: After a call of the step.
        EPOCH: After the last step of an epoch, and its validation.
        END: After the last step.

    Example:
        >>> Moment.EPOCH == "epoch", Moment.EPOCH in ("start", "end")
        (True, False)
    """

    START = "start"
    STEP = "step"
    EPOCH = "epoch"
    END = "end"

    # A wrong name would be silently unequal for ever.
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
        metric_names: The names that `logs` has at the end of an epoch, where they are known before it.
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
    metric_names: Sequence[str] | None = None

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
class CallbackResult:
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
    START event. In the checkpoint it is found again by the attribute `identity`, a string, if the callback has one; else by
    the class and the `repr`, if the class defines one. Two callbacks of one class need one of these to be told apart.
    """

    def __call__(self, event: Event, /) -> CallbackResult | None:
        """Called at every event, in the order in which callbacks were handed in."""
        ...


@dataclasses.dataclass(frozen=True, repr=False)
class Fit:
    """How training ended. A short text when printed, tables in a notebook.

    It can be pickled: the state comes back as numpy arrays, for `strategy.put` to place, and `description` as None.

    Attributes:
        state: The training state after the last step; None if an error in a step has lost it.
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

    def __repr__(self) -> str:
        epochs = len(self.history)
        metrics = [f"{name} {value}" for name, value in self._last().items()]
        parts = [f"{self.steps:,} steps", f"{epochs:,} epoch{'s' * (epochs != 1)}", *metrics, repr(self.stop)]
        return f"Fit({', '.join(parts)}; state: {state_in_words(self.state)})"

    def _repr_html_(self) -> str:
        facts = {"steps": f"{self.steps:,}", **self._last(), "stop": self.stop, "state": state_in_words(self.state)}
        proof = {} if self.proof is None else {"proof": str(self.proof)}
        return html.block(table("Fit", facts | proof), self.history._repr_html_())

    def _last(self) -> dict[str, str]:
        return last_row(self.history.rows[-1]) if self.history.rows else {}

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_copy("pickled")
        # Without the description, which has the devices of this process.
        return Fit, (jax.tree.map(_on_host, self.state), self.history, self.steps, self.stop, None, self.proof)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fit":
        self._check_copy("copied")
        history = copy.deepcopy(self.history, memo)
        return dataclasses.replace(self, state=jax.tree.map(_copied, self.state), history=history)

    def _check_copy(self, word: str) -> None:
        if is_spent(self.state):
            raise ValueError(
                f"This `Fit` cannot be {word}: the memory of its state was given to a later step. Use the record that the "
                "later `fit` returned, or leave the state out: `dataclasses.replace(fit, state=None)`."
            )

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


def _copied(leaf: Any) -> Any:
    return jax.device_put(leaf, leaf.sharding, may_alias=False) if is_device_array(leaf) else copy.deepcopy(leaf)


def _on_host(leaf: Any) -> Any:
    if not is_device_array(leaf):
        return leaf
    if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        raise ValueError(
            f"This `Fit` cannot be pickled: an array of its state ({leaf.dtype}, shape {list(leaf.shape)}) has parts on other "
            "processes. Save the state with a `jdist.Checkpointer`."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.asarray(np.asarray(jax.random.key_data(leaf))), impl=jax.random.key_impl(leaf)
        )
    return np.asarray(leaf)
