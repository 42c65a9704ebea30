"""What is recorded while training goes on; and losses that are not finite, which are found there."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist.training.feed import Turn
from jdist.training.history import History


class Failure(NamedTuple):
    """A step whose loss was not finite.

    Attributes:
        step: Its number, from 1.
        loss: inf, -inf or nan.
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
        return f"The loss of step {self.step} is {self.loss}, of batch {self.batch} of epoch {self.epoch}."


class Record:
    """The history so far, and losses that are still on the devices.

    Mutable. A loss is fetched some calls after its step was, so that nobody waits for it; which losses are fetched when
    depends on the number of calls alone, so that all processes find the same ones.
    """

    def __init__(self, rows: list[Mapping[str, float]]):
        self._rows = rows
        self._losses: dict[int, float] = {}
        self._waiting: list[tuple[int, Mapping[str, Any], Turn, jax.Array]] = []

    @property
    def history(self) -> History:
        """What is recorded so far."""
        return History(tuple(self._rows), MappingProxyType(self._losses))

    @property
    def last_loss(self) -> dict[str, float]:
        """The last loss that was fetched, if there is one."""
        return {"loss": self._losses[max(self._losses)]} if self._losses else {}

    def wait_for(self, step: int, before: Mapping[str, Any], turn: Turn, losses: jax.Array) -> None:
        """The losses of a call, `[]` or `[step]`, from step number `step` on; and where the data stood before it."""
        self._waiting.append((step, before, turn, losses))

    def fetch(self, but: int = 0) -> Failure | None:
        """Fetches what is waiting, but for that of the last `but` calls; gives the first loss that is not finite."""
        number = max(0, len(self._waiting) - but)
        ready, self._waiting = self._waiting[:number], self._waiting[number:]
        failure = None
        for (first, before, turn, _), losses in zip(
            ready, jax.device_get([losses for *_, losses in ready]), strict=True
        ):
            for offset, loss in enumerate(np.atleast_1d(losses).tolist()):
                self._losses[first + offset] = loss
                if failure is None and not math.isfinite(loss):
                    here = turn.draws[offset].position
                    before = turn.draws[offset - 1].position if offset else before
                    failure = Failure(first + offset, loss, here["epoch"], here["batch"] - 1, before)
        return failure

    def forget_after(self, step: int) -> None:
        """Leaves out the losses of steps that were refused."""
        for number in [number for number in self._losses if number > step]:
            del self._losses[number]

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Records an epoch: what is one number."""
        self._rows.append({name: value for name, value in row.items() if np.ndim(value) == 0})
