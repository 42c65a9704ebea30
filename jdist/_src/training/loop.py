"""The loop of training: a `for` over calls of the step, and what is told of each.

Read `run` first. The order within is fixed: the step, then what callbacks are told of it, then, at the end of an epoch, its
validation, its row in the history, and what they are told of that.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jdist._src.callbacks.learning_rate import learning_rate_of
from jdist._src.core.errors import FitError
from jdist._src.core.tree import PyTree
from jdist._src.execution.replicate import Proof
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.variables import read_values
from jdist._src.training.callback_state import Memory, saved_memories
from jdist._src.training.events import Callback, CallbackResult, Event, Fit, Moment
from jdist._src.training.interrupt import interrupts
from jdist._src.training.recorder import NonFiniteStep, Recorder
from jdist._src.training.resume import StartPoint, with_seen
from jdist._src.training.state import state_fields
from jdist._src.training.step_inputs import Turn
from jdist._src.training.steps import StepOutcome, TrainCarry
from jdist._src.training.summary import is_spent

CHECKED = 32  # calls after which losses are looked at, and processes agree whether to stop


@dataclasses.dataclass(frozen=True)
class Work:
    """What a loop calls.

    Attributes:
        strategy: Where all of it runs.
        step: From a carry and the batches of a call to the next carry, and how its steps went.
        read: From what was seen to numbers on the host.
        nothing_seen: Gives what is seen before the first step of an epoch.
        validate: From a state to the numbers of its evaluation, or None.
        callbacks: Whom to tell.
        memories: The callbacks with something to remember.
        metric_names: The names in `Event.logs` at the end of an epoch.
        last_checkpoint: Returns a sentence that names the newest checkpoint.
        proof: Gives what was proved of the step.
        total_steps: After how many steps training is at its end, if that is known.
        asked_steps: How many steps were asked for, if that was said.
        stops_at_failure: Whether a loss that is not finite ends training.
    """

    strategy: Strategy
    step: Callable[[TrainCarry, Turn], tuple[TrainCarry, StepOutcome]]
    read: Callable[[PyTree], Mapping[str, Any]]
    nothing_seen: Callable[[], PyTree]
    validate: Callable[[PyTree], Mapping[str, Any]] | None
    callbacks: Sequence[Callback]
    memories: Sequence[Memory]
    metric_names: Sequence[str]
    last_checkpoint: Callable[[], str]
    proof: Callable[[], Proof]
    total_steps: int | None
    asked_steps: int | None
    stops_at_failure: bool


class Loop:
    """Training as it goes on.

    Mutable: the carry of the last step, how far it is, and why it stops.

    Args:
        work: What it calls.
        begin: The state to begin with, and what was kept beside it.
        position: Where the data begin.
    """

    def __init__(self, work: Work, begin: StartPoint, position: Mapping[str, Any]):
        self._work = work
        seen: Any = with_seen(work.nothing_seen(), begin.kept.get("seen", ()))
        self._carry = TrainCarry(begin.state, seen, work.strategy.put(np.bool_(False)))
        self._first = self._step = self._epoch_first = int(state_fields(begin.state).step)
        self._calls = self._taken = self._epoch_taken = 0
        self._epoch, self._position, self._stalled = position["epoch"], position, 0.0
        self._metrics: Mapping[str, Any] = {}
        self._record = Recorder(begin.kept)
        self._began = self._epoch_began = time.perf_counter()
        self._stop: str | None = None
        self._failed = self._ends_epoch = False

    @property
    def step(self) -> int:
        """How many steps the state has gone through."""
        return self._step

    def run(self, turns: Iterable[Turn]) -> Fit:
        """Takes the steps, and says how it ended."""
        with self._keeping_state(), jax.transfer_guard("disallow"), interrupts() as interrupt:
            self._tell(Moment.START)
            try:
                for turn in turns:
                    with interrupt.held():
                        self._take(turn)
                        self._tell(Moment.STEP)
                        if turn.ends_epoch:
                            self._end_epoch()
                    if self._is_over(turn, interrupt.asked):
                        break
            except KeyboardInterrupt:
                if interrupt.asked:  # twice
                    raise
                self._stop = _INTERRUPTED
            self._end()
        return self._fit()

    def _take(self, turn: Turn) -> None:
        self._carry, outcome = self._work.step(self._carry, turn)
        self._record.wait_for(self._step + 1, self._position, turn, outcome)
        last = turn.draws[-1]
        self._step, self._calls = self._step + len(turn.draws), self._calls + 1
        self._epoch, self._position, self._stalled, self._taken = last.epoch, last.position, last.stalled, last.rows
        self._ends_epoch = turn.ends_epoch
        if self._calls % CHECKED == 0:
            self._look_at(self._record.fetch(but=CHECKED // 2))

    def _end_epoch(self) -> None:
        self._look_at(self._record.fetch())
        seconds = time.perf_counter() - self._epoch_began
        self._metrics = self._work.read(self._carry.seen)
        rate = learning_rate_of(self._carry.state, step=self._step)
        validation = self._work.validate(self._carry.state) if self._work.validate else {}
        self._record.add_row(
            {
                "epoch": self._epoch,
                "step": self._step,
                "seconds": time.perf_counter() - self._began,
                "rows_per_second": (self._taken - self._epoch_taken) / seconds,
                "stalled": self._stalled,
                **({} if rate is None else {"learning_rate": rate}),
                **self._metrics,
                **{f"val_{name}": value for name, value in validation.items()},
            }
        )
        self._carry = dataclasses.replace(self._carry, seen=self._work.nothing_seen())
        self._epoch_first, self._epoch_taken = self._step, self._taken
        self._tell(Moment.EPOCH, validation)
        self._epoch_began = time.perf_counter()

    def _is_over(self, turn: Turn, interrupted: bool) -> bool:
        if interrupted:
            self._stop = self._stop or _INTERRUPTED
        if jax.process_count() == 1:
            return self._stop is not None
        if not turn.ends_epoch and self._calls % CHECKED:
            return False
        asked = multihost_utils.process_allgather(np.bool_(self._stop is not None))
        if asked.any():
            self._stop = self._stop or "Another process stopped."
        return bool(asked.any())

    def _end(self) -> None:
        self._look_at(self._record.fetch())
        if self._step != self._epoch_first:
            self._metrics = self._work.read(self._carry.seen)
            self._epoch_first = self._step
        if self._stop is None:
            asked = self._work.asked_steps
            short = asked is not None and self._step < asked
            self._stop = f"The data ended after {self._step} of {asked} steps." if short else self._ended(asked)
        self._tell(Moment.END)

    def _ended(self, asked: int | None) -> str:
        if asked is None or not self._first or self._step > self._first:
            return _ENDED
        return no_step_left(asked, self._first)

    def _look_at(self, failure: NonFiniteStep | None) -> None:
        """Stops at a loss that is not finite, if that is asked for: the steps from there on were refused."""
        if failure is None or not self._work.stops_at_failure or self._failed:
            return
        self._failed = True
        self._step, self._position = failure.step - 1, failure.before
        self._record.forget_after(failure.step)
        self._stop = f"{failure} The state is that before the step."

    def _tell(self, moment: Moment, validation: Mapping[str, Any] | None = None) -> None:
        """Calls the callbacks, all with the same event, and then does what they answer."""
        if not self._work.callbacks:
            return
        event = self._event(moment, validation or {})
        with jax.transfer_guard("allow"):
            answers = [_checked(callback, callback(event)) for callback in self._work.callbacks]
        for answer in filter(None, answers):
            if answer.state is not None:
                self._carry = dataclasses.replace(self._carry, state=answer.state)
            self._stop = self._stop or answer.stop

    def _event(self, moment: Moment, validation: Mapping[str, Any]) -> Event:
        return Event(
            moment=moment,
            step=self._step,
            epoch=self._epoch,
            state=self._carry.state,
            position=self._position,
            rows=self._taken,
            seconds=time.perf_counter() - self._began,
            stalled=self._stalled,
            total_steps=self._work.total_steps,
            validation=validation,
            strategy=self._work.strategy,
            history=self._record.history,
            kept=self._kept,
            is_sound=self._is_sound,
            read=functools.partial(self._metrics_at, moment),
            ends_epoch=self._ends_epoch,
            metric_names=self._work.metric_names,
        )

    def _metrics_at(self, moment: Moment) -> Mapping[str, Any]:
        """What is seen of the epoch so far; of one that has just ended, what was seen of it."""
        if self._step == self._epoch_first:
            return self._metrics
        if jax.process_count() > 1 and moment is Moment.STEP:
            return self._record.last_loss  # to read it all, every process would have to ask
        return self._work.read(self._carry.seen)

    def _is_sound(self) -> bool:
        self._look_at(self._record.fetch())
        return not self._failed

    def _kept(self) -> dict[str, Any]:
        """What a resumed run needs besides the state."""
        return {
            "callbacks": saved_memories(self._work.memories),
            "history": [dict(row) for row in self._record.history.rows],
            "losses": self._record.as_arrays(),
            "seen": jax.tree.leaves(read_values(self._carry.seen)),
        }

    @contextlib.contextmanager
    def _keeping_state(self) -> Iterator[None]:
        """Gives the state that there is together with an error; and ends what callbacks have begun."""
        try:
            yield
        except Exception as error:
            lost = _is_lost(self._carry.state, error)
            if not lost and self._step == self._first:
                raise
            self._stop = f"{type(error).__name__}: {error}"
            if lost:
                raise FitError(
                    f"Training was ended at step {self._step + 1}, or shortly before it, by {self._stop}\n  The state is lost: "
                    f"the step had taken its memory over. {self._work.last_checkpoint()} The history is `error.fit.history`.",
                    self._fit(lost=True),
                ) from error
            raise FitError(
                f"Training was ended behind step {self._step} by {self._stop}\n  What there is by then is the `fit` of this "
                "error: `error.fit.state`, `error.fit.history`.",
                self._fit(),
            ) from error
        finally:
            with contextlib.ExitStack() as closing:
                for callback in self._work.callbacks:
                    closing.callback(getattr(callback, "close", lambda: None))

    def _fit(self, lost: bool = False) -> Fit:
        history = self._record.history
        history = dataclasses.replace(history, losses=dict(history.losses))
        proof = self._work.proof() if self._step > self._first else None
        state = None if lost else self._carry.state
        description = self._work.strategy.describe(state)
        return Fit(state, history, self._step, self._stop or "", description, proof)


_INTERRUPTED = "Ctrl-C was pressed."
_ENDED = "Every step was taken that was asked for."


def no_step_left(steps: int, taken: int) -> str:
    """Returns a sentence for a `fit` that has no step to take."""
    return (
        f"No step was taken: steps={steps} counts from the beginning of training, and the state has gone through {taken:,} "
        f"already. To take more of them, pass a larger number: `steps={taken} + ...`."
    )


def _is_lost(state: PyTree, error: Exception) -> bool:
    """Whether the arrays of `state` have no values any more."""
    if is_spent(state):
        return True
    # An error at run time may surface a step later, or where a callback reads the state: the state is then the result of
    # what failed. Of several processes one may wait for ever for what another did not send, so there it takes such an error.
    if jax.process_count() > 1 and not isinstance(error, jax.errors.JaxRuntimeError):
        return False
    try:
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError:
        return True
    return False


def _checked(callback: Callback, answer: Any) -> CallbackResult | None:
    if isinstance(answer, CallbackResult | None):
        return answer
    name = getattr(callback, "__name__", type(callback).__name__)
    raise TypeError(
        f"The callback {name} returned {answer!r}: a callback returns None, or a `jdist.callbacks.Answer`, which says to stop, "
        "or what to go on with."
    )
