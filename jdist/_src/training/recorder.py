"""Records the history of training, and finds losses that are not finite."""

import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._src.training.history import History
from jdist._src.training.step_inputs import DrawnBatch
from jdist._src.values.array_copies import read_replicated


class NonFiniteStep(NamedTuple):
    """A step that was rejected because numbers of it were not finite.

    Attributes:
        step: The step number, from 1.
        loss: The loss.
        epoch: The epoch of the batch, from 0.
        batch: The number of the batch in its epoch, from 0.
        position_before: The position of the data before the batch.
    """

    step: int
    loss: float
    epoch: int
    batch: int
    position_before: Mapping[str, Any]

    def __str__(self) -> str:
        is_finite = math.isfinite(self.loss)
        subject = f"A gradient or the update of step {self.step}" if is_finite else f"The loss of step {self.step}"
        value = "infinite or NaN" if is_finite else str(self.loss)
        return f"{subject} is {value} (batch {self.batch} of epoch {self.epoch})."


class _PendingCall(NamedTuple):
    """A call of the step whose outcome is still on the devices.

    Attributes:
        first_step: The number of its first step.
        positions: The position of the data before the call, and after each batch. The batches themselves are released when the
            step ends.
        examples: The number of examples since the first batch, before the call and after each batch.
        outcome: The loss of each step, 1 if it was finite, the number of its examples with a weight, or -1, and the numbers of
            `StepFunctions.outcome_names`: `[number]` or `[step, number]`.
    """

    first_step: int
    positions: Sequence[Mapping[str, Any]]
    examples: Sequence[int]
    outcome: jax.Array


class IneffectiveCounts(NamedTuple):
    """The numbers of steps and examples that had no effect on the parameters.

    Attributes:
        skipped_steps: The number of steps that were rejected because numbers of them were not finite.
        dropped_examples: The number of examples in the other steps whose weights are 0.
    """

    skipped_steps: int = 0
    dropped_examples: int = 0


class Recorder:
    """The history so far, and the outcomes that are still on the devices.

    Mutable. A loss is fetched some calls after its step, so that the host does not wait for the devices. The number of calls
    alone determines which losses are fetched when, so all processes find the same ones.

    Args:
        resume_data: The result of `Event.resume_data` in the run that is resumed.
        skips: Whether a step that is rejected is skipped; otherwise training ends with it.
        outcome_names: The names of the numbers that follow the first three in an outcome: `tokens`, and the names of norms.

    Attributes:
        counts: The counts of this run, as far as outcomes were fetched.
        row_counts: The counts since the last row of the history.
        tokens: The number of tokens in the steps of this run that were not rejected, as far as outcomes were fetched; None if
            they are not counted.
    """

    def __init__(self, resume_data: Mapping[str, Any], skips: bool, outcome_names: Sequence[str] = ()):
        self._skips, self._outcome_names = skips, outcome_names
        self._rows: list[Mapping[str, float]] = list(resume_data.get("history", ()))
        steps, losses = resume_data.get("losses", ((), ()))
        self._losses: dict[int, float] = dict(zip(map(int, steps), map(float, losses), strict=True))
        self._norms: dict[str, dict[int, float]] = {
            name: dict(zip(map(int, steps), map(float, values), strict=True))
            for name, (steps, values) in resume_data.get("norms", {}).items()
        }
        self.tokens = 0 if "tokens" in outcome_names else None
        self._pending: list[_PendingCall] = []
        self.row_counts = IneffectiveCounts(*map(int, resume_data.get("ineffective", ())))
        self.counts = IneffectiveCounts()

    @property
    def history(self) -> History:
        """The history so far."""
        return History(tuple(self._rows), MappingProxyType(self._losses), MappingProxyType(self._norms))

    @property
    def last_values(self) -> dict[str, float]:
        """The last loss that was fetched, and the last norms, if there are any."""
        columns = {"loss": self._losses, **{name: self._norms.get(name) for name in self._outcome_names}}
        return {name: values[max(values)] for name, values in columns.items() if values}

    @property
    def row_norms(self) -> dict[str, float]:
        """The mean of each norm over the steps since the last row; NaN if all of them were rejected."""
        last_step = self._rows[-1].get("step", 0) if self._rows else 0
        means = {}
        for name in self._outcome_names:
            if name != "tokens":
                norms = self._norms.get(name, {})
                steps = itertools.takewhile(lambda step: step > last_step, reversed(norms))
                values = [norms[step] for step in steps]
                means[name] = float(np.mean(values)) if values else math.nan
        return means

    def losses_as_arrays(self) -> list[np.ndarray]:
        """Returns the steps whose losses were fetched, and these losses."""
        return _as_arrays(self._losses)

    def norms_as_arrays(self) -> dict[str, list[np.ndarray]]:
        """Returns the steps whose norms were fetched, and these norms, by name."""
        return {name: _as_arrays(values) for name, values in self._norms.items()}

    def add_call(
        self,
        first_step: int,
        position_before: Mapping[str, Any],
        examples_before: int,
        batches: Sequence[DrawnBatch],
        outcome: jax.Array,
    ) -> None:
        """Adds the outcome of a call of the step."""
        positions = [position_before, *(batch.position for batch in batches)]
        examples = [examples_before, *(batch.examples for batch in batches)]
        self._pending.append(_PendingCall(first_step, positions, examples, outcome))

    def fetch(self, keep_pending: int = 0) -> NonFiniteStep | None:
        """Fetches the losses of all pending calls except for the last `keep_pending`.

        Returns:
            The first step that was rejected, if the last of these steps was rejected, as all steps after a failure are.
        """
        count = max(0, len(self._pending) - keep_pending)
        calls, self._pending = self._pending[:count], self._pending[count:]
        if not calls:
            return None
        with jax.transfer_guard_device_to_host("allow"):
            arrays = read_replicated([call.outcome for call in calls])
            outcomes = np.concatenate([np.reshape(x, (-1, x.shape[-1])) for x in arrays])  # [step, number]
        # Each call begins where the one before it ends.
        first_step = calls[0].first_step
        positions = [calls[0].positions[0], *itertools.chain.from_iterable(call.positions[1:] for call in calls)]
        examples = [calls[0].examples[0], *itertools.chain.from_iterable(call.examples[1:] for call in calls)]
        self._losses.update(enumerate(outcomes[:, 0].tolist(), start=first_step))
        is_taken, has_weights = outcomes[:, 1] > 0, outcomes[:, 2] >= 0
        dropped = (np.diff(examples) - outcomes[:, 2])[is_taken & has_weights]
        self.add_counts(int((~is_taken).sum()) if self._skips else 0, int(dropped.sum()))
        taken_steps = (first_step + np.flatnonzero(is_taken)).tolist()
        for name, column in zip(self._outcome_names, outcomes[is_taken, 3:].T, strict=True):
            if name == "tokens":
                self.tokens = (self.tokens or 0) + sum(map(int, column.tolist()))
            else:
                self._norms.setdefault(name, {}).update(zip(taken_steps, column.tolist(), strict=True))
        if is_taken[-1]:
            return None
        rejected = int(np.argmin(is_taken))
        step, position = first_step + rejected, positions[rejected + 1]
        return NonFiniteStep(
            step, self._losses[step], position["epoch"], position["batch"] - 1, position_before=positions[rejected]
        )

    def remove_losses_after(self, step: int) -> None:
        """Removes the losses of the steps after `step`, which were rejected."""
        for number in [number for number in self._losses if number > step]:
            del self._losses[number]

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Adds a row, without values that are not scalars."""
        self._rows.append({name: value for name, value in row.items() if np.ndim(value) == 0})
        self.row_counts = IneffectiveCounts()

    def add_counts(self, skipped_steps: int, dropped_examples: int = 0) -> None:
        """Counts steps that were skipped, and examples that were dropped."""
        added = skipped_steps, dropped_examples
        self.counts, self.row_counts = (
            IneffectiveCounts(*map(sum, zip(counts, added, strict=True))) for counts in (self.counts, self.row_counts)
        )


def _as_arrays(values: Mapping[int, float]) -> list[np.ndarray]:
    return [np.array(list(values)), np.array(list(values.values()), np.float32)]
