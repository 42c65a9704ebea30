"""What is recorded while training goes on; and losses that are not finite, which are found there."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._src.training.history import History
from jdist._src.training.step_inputs import Turn
from jdist._src.training.steps import StepOutcome


class NonFiniteStep(NamedTuple):
    """A step whose loss, or whose update, was not finite.

    Attributes:
        step: Its number, from 1.
        loss: Its loss.
        epoch: The epoch of its batch, from 0.
        batch: The number of its batch in the epoch, from 0.
        before: Where the data stood before that batch.
    """

    step: int
    loss: float
    epoch: int
    batch: int
    before: Mapping[str, Any]

    def __str__(self) -> str:
        what = "update" if math.isfinite(self.loss) else "loss"
        found = "not finite" if what == "update" else self.loss
        return f"The {what} of step {self.step} is {found}, of batch {self.batch} of epoch {self.epoch}."


class Recorder:
    """The history so far, and losses that are still on the devices.

    Mutable. A loss is fetched some calls after its step was, so that nobody waits for it; which losses are fetched when
    depends on the number of calls alone, so that all processes find the same ones.
    """

    def __init__(self, kept: Mapping[str, Any]):
        self._rows: list[Mapping[str, float]] = list(kept.get("history", ()))
        steps, losses = kept.get("losses", ((), ()))
        self._losses: dict[int, float] = dict(zip(map(int, steps), map(float, losses), strict=True))
        self._waiting: list[tuple[int, Mapping[str, Any], Sequence[Mapping[str, Any]], StepOutcome]] = []

    @property
    def history(self) -> History:
        """What is recorded so far."""
        return History(tuple(self._rows), MappingProxyType(self._losses))

    @property
    def last_loss(self) -> dict[str, float]:
        """The last loss that was fetched, if there is one."""
        return {"loss": self._losses[max(self._losses)]} if self._losses else {}

    def as_arrays(self) -> list[np.ndarray]:
        """The steps whose losses were fetched, and their losses."""
        return [np.array(list(self._losses)), np.array(list(self._losses.values()), np.float32)]

    def wait_for(self, step: int, before: Mapping[str, Any], turn: Turn, outcome: StepOutcome) -> None:
        """How the steps of a call went, leaves `[]` or `[step]`, from number `step` on; and where the data stood before."""
        # Not the batches: their memory is to be free when the step is over.
        self._waiting.append((step, before, [draw.position for draw in turn.draws], outcome))

    def fetch(self, but: int = 0) -> NonFiniteStep | None:
        """Fetches what is waiting, but for that of the last `but` calls; gives the first step that was not sound."""
        number = max(0, len(self._waiting) - but)
        ready, self._waiting = self._waiting[:number], self._waiting[number:]
        failure = None
        outcomes = jax.device_get([outcome for *_, outcome in ready])
        for (first, before, positions, _), outcome in zip(ready, outcomes, strict=True):
            pairs = zip(np.atleast_1d(outcome.loss).tolist(), np.atleast_1d(outcome.sound), strict=True)
            for offset, (loss, sound) in enumerate(pairs):
                self._losses[first + offset] = loss
                if failure is None and not sound:
                    here = positions[offset]
                    before = positions[offset - 1] if offset else before
                    failure = NonFiniteStep(first + offset, loss, here["epoch"], here["batch"] - 1, before)
        return failure

    def forget_after(self, step: int) -> None:
        """Leaves out the losses of steps that were refused."""
        for number in [number for number in self._losses if number > step]:
            del self._losses[number]

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Records an epoch: what is one number."""
        self._rows.append({name: value for name, value in row.items() if np.ndim(value) == 0})
