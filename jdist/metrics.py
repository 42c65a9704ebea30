"""Metrics: what is counted example by example, on any replica and in any order, and read as one number.

A metric is a tree of sums. `update` adds examples to it, `merge` adds two of them up, and `compute` reads it, so that the
result is that of all examples at once: never a mean of means. Merging is associative and commutative, and an empty metric
changes nothing.

Since merging is adding leaf by leaf, so is everything that makes one value of many: `jdist.all_reduce("sum", metric)` in a
step, or `jdist.SyncOnRead(metric, "sum")` in its state, which costs no communication until `read`. Sums are float32: counts
are exact up to 2**24 examples, and right to seven digits beyond.
"""

import abc
import dataclasses
from typing import Any, Self, final

import jax
import jax.numpy as jnp

from jdist._tree import spec
from jdist.losses import beside, weighted_sums


class Metric(abc.ABC):
    """A frozen tree of sums over examples. Its `update` gives a metric with more of them.

    Weights are `[batch]`, one an example, or `[batch, ...]`; an example of weight 0 counts for nothing, as padding does.
    """

    @abc.abstractmethod
    def compute(self) -> jax.Array:
        """The value over all examples so far."""

    def merge(self, other: Self) -> Self:
        """The metric of the examples of both."""
        return jax.tree.map(jnp.add, self, other)


def _zero() -> Any:
    return dataclasses.field(default_factory=lambda: jnp.zeros((), jnp.float32))


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum(Metric):
    """The weighted sum of values.

    Attributes:
        total: `[]`.

    Example:
        >>> float(Sum().update(np.float32([1, 2, 4]), weights=np.float32([1, 1, 0])).compute())
        3.0
    """

    total: jax.Array = _zero()

    def update(self, values: Any, *, weights: Any = None) -> "Sum":
        """This sum with `values` `[batch, ...]`."""
        total, _ = _sums(values, weights)
        return Sum(self.total + total)

    def compute(self) -> jax.Array:
        """The sum, `[]`."""
        return self.total


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean(Metric):
    """The weighted mean of values; 0 of none.

    Attributes:
        total: The weighted sum, `[]`.
        weight: The sum of weights, `[]`.

    Example:
        >>> a = Mean().update(np.float32([1, 2, 6]))
        >>> b = Mean().update(np.float32([5, 99]), weights=np.float32([1, 0]))
        >>> float(a.merge(b).compute())
        3.5
    """

    total: jax.Array = _zero()
    weight: jax.Array = _zero()

    def update(self, values: Any, *, weights: Any = None) -> "Mean":
        """This mean with `values` `[batch, ...]`."""
        total, weight = _sums(values, weights)
        return Mean(self.total + total, self.weight + weight)

    def compute(self) -> jax.Array:
        """The mean, `[]`."""
        return _ratio(self.total, self.weight)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accuracy(Metric):
    """How many of the examples have their label as the greatest of their logits.

    Attributes:
        correct: The mean of 1 for right and 0 for wrong.

    Example:
        >>> logits = np.float32([[0.1, 0.9], [0.8, 0.2]])
        >>> float(Accuracy().update(logits, np.array([1, 1])).compute())
        0.5
    """

    correct: Mean = dataclasses.field(default_factory=Mean)

    def update(self, logits: Any, labels: Any, *, weights: Any = None) -> "Accuracy":
        """This metric with `logits` `[batch, ..., class]` and integer `labels` `[batch, ...]`."""
        _check_labels(logits, labels)
        right = jnp.argmax(jnp.asarray(logits), axis=-1) == jnp.asarray(labels)
        return Accuracy(self.correct.update(right, weights=weights))

    def compute(self) -> jax.Array:
        """A share, 0 to 1."""
        return self.correct.compute()


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopKAccuracy(Metric):
    """How many of the examples have their label among the `k` greatest of their logits.

    Of equal logits the one of the lower class counts as the greater, as in `jax.lax.top_k`.

    Attributes:
        k: How many.
        correct: The mean of 1 for right and 0 for wrong.

    Example:
        >>> logits = np.float32([[0.1, 0.5, 0.4], [0.7, 0.2, 0.1]])
        >>> float(TopKAccuracy(k=2).update(logits, np.array([2, 2])).compute())
        0.5
    """

    k: int = dataclasses.field(metadata={"static": True})
    correct: Mean = dataclasses.field(default_factory=Mean)

    def update(self, logits: Any, labels: Any, *, weights: Any = None) -> "TopKAccuracy":
        """This metric with `logits` `[batch, ..., class]` and integer `labels` `[batch, ...]`."""
        _check_labels(logits, labels)
        if not 1 <= self.k <= jnp.shape(logits)[-1]:
            raise ValueError(
                f"There are no {self.k} greatest of {jnp.shape(logits)[-1]} classes: `k` is from 1 up to that."
            )
        _, best = jax.lax.top_k(jnp.asarray(logits), self.k)
        right = jnp.any(best == jnp.asarray(labels)[..., None], axis=-1)
        return dataclasses.replace(self, correct=self.correct.update(right, weights=weights))

    def compute(self) -> jax.Array:
        """A share, 0 to 1."""
        return self.correct.compute()


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeanSquaredError(Metric):
    """The mean of squared differences.

    Attributes:
        squares: Their mean so far.

    Example:
        >>> float(MeanSquaredError().update(np.float32([1, 5]), np.float32([1, 3])).compute())
        2.0
    """

    squares: Mean = dataclasses.field(default_factory=Mean)

    def update(self, predictions: Any, targets: Any, *, weights: Any = None) -> "MeanSquaredError":
        """This metric with `predictions` and `targets`, `[batch, ...]` both."""
        return MeanSquaredError(self.squares.update(jnp.square(_difference(predictions, targets)), weights=weights))

    def compute(self) -> jax.Array:
        """The mean, `[]`; its root is the root mean squared error."""
        return self.squares.compute()


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeanAbsoluteError(Metric):
    """The mean of absolute differences.

    Attributes:
        distances: Their mean so far.

    Example:
        >>> float(MeanAbsoluteError().update(np.float32([1, 5]), np.float32([1, 3])).compute())
        1.0
    """

    distances: Mean = dataclasses.field(default_factory=Mean)

    def update(self, predictions: Any, targets: Any, *, weights: Any = None) -> "MeanAbsoluteError":
        """This metric with `predictions` and `targets`, `[batch, ...]` both."""
        return MeanAbsoluteError(self.distances.update(jnp.abs(_difference(predictions, targets)), weights=weights))

    def compute(self) -> jax.Array:
        """The mean, `[]`."""
        return self.distances.compute()


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfusionMatrix(Metric):
    """How often each class was taken for each.

    Attributes:
        counts: `[label, prediction]`; begin with `ConfusionMatrix.empty(num_classes)`.

    Example:
        >>> matrix = ConfusionMatrix.empty(2).update(np.array([1, 1, 0]), np.array([1, 0, 0]))
        >>> matrix.compute().tolist()
        [[1.0, 1.0], [0.0, 1.0]]
        >>> matrix.recall().tolist(), matrix.precision().tolist()
        ([0.5, 1.0], [1.0, 0.5])
    """

    counts: jax.Array

    @classmethod
    def empty(cls, num_classes: int) -> "ConfusionMatrix":
        """Of no examples."""
        return cls(jnp.zeros((num_classes, num_classes), jnp.float32))

    def update(self, predictions: Any, labels: Any, *, weights: Any = None) -> "ConfusionMatrix":
        """This metric with the classes that were predicted and that are right, `[batch, ...]` integers both.

        A class that there is not, such as -1 for "unknown", is left out.
        """
        _check_classes(predictions, labels)
        predictions, labels = jnp.asarray(predictions), jnp.asarray(labels)
        size = len(self.counts)
        known = (labels >= 0) & (labels < size) & (predictions >= 0) & (predictions < size)
        weight = 1.0 if weights is None else beside(jnp.asarray(weights).astype(jnp.float32), labels, "labels")
        ones = jnp.where(known, weight, 0)
        places = jnp.where(known, labels, 0), jnp.where(known, predictions, 0)
        return ConfusionMatrix(self.counts.at[places].add(ones))

    def compute(self) -> jax.Array:
        """The counts, `[label, prediction]`."""
        return self.counts

    def precision(self) -> jax.Array:
        """Of those taken for each class, how many were it, `[class]`; 0 of none."""
        return _ratio(jnp.diag(self.counts), self.counts.sum(axis=0))

    def recall(self) -> jax.Array:
        """Of those of each class, how many were taken for it, `[class]`; 0 of none."""
        return _ratio(jnp.diag(self.counts), self.counts.sum(axis=1))

    def f1(self) -> jax.Array:
        """The harmonic mean of precision and recall, `[class]`; 0 of none."""
        return _ratio(2 * jnp.diag(self.counts), self.counts.sum(axis=0) + self.counts.sum(axis=1))


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class F1(Metric):
    """The harmonic mean of precision and recall, averaged over classes that all count the same ("macro").

    Attributes:
        confusion: What it is computed from; begin with `F1.empty(num_classes)`.

    Example:
        >>> round(float(F1.empty(2).update(np.array([1, 1, 0]), np.array([1, 0, 0])).compute()), 4)
        0.6667
    """

    confusion: ConfusionMatrix

    @classmethod
    def empty(cls, num_classes: int) -> "F1":
        """Of no examples."""
        return cls(ConfusionMatrix.empty(num_classes))

    def update(self, predictions: Any, labels: Any, *, weights: Any = None) -> "F1":
        """This metric with the classes that were predicted and that are right, `[batch, ...]` integers both."""
        return F1(self.confusion.update(predictions, labels, weights=weights))

    def compute(self) -> jax.Array:
        """The mean of the classes' F1, `[]`."""
        return self.confusion.f1().mean()


def _sums(values: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    return weighted_sums("values", jnp.asarray(values).astype(jnp.float32), weights)


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    return a / jnp.where(b == 0, 1, b)


def _difference(predictions: Any, targets: Any) -> jax.Array:
    if jnp.shape(predictions) != jnp.shape(targets):
        raise ValueError(f"predictions {spec(predictions)} and targets {spec(targets)} have different shapes.")
    return jnp.asarray(predictions).astype(jnp.float32) - jnp.asarray(targets).astype(jnp.float32)


def _check_labels(logits: Any, labels: Any) -> None:
    if jnp.shape(logits)[:-1] != jnp.shape(labels) or not jnp.ndim(logits):
        raise ValueError(
            f"logits {spec(logits)} need labels [batch, ...] without their last dimension, got {spec(labels)}."
        )


def _check_classes(predictions: Any, labels: Any) -> None:
    integers = all(jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer) for x in (predictions, labels))
    if jnp.shape(predictions) != jnp.shape(labels) or not integers:
        raise ValueError(
            f"predictions {spec(predictions)} and labels {spec(labels)} are classes, integers of one shape. Of logits, take "
            "`logits.argmax(-1)`."
        )
