"""Callbacks that stop training: without improvement, or after a time limit."""

import datetime
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, final, get_args

import numpy as np

from jdist._src.callbacks.arguments import check_has_metric
from jdist._src.core.arguments import as_int, check_seconds
from jdist._src.core.tree import PyTree, one_line
from jdist._src.training.events import Callback, CallbackResult, Event, Moment
from jdist._src.training.state_copies import copy_state, from_saved, to_saved

Mode: TypeAlias = Literal["min", "max"]
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@final
class EarlyStopping(Callback):
    """Stops when a metric has not improved for some validations.

    A metric of the validation data is compared after each validation: at the end of each epoch, or every
    `fit(validate_every=...)` steps. A metric of training is compared in each row of the history.

    Mutable: it stores the best value and, on the devices, a copy of the state that had it, which takes the memory of one more
    state. Checkpoints contain both, so a resumed run stops at the same step. Training ends with that copy, whatever the
    reason to stop. NaN is never an improvement.

    Args:
        metric: The name of the metric: `"loss"` or a metric of training, or `"val_loss"` and so on of the validation data.
        patience: The number of consecutive validations without improvement after which to stop; without validation data, of
            epochs.
        min_delta: The minimum change that counts as an improvement.
        mode: Whether a smaller value, `"min"`, or a larger one, `"max"`, is better.
        restore_best: Whether training ends with the state that had the best value instead of the last state.

    Raises:
        TypeError: `metric` is not a string, or `patience` is not an integer.
        ValueError: `patience` is less than 1, `min_delta` is not a number >= 0, or `mode` is unknown. Raised by `Trainer.fit`
            before the first step: `metric` does not exist.

    Example:
        >>> stopping = jdist.callbacks.EarlyStopping("val_accuracy", mode="max", patience=5)
        >>> stopping
        EarlyStopping('val_accuracy', patience=5, mode='max')
    """

    is_collective = True

    def __init__(
        self,
        metric: str = "val_loss",
        *,
        patience: int = 1,
        min_delta: float = 0.0,
        mode: Mode = "min",
        restore_best: bool = True,
    ):
        if not isinstance(metric, str):
            raise TypeError(f"`metric` must be the name of a metric, got {type(metric).__name__}.")
        if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise ValueError(f"`min_delta` must be a number >= 0, got {one_line(min_delta)}.")
        if mode not in get_args(Mode):
            raise ValueError(f"`mode` must be 'min' or 'max', got {one_line(mode)}.")
        self.patience = as_int("`patience`", patience, 1)
        self.metric, self.min_delta, self.mode = metric, float(min_delta), mode
        self.restore_best = restore_best
        self.identity = f"EarlyStopping({metric!r}, mode={mode!r})"  # the options that the best value depends on
        self._saved: Mapping[str, Any] | None = None
        self._reset()

    def __repr__(self) -> str:
        return f"EarlyStopping({self.metric!r}, patience={self.patience}, mode={self.mode!r})"

    @property
    def best(self) -> float | None:
        """The best value so far, if there is one."""
        return self._best if self._best_step >= 0 else None

    def __call__(self, event: Event, /) -> CallbackResult | None:
        """Compares the metric after each epoch and each validation."""
        match event.moment:
            case Moment.START:
                self._reset()
                self._restore(event)
                if event.metric_names is not None and not self._has_compared:
                    check_has_metric("EarlyStopping", self.metric, event.metric_names)
            case Moment.VALIDATION | Moment.EPOCH:
                return self._compare(event)
            case Moment.END:
                # Not earlier: a checkpoint at the end contains the last state, which corresponds to the data position.
                if self._best_state is not None and self._best_step != event.step:
                    return CallbackResult(state=self._best_state)
        return None

    def close(self) -> None:
        """Releases the copy of the state, which the caller may own now."""
        self._best_state = None

    def get_state(self) -> dict[str, Any]:
        """Returns the best value, its step and its state."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "epochs_since": self._epochs_since,
            "best_state": [] if self._best_state is None else to_saved(self._best_state),
        }

    def set_state(self, state: Mapping[str, Any], /) -> None:
        """Stores the result of `get_state` until the START event."""
        self._saved = state

    def _reset(self) -> None:
        self._best = math.inf if self.mode == "min" else -math.inf
        self._best_step = -1
        self._epochs_since = 0
        self._best_state: PyTree = None
        self._has_compared = False
        self._unit = "epoch"

    def _restore(self, event: Event) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            return
        self._best, self._best_step = float(saved["best"]), int(saved["best_step"])
        self._epochs_since = int(saved["epochs_since"])
        self._has_compared = self._best_step >= 0 or self._epochs_since > 0
        if self.restore_best and len(saved["best_state"]):
            self._best_state = from_saved("The best state", saved["best_state"], event.state, event.strategy)

    def _compare(self, event: Event) -> CallbackResult | None:
        logs = event.logs
        if self.metric not in logs:  # not every row has a validation
            if not self._has_compared and self.metric not in (event.metric_names or ()):
                check_has_metric("EarlyStopping", self.metric, logs)
            return None
        value = logs[self.metric]
        if np.ndim(value):
            raise ValueError(f"EarlyStopping needs a scalar metric; {self.metric!r} has {np.size(value)} values.")
        self._has_compared = True
        self._unit = "validation" if event.moment is Moment.VALIDATION else self._unit
        sign = 1.0 if self.mode == "min" else -1.0
        if sign * float(value) < sign * self._best - self.min_delta:
            self._best, self._best_step, self._epochs_since = float(value), event.step, 0
            self._best_state = None  # released first, so that there are at most two states
            self._best_state = copy_state(event.state) if self.restore_best else None
            return None
        self._epochs_since += 1
        return CallbackResult(self._stop_reason()) if self._epochs_since >= self.patience else None

    def _stop_reason(self) -> str:
        count = f"{self._epochs_since} {self._unit}{'s' * (self._epochs_since != 1)}"
        if self.best is None:
            return f"{self.metric} was NaN or infinite for {count}."
        return (
            f"{self.metric} was best, {self._best:.6g}, after step {self._best_step}, and did not improve for {count}."
        )


@final
class TimeLimit(Callback):
    """Stops after the step in which a time limit is exceeded.

    With several processes, a process that exceeds the limit stops all of them, at the next step at which they agree.

    Args:
        limit: The maximum duration of one `fit`: seconds, a `timedelta`, or a string such as `"90s"`, `"1h30m"` or `"2d"`.

    Raises:
        ValueError: `limit` is not a positive duration.

    Example:
        >>> callbacks = [jdist.callbacks.TimeLimit("1h30m")]
    """

    def __init__(self, limit: float | str | datetime.timedelta):
        self.seconds = _parse_seconds(limit)

    def __repr__(self) -> str:
        return f"TimeLimit({_format_seconds(self.seconds)!r})"

    def __call__(self, event: Event, /) -> CallbackResult | None:
        """Stops if the limit is exceeded."""
        if event.moment is not Moment.STEP or event.seconds < self.seconds:
            return None
        return CallbackResult(
            f"The time limit of {_format_seconds(self.seconds)} was exceeded after step {event.step}."
        )


def _parse_seconds(limit: Any) -> float:
    if isinstance(limit, datetime.timedelta):
        limit = limit.total_seconds()
    if isinstance(limit, str):
        pattern = "".join(rf"(?:(\d+(?:\.\d+)?)\s*{unit}\s*)?" for unit in _UNITS)
        match = re.fullmatch(rf"\s*{pattern}", limit)
        if not match or not any(match.groups()):
            raise ValueError(
                f"`limit` must be seconds, or a string such as '90s', '1h30m' or '2d', got {one_line(limit)}."
            )
        numbers = [float(number or 0) for number in match.groups()]
        limit = sum(number * size for number, size in zip(numbers, _UNITS.values(), strict=True))
    check_seconds("limit", limit)
    return float(limit)


def _format_seconds(seconds: float) -> str:
    """Returns a duration as a text that `_parse_seconds` reads: `5400` as `1h30m`."""
    text = ""
    for unit, size in _UNITS.items():
        number, seconds = (seconds, 0.0) if unit == "s" else divmod(seconds, size)
        text += f"{number:g}{unit}" if number else ""
    return text
