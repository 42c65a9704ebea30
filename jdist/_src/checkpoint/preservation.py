"""The rule that deletes old checkpoints. It preserves the newest, the best by a metric, and multiples of an interval."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from jdist._src.checkpoint.manifest import read_manifest
from jdist._src.core.tree import one_line

Metrics: TypeAlias = Mapping[str, float]
Mode: TypeAlias = Literal["min", "max"]


class BestMetric(NamedTuple):
    """The metric that determines the best checkpoint.

    Attributes:
        name: The name of the metric.
        mode: Whether the smallest or the largest value is the best.
    """

    name: str
    mode: Mode

    def is_better(self, metrics: Metrics, other: Metrics) -> bool:
        """Returns whether the metric of a checkpoint is better than the metric of another one. A missing one is worst."""
        return self.badness(metrics) < self.badness(other)

    def badness(self, metrics: Metrics) -> float:
        """Returns a number that is smallest for the best metric, and infinite for a missing one."""
        value = metrics.get(self.name, math.inf if self.mode == "min" else -math.inf)
        return value if self.mode == "min" else -value


@dataclasses.dataclass(frozen=True)
class Preservation:
    """Preserves a checkpoint if it is one of the newest, the best, or at a multiple of an interval. A policy of orbax.

    orbax has policies of the same kind. Its policy for the best checkpoints reads the metrics from further files, and does not
    define the order of NaN.

    Attributes:
        folder: The folder of the checkpoints.
        newest: The number of newest checkpoints; None for all.
        best: The metric of the best one.
        interval: The number of steps whose multiples are preserved.
        known: The metrics by the steps that were saved, or whose manifest was read.
    """

    folder: pathlib.Path
    newest: int | None
    best: BestMetric | None = None
    interval: int | None = None
    known: dict[int, Metrics] = dataclasses.field(default_factory=dict)

    def metrics_of(self, step: int) -> Metrics:
        """Returns the metrics of a step: none if its manifest cannot be read, or is of an earlier version of jdist."""
        if step not in self.known:
            try:
                self.known[step] = read_manifest(self.folder, step)[0].get("metrics", {})
            except Exception:  # of any type: the manifest is damaged
                return {}
        return self.known[step]

    def best_step(self, steps: Sequence[int]) -> int | None:
        """Returns the step with the best metric, the first of equal ones; None if no checkpoint has the metric."""
        best = self.best
        if best is None:
            return None
        candidates = [step for step in sorted(steps) if best.name in self.metrics_of(step)]
        return min(candidates, key=lambda step: best.badness(self.metrics_of(step)), default=None)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any = None) -> list[bool]:
        """Returns for each of all checkpoints, in any order, whether it is preserved."""
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        preserved = {*(steps if self.newest is None else steps[-self.newest :]), self.best_step(steps)}
        if self.interval is not None:
            preserved |= {step for step in steps if step % self.interval == 0}
        return [checkpoint.step in preserved for checkpoint in checkpoints]


def as_best_metric(keep_best: Any) -> BestMetric | None:
    """Returns the argument `keep_best` of a `Checkpointer`.

    Raises:
        TypeError: It is not a pair.
        ValueError: The mode is neither `"min"` nor `"max"`.
    """
    if keep_best is None:
        return None
    if not isinstance(keep_best, tuple) or len(keep_best) != 2 or not all(isinstance(x, str) for x in keep_best):
        raise TypeError(
            '`keep_best` must be a pair of the name of a metric and its mode, such as ("val_loss", "min"), got '
            f"{one_line(keep_best)}."
        )
    name, mode = keep_best
    if mode not in get_args(Mode):
        raise ValueError(f"The mode in `keep_best` must be 'min' or 'max', got {one_line(mode)}.")
    return BestMetric(name, mode)


def as_metrics(metrics: Any) -> dict[str, float]:
    """Returns the argument `metrics` of a save as Python numbers, without those that are not finite.

    Raises:
        TypeError: It is not a mapping from names to numbers.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"`metrics` must be a mapping from names to numbers, got {type(metrics).__name__}.")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or np.ndim(value) or not np.isreal(value):
            raise TypeError(f"`metrics` must be a mapping from names to numbers, got {one_line(value)} for {name!r}.")
        numbers[name] = float(value)
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
