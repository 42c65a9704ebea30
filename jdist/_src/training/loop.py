"""The training loop: a `for` over calls of the step, and the events after each.

Read `Loop.run` first. The order is: the step, its STEP event; where one is due, the validation; after it, and at the end of an
epoch, the row of the history and its event, VALIDATION or EPOCH. Ctrl-C is deferred to the end of a step, so that it does not
separate a step from its state.
"""

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from jdist._src.core import activity
from jdist._src.core.errors import FitError
from jdist._src.core.source_lines import levels_to_user
from jdist._src.core.tree import PyTree, one_line
from jdist._src.execution.interrupts import interrupts_after_blocks
from jdist._src.replica.finite import are_finite_on_all_replicas
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.variables import read_values
from jdist._src.training.events import Callback, CallbackResult, Event, FunctionCallback, Moment
from jdist._src.training.fit import Fit, is_donated
from jdist._src.training.history_columns import VALIDATION_PREFIX
from jdist._src.training.recorder import NonFiniteStep, Recorder
from jdist._src.training.resume import (
    StartPoint,
    describe_last_checkpoint,
    restore_callback_states,
    restore_row_metrics,
    saved_callback_states,
    stateful_callbacks,
)
from jdist._src.training.state import accumulated_steps, learning_rate_of, params_of, skipped_updates, step_of
from jdist._src.training.state_copies import param_digest, replicated_fingerprints, summands
from jdist._src.training.step_calls import StepCalls, Totals
from jdist._src.training.step_inputs import DrawnBatch
from jdist._src.training.steps import StepFunctions, TrainCarry
from jdist._src.values.process_calls import check_same_facts, exchange_call, processes_of
from jdist._src.values.remote_array import materialize

CALLS_PER_CHECK = 32  # calls between two checks of the losses, and of whether a process stops
_INTERRUPTED = "Ctrl-C was pressed."
_ALL_STEPS_TAKEN = "All requested steps were taken."
_UNCHANGED_ADVICE = "Look at the learning rate, at frozen parameters, and whether the loss depends on the parameters."
_NOT_APPLIED = (
    "The gradients of the last {steps} were accumulated and not applied: the next update needs more steps. They are in "
    "`fit.state`, and are applied if training continues with it. To apply all, choose a number of steps that is divisible by "
    "the number of steps per update."
)
_PARAMS_NOT_FINITE = (
    " Parameters of this state are infinite or NaN, although the loss and the gradients of the steps before were finite: the "
    "initial parameters were, or an update. Look at the learning rate and at the state of the optimizer, and continue from an "
    "earlier checkpoint."
)


@dataclasses.dataclass(eq=False, kw_only=True)
class Loop:
    """One run of the training loop.

    Mutable: it holds the carry of the last step, the position of the data, and the reason to stop.

    Attributes:
        strategy: The strategy.
        functions: The step functions.
        call_step: From a carry and the batches of a call to the next carry and the outcome.
        peak_flops: The peak floating point operations per second of all devices, or None.
        validate: From a state to the metrics of the validation data, or None.
        validate_every: The number of steps between validations; None for a validation at the end of each epoch.
        callbacks: The callbacks, in calling order.
        metric_names: The names in `Event.logs` after a validation.
        resume: The argument of `fit`.
        total_steps: The number of steps after which training ends, if known.
        requested_steps: The number of steps that the caller requested, if any.
        start: The state to start with.
        first_position: The position of the data at the start.
    """

    strategy: Strategy
    functions: StepFunctions
    call_step: StepCalls
    peak_flops: float | None
    validate: Callable[[PyTree], Mapping[str, Any]] | None
    validate_every: int | None
    callbacks: Sequence[Callback]
    metric_names: Sequence[str]
    resume: Any
    total_steps: int | None
    requested_steps: int | None
    start: dataclasses.InitVar[StartPoint]
    first_position: dataclasses.InitVar[Mapping[str, Any]]

    def __post_init__(self, start: StartPoint, first_position: Mapping[str, Any]) -> None:
        self._stateful_callbacks = stateful_callbacks(self.callbacks)
        if "callbacks" in start.resume_data:
            restore_callback_states(self._stateful_callbacks, start.resume_data["callbacks"])
        metrics: Any = restore_row_metrics(self._empty_metrics(), start.resume_data.get("seen", ()))
        self._carry = TrainCarry(start.state, metrics, self.strategy.put(np.bool_(False)))
        self._first_step = self._step = self._row_first_step = int(step_of(start.state))
        self._last_validation = self._step
        self._calls = self._examples = 0
        self._epoch, self._position, self._stalled_fraction = first_position["epoch"], first_position, 0.0
        self._row_metrics: Mapping[str, Any] = {}
        names = self.functions.outcome_names
        self._recorder = Recorder(start.resume_data, self.functions.non_finite == "skip", names)
        self._row_start = self._totals()
        self._start_time = self._row_start.time
        self._step_interval = self._next_step_event = 0.0
        self._stop_reason: str | None = None
        self._processes = processes_of(self.strategy.mesh)
        self._are_all_processes = len(self._processes) == jax.process_count() > 1
        self._has_failed = self._ends_epoch = self._is_last = self._validates = False
        self._skipped_updates = skipped_updates(start.state)
        self._first_params = param_digest(start.state)

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self._step

    def run(self, groups: Iterable[Sequence[DrawnBatch]]) -> Fit:
        """Calls the step once per group of batches, and returns the result of training."""
        with self._raising_fit_errors(), interrupts_after_blocks() as interrupt:
            self._notify(Moment.START)
            intervals = [callback.step_interval_seconds for callback in self.callbacks]
            self._step_interval = min(intervals, default=math.inf)
            try:
                for batches in groups:
                    with interrupt:
                        self._take_steps(batches)
                        self._validates = self._is_validation_due()
                        if self._is_step_event_due():
                            self._notify(Moment.STEP)
                        if self._ends_row:
                            self._end_row()
                    if self._is_over(interrupt.is_requested):
                        break
            except KeyboardInterrupt:
                if interrupt.is_requested:  # Ctrl-C was pressed twice
                    raise
                self._stop_reason = _INTERRUPTED
            self._end()
        return self._fit()

    def _empty_metrics(self) -> Any:
        return self.strategy.init(self.functions.empty_metrics)

    def _take_steps(self, batches: Sequence[DrawnBatch]) -> None:
        self._carry, outcome = self.call_step(self._carry, batches)
        self._recorder.add_call(self._step + 1, self._position, self._examples, batches, outcome)
        last = batches[-1]
        self._step, self._calls = self._step + len(batches), self._calls + 1
        self._epoch, self._position = last.epoch, last.position
        self._ends_epoch, self._is_last = last.ends_epoch, last.is_last
        self._examples, self._stalled_fraction = last.examples, last.stalled_fraction
        if self._calls % CALLS_PER_CHECK == 0:
            self._check_failure(self._recorder.fetch(keep_pending=CALLS_PER_CHECK // 2))

    @property
    def _ends_row(self) -> bool:
        """Whether the last call of the step is the last of a row of the history."""
        return self._ends_epoch or self._validates

    def _is_validation_due(self) -> bool:
        """Returns whether a validation follows the last call of the step."""
        every = self.validate_every
        if self.validate is None or every is None:
            return self.validate is not None and self._ends_epoch
        return self._is_last or self._step // every > self._last_validation // every

    def _is_step_event_due(self) -> bool:
        """Returns whether the callbacks receive an event of the last call of the step."""
        if self._step_interval == 0 or self._ends_row:
            return True
        now = time.perf_counter()
        if now < self._next_step_event:
            return False
        self._next_step_event = now + self._step_interval
        return True

    def _end_row(self) -> None:
        """Validates if it is due, adds a row to the history, and sends its event."""
        self._check_failure(self._recorder.fetch())
        rates = self._totals().rates_since(self._row_start, self.peak_flops)
        self._row_metrics = self._metrics_since_row()
        self._count_skipped_updates()
        rate = learning_rate_of(self._carry.state, step=self._step)
        validation: Mapping[str, Any] = {}
        if self.validate is not None and self._validates:
            validation, self._last_validation = self.validate(self._carry.state), self._step
        self._recorder.add_row(
            {
                "epoch": self._epoch,
                "step": self._step,
                "seconds": time.perf_counter() - self._start_time,
                **rates,
                "stalled_fraction": self._stalled_fraction,
                **{name: count for name, count in self._recorder.row_counts._asdict().items() if count},
                **({} if rate is None else {"learning_rate": rate}),
                **self._row_metrics,
                **{f"{VALIDATION_PREFIX}{name}": value for name, value in validation.items()},
            }
        )
        self._carry = dataclasses.replace(self._carry, metrics=self._empty_metrics())
        self._row_metrics = {**self._row_metrics, **_reported(rates)}
        self._row_first_step = self._step
        self._notify(Moment.EPOCH if self._ends_epoch else Moment.VALIDATION, validation)
        self._row_start = self._totals()

    def _totals(self) -> Totals:
        calls = self.call_step
        return Totals(time.perf_counter(), self._examples, self._recorder.tokens, calls.flops, calls.compile_seconds)

    def _metrics_since_row(self) -> dict[str, Any]:
        """Returns the loss, the metrics and the norms since the last row of the history."""
        return {**self.functions.read_metrics(self.strategy, self._carry.metrics), **self._recorder.row_norms}

    def _is_over(self, is_interrupted: bool) -> bool:
        if is_interrupted:
            self._stop_reason = self._stop_reason or _INTERRUPTED
        if len(self._processes) == 1:
            return self._stop_reason is not None
        if not self._ends_row and self._calls % CALLS_PER_CHECK:
            return False
        stops = {"stops": self._stop_reason is not None}
        messages = exchange_call("the agreement whether `fit` ends", stops, self._processes)
        is_over = any(message["stops"] for message in messages)
        if is_over:
            self._stop_reason = self._stop_reason or "Another process stopped."
        return is_over

    def _end(self) -> None:
        self._check_failure(self._recorder.fetch())
        if self._step != self._row_first_step or (self._has_failed and not self._row_metrics):
            self._row_metrics = self._metrics_since_row()
            self._row_first_step = self._step
        self._count_skipped_updates()
        is_complete = self._stop_reason is None
        self._stop_reason = self._stop_reason or self._end_reason(self.requested_steps)
        if not self._has_failed:
            not_applied = self._not_applied()
            self._stop_reason = " ".join([*self._with_ineffective(self._stop_reason, not_applied), *not_applied])
            if is_complete and not_applied:
                warnings.warn(not_applied[0], stacklevel=levels_to_user())
        elif not self._has_finite_params():
            self._stop_reason += _PARAMS_NOT_FINITE
        self._notify(Moment.END)
        if self._are_all_processes:
            state = materialize(self._carry.state)
            facts = {name: [value] for name, value in replicated_fingerprints(state).items()}
            check_same_facts("the end of `fit`", facts, self._processes)

    def _not_applied(self) -> list[str]:
        """Returns a sentence about gradients in an accumulator that were not applied, if there are any."""
        num_steps = accumulated_steps(self._carry.state) if self._step > self._first_step else 0
        return [_NOT_APPLIED.format(steps="step" if num_steps == 1 else f"{num_steps} steps")] if num_steps else []

    def _count_skipped_updates(self) -> None:
        """Counts the steps that the optimizer itself has skipped since the last call."""
        before, self._skipped_updates = self._skipped_updates, skipped_updates(self._carry.state)
        self._recorder.add_counts(self._skipped_updates - before)

    def _with_ineffective(self, reason: str, not_applied: Sequence[str]) -> Iterator[str]:
        """Yields the reason to stop, and sentences about steps and examples that had no effect."""
        counts, steps = self._recorder.counts, self._step - self._first_step
        is_unchanged = (
            steps and self._first_params is not None and self._first_params == param_digest(self._carry.state)
        )
        if not is_unchanged or reason != _ALL_STEPS_TAKEN:
            yield reason
        if is_unchanged:
            yield f"No parameter changed in {steps:,} steps."
        if counts.skipped_steps:
            yield f"{counts.skipped_steps:,} of {steps:,} steps were skipped: a loss or a gradient was infinite or NaN."
        if counts.dropped_examples:
            yield f"{counts.dropped_examples:,} of {self._examples:,} examples were dropped: their weights are 0."
        if is_unchanged and not any(counts) and not not_applied:
            yield _UNCHANGED_ADVICE

    def _has_finite_params(self) -> bool:
        params = params_of(self._carry.state)
        return bool(jax.device_get(self.strategy.run(are_finite_on_all_replicas, (params,))))

    def _end_reason(self, requested_steps: int | None) -> str:
        if requested_steps is not None and self._step < requested_steps:
            return f"The data ended after {self._step} of {requested_steps} steps."
        if requested_steps is not None and 0 < self._first_step == self._step:
            return no_step_message(requested_steps, self._first_step)
        return _ALL_STEPS_TAKEN

    def _check_failure(self, failure: NonFiniteStep | None) -> None:
        """Stops at a step that is not finite, if configured. The step function rejected all steps from there on."""
        if failure is None or self.functions.non_finite != "stop" or self._has_failed:
            return
        self._has_failed = True
        self._step, self._position = failure.step - 1, failure.position_before
        self._recorder.remove_losses_after(failure.step)
        self._stop_reason = f"{failure} The state is the one before that step."

    def _notify(self, moment: Moment, validation: Mapping[str, Any] | None = None) -> None:
        """Calls all callbacks with the same event, then applies their results."""
        if not self.callbacks:
            return
        event = self._event(moment, validation or {})
        results = [_checked_result(callback, callback(event), self._carry.state) for callback in self.callbacks]
        for result in filter(None, results):
            if result.state is not None:
                if self._are_all_processes:  # they compare the values in their next agreement
                    values = replicated_fingerprints(result.state)
                    activity.calls.record("a state that a callback returned", hash(tuple(values.values())))
                self._carry = dataclasses.replace(self._carry, state=result.state)
            self._stop_reason = self._stop_reason or result.stop_reason

    def _event(self, moment: Moment, validation: Mapping[str, Any]) -> Event:
        return Event(
            moment=moment,
            step=self._step,
            epoch=self._epoch,
            read_state=functools.partial(materialize, self._carry.state),
            position=self._position,
            examples=self._examples,
            seconds=time.perf_counter() - self._start_time,
            stalled_fraction=self._stalled_fraction,
            total_steps=self.total_steps,
            validation=validation,
            strategy=self.strategy,
            history=self._recorder.history,
            resume_data=self._resume_data,
            is_finite=functools.partial(self._is_finite, moment),
            read_metrics=functools.partial(self._read_metrics, moment),
            ends_epoch=self._ends_epoch,
            validates=moment is Moment.STEP and self._validates,
            metric_names=self.metric_names,
        )

    def _read_metrics(self, moment: Moment) -> Mapping[str, Any]:
        """Returns the metrics since the last row of the history; in the event of a row, its metrics."""
        if self._step == self._row_first_step:
            return self._row_metrics
        if jax.process_count() > 1 and moment is Moment.STEP:
            # Reading the metrics is a collective, and possibly one process reads them.
            return self._recorder.last_values
        if self.functions.outcome_names:
            self._check_failure(self._recorder.fetch())
        rates = self._totals().rates_since(self._row_start, self.peak_flops)
        return {**self._metrics_since_row(), **_reported(rates)}

    def _is_finite(self, moment: Moment) -> bool:
        self._check_failure(self._recorder.fetch())
        if self._has_failed and moment is not Moment.END:  # the event has the number of a step that was rejected
            return False
        return self.functions.non_finite == "keep" or self._has_finite_params()

    def _resume_data(self) -> dict[str, Any]:
        return {
            "callbacks": saved_callback_states(self._stateful_callbacks),
            "history": [dict(row) for row in self._recorder.history.rows],
            "losses": self._recorder.losses_as_arrays(),
            **({"norms": norms} if (norms := self._recorder.norms_as_arrays()) else {}),
            "ineffective": list(self._recorder.row_counts),
            "seen": jax.tree.leaves(read_values(self._carry.metrics)),
            "replicas": self.strategy.num_replicas_in_sync,
            "shares": summands(self._carry.state),
        }

    @contextlib.contextmanager
    def _raising_fit_errors(self) -> Iterator[None]:
        """Raises errors in the block as `FitError` with the current state; closes the callbacks at its end."""
        try:
            yield
        except Exception as error:
            is_lost = _is_lost(self._carry.state, error)
            if not is_lost and self._step == self._first_step:
                raise
            self._stop_reason = f"{type(error).__name__}: {error}"
            if is_lost:
                last_checkpoint = describe_last_checkpoint(self.callbacks, self.resume)
                raise FitError(
                    f"Training failed at step {self._step + 1}, or shortly before it: {self._stop_reason}\n  The state is "
                    f"lost: it was donated to the step that failed. {last_checkpoint} The history is `error.fit.history`.",
                    self._fit(is_lost=True),
                ) from error
            raise FitError(
                f"Training failed after step {self._step}: {self._stop_reason}\n  The state and the history after that step "
                "are `error.fit.state` and `error.fit.history`.",
                self._fit(),
            ) from error
        finally:
            with contextlib.ExitStack() as stack:
                for callback in self.callbacks:
                    stack.callback(callback.close)

    def _fit(self, is_lost: bool = False) -> Fit:
        history = self._recorder.history
        norms = {name: dict(values) for name, values in history.norms.items()}
        history = dataclasses.replace(history, losses=dict(history.losses), norms=norms)
        proof = self.call_step.proof if self._step > self._first_step else None
        state = cast(Any, None if is_lost else materialize(self._carry.state))
        description = self.strategy.describe(state)
        steps, flops = self._step - self._first_step, self.call_step.flops
        step_flops = flops / steps if steps > 0 and flops > 0 else None
        return Fit(state, history, self._step, self._stop_reason or "", description, proof, step_flops)


def _reported(rates: Mapping[str, float]) -> dict[str, float]:
    """Returns the rates that events report: callbacks compute the examples per second themselves."""
    return {name: rate for name, rate in rates.items() if name != "examples_per_second"}


def no_step_message(requested_steps: int, steps: int) -> str:
    """Returns a sentence for a `fit` whose state has already taken the requested steps."""
    return (
        f"No step was taken: steps={requested_steps} counts from the beginning of training, and the state has already taken "
        f"{steps:,}. To take more steps, pass a larger number: `steps={steps} + ...`."
    )


def _is_lost(state: PyTree, error: Exception) -> bool:
    """Returns whether the arrays of `state` were lost by `error`."""
    if is_donated(state):
        return True
    # An error at run time may surface one step later, or where a callback reads the state; the state is then a result of the
    # step that failed. With several processes, `block_until_ready` could wait forever for data of another process, so there
    # it is called after such an error only.
    if jax.process_count() > 1 and not isinstance(error, jax.errors.JaxRuntimeError):
        return False
    try:
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError:
        return True
    return False


def _checked_result(callback: Callback, result: Any, state: PyTree) -> CallbackResult | None:
    """Returns the result of a callback, or raises TypeError if it cannot be one after `state`."""
    if result is None:
        return None
    function = callback.function if isinstance(callback, FunctionCallback) else callback
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(result, CallbackResult):
        raise TypeError(
            f"The callback {name} returned {one_line(result)}. A callback must return None, or a "
            "`jdist.callbacks.CallbackResult` to stop training or to replace the state."
        )
    if result.state is not None and jax.tree.structure(result.state) != jax.tree.structure(state):
        raise TypeError(
            f"The callback {name} returned the state {one_line(result.state)}, which has another structure than the training "
            f"state, a {type(state).__name__}. Return `event.state` with other values, such as "
            "`dataclasses.replace(event.state, params=params)`."
        )
    return result
