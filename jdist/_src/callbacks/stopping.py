"""When to stop: training that gets no better, and time that is over."""

import datetime
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, final

import numpy as np

from jdist._src.callbacks.arguments import check_seconds
from jdist._src.callbacks.state_copies import copied, from_saved, leaves_to_save
from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree
from jdist._src.training.events import Callback, CallbackResult, Event, Moment

_SIGNS = {"min": 1.0, "max": -1.0}
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@final
class EarlyStopping:
    """Stops when a metric has not got better for some epochs.

    Mutable: it remembers the best value and, on the devices, a copy of the state that had it, which takes the memory of one
    more state. Both are saved with checkpoints, so a resumed run decides the same. Training ends with that copy, in the event
    at the end, however it comes to its end. NaN is never better.

    Args:
        metric: Whose values: `"loss"` or a metric of training, or `"val_loss"` and so on of the validation data.
        patience: After how many epochs in a row without a better value it stops.
        min_delta: By how much more than this a value has to be better.
        mode: Whether a better value is a smaller one, `"min"`, or a greater one, `"max"`.
        restore_best: Whether training ends with the state that had the best value, and not with the last.

    Raises:
        ValueError: Raised before the first step by `Trainer.fit`, or after an epoch by another loop: there is no such metric.

    Example:
        >>> stopping = jdist.callbacks.EarlyStopping("val_accuracy", mode="max", patience=5)
        >>> stopping
        EarlyStopping('val_accuracy', patience=5, mode='max')
    """

    def __init__(
        self,
        metric: str = "val_loss",
        *,
        patience: int = 1,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        restore_best: bool = True,
    ):
        if not isinstance(metric, str):
            raise TypeError(f"`metric` is the name of one, got {type(metric).__name__}.")
        if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise ValueError(f"`min_delta` is a number from 0 up, got {min_delta!r}.")
        if mode not in _SIGNS:
            raise ValueError(f"`mode` is 'min' or 'max', whichever is better, got {mode!r}.")
        self.patience = as_int("`patience`", patience, 1)
        self.metric, self.min_delta, self.mode = metric, float(min_delta), mode
        self.restore_best = restore_best
        self._saved: Mapping[str, Any] | None = None
        self._begin()

    def __repr__(self) -> str:
        return f"EarlyStopping({self.metric!r}, patience={self.patience}, mode={self.mode!r})"

    @property
    def identity(self) -> str:
        """What its memory in a checkpoint is found by: the options that the best value depends on."""
        return f"EarlyStopping({self.metric!r}, mode={self.mode!r})"

    @property
    def best(self) -> float | None:
        """The best value so far, if there is one."""
        return self._best if self._best_step >= 0 else None

    def __call__(self, event: Event, /) -> CallbackResult | None:
        """Called by the loop."""
        match event.moment:
            case Moment.START:
                self._begin()
                self._resume(event)
                if event.metric_names is not None and self.metric not in event.metric_names:
                    self._miss(event.metric_names)
            case Moment.EPOCH:
                return self._judge(event)
            case Moment.END:
                # Not earlier: what is saved at the end is the last state, at the position of the data that belongs to it.
                if self._best_state is not None and self._best_step != event.step:
                    return CallbackResult(state=self._best_state)
        return None

    def close(self) -> None:
        """Gives the copy back: the state may be in use elsewhere now."""
        self._best_state = None

    def get_state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "epochs_since": self._epochs_since,
            "best_state": [] if self._best_state is None else leaves_to_save(self._best_state),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes it back."""
        self._saved = state

    def _begin(self) -> None:
        self._best = _SIGNS[self.mode] * math.inf
        self._best_step = -1
        self._epochs_since = 0
        self._best_state: PyTree = None
        self._found = False

    def _resume(self, event: Event) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            return
        self._best, self._best_step = float(saved["best"]), int(saved["best_step"])
        self._epochs_since = int(saved["epochs_since"])
        self._found = self._best_step >= 0 or self._epochs_since > 0
        if self.restore_best and len(saved["best_state"]):
            leaves = saved["best_state"]
            self._best_state = from_saved("The best state", leaves, event.state, event.strategy)

    def _judge(self, event: Event) -> CallbackResult | None:
        logs = event.logs
        if self.metric not in logs:
            return self._miss(logs)
        self._found = True
        sign, value = _SIGNS[self.mode], self._number(logs[self.metric])
        if sign * value < sign * self._best - self.min_delta:
            self._best, self._best_step, self._epochs_since = value, event.step, 0
            self._best_state = None  # first, or there would be three states
            self._best_state = copied(event.state) if self.restore_best else None
            return None
        self._epochs_since += 1
        return CallbackResult(stop=self._sentence()) if self._epochs_since >= self.patience else None

    def _miss(self, logs: Collection[str]) -> None:
        """An epoch without the metric. Validation may be every few epochs, but not before the first that is asked about."""
        if self._found:
            return
        there = ", ".join(map(repr, logs))
        data = " Hand in `validation_data`." if self.metric.startswith("val_") else ""
        raise ValueError(f"EarlyStopping watches {self.metric!r}, and there are only {there}.{data}")

    def _number(self, value: Any) -> float:
        if np.ndim(value):
            raise ValueError(
                f"EarlyStopping watches {self.metric!r}, which is {np.size(value)} numbers. Watch a metric that is one."
            )
        return float(value)

    def _sentence(self) -> str:
        epochs = f"{self._epochs_since} epoch{'s' * (self._epochs_since != 1)}"
        if self.best is None:
            return f"{self.metric} was no number in {epochs}."
        return f"{self.metric} was best, {self._best:.6g}, after step {self._best_step}, and got no better in {epochs}."


def time_limit(limit: float | str | datetime.timedelta) -> Callback:
    """Stops after the step in which the time is over.

    On several processes one whose time is over stops all of them, where they next agree whether to go on.

    Args:
        limit: How long one `fit` may run: seconds, a `timedelta`, or words such as `"90s"`, `"1h30m"` or `"2d"`.

    Raises:
        ValueError: It is no positive time.

    Example:
        >>> callbacks = [jdist.callbacks.time_limit("1h30m")]
    """
    seconds = _seconds(limit)

    def stop_in_time(event: Event) -> CallbackResult | None:
        if event.moment is not Moment.STEP or event.seconds < seconds:
            return None
        return CallbackResult(stop=f"The time limit of {_words(seconds)} was over after step {event.step}.")

    return stop_in_time


def _seconds(limit: Any) -> float:
    if isinstance(limit, datetime.timedelta):
        limit = limit.total_seconds()
    if isinstance(limit, str):
        found = re.fullmatch(r"\s*" + "".join(rf"(?:(\d+(?:\.\d+)?)\s*{unit}\s*)?" for unit in _UNITS), limit)
        if not found or not any(found.groups()):
            raise ValueError(f"A time limit is seconds, or words such as '90s', '1h30m' or '2d', got {limit!r}.")
        limit = sum(float(number or 0) * size for number, size in zip(found.groups(), _UNITS.values(), strict=True))
    check_seconds("limit", limit)
    return float(limit)


def _words(seconds: float) -> str:
    """`5400` as `1h30m`."""
    words = ""
    for unit, size in _UNITS.items():
        number, seconds = (seconds, 0.0) if unit == "s" else divmod(seconds, size)
        words += f"{number:g}{unit}" if number else ""
    return words
