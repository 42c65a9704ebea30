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
import operator
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import dtype_and_shape
from jdist._src.replica.losses import broadcast_weights, weighted_sums


class Metric(abc.ABC):
    """A frozen tree of sums over examples. Its `update` gives a metric with more of them.

    Weights are `[batch]`, one an example, or `[batch, ...]`; an example of weight 0 counts for nothing, as padding does.
    """

    @abc.abstractmethod
    def compute(self) -> jax.Array:
        """The value over all examples so far."""

    def merge(self, other: Self) -> Self:
        """The metric of the examples of both.

        Raises:
            ValueError: They are of different kinds or sizes.
        """
        sizes, others = (jax.tree.map(np.shape, metric) for metric in (self, other))
        if sizes != others:
            raise ValueError(f"{sizes} and {others} do not merge: a metric does with others of its kind and size.")
        return jax.tree.map(operator.add, self, other)


def _zero() -> Any:
    # A numpy number, as counts without weights are: a sum over replicas of what is known before tracing is no mistake.
    return dataclasses.field(default=np.float32(0))


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

    total: Any = _zero()

    def update(self, values: Any, *, weights: Any = None) -> "Sum":
        """This sum with `values` `[batch, ...]`."""
        total, _ = weighted_sums("values", _floats("values", values), weights)
        return Sum(self.total + total)

    def compute(self) -> jax.Array:
        """The sum, `[]`."""
        return jnp.asarray(self.total)


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

    total: Any = _zero()
    weight: Any = _zero()

    def update(self, values: Any, *, weights: Any = None) -> "Mean":
        """This mean with `values` `[batch, ...]`."""
        total, weight = weighted_sums("values", _floats("values", values), weights)
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
        logits, labels = _logits_and_labels(logits, labels)
        right = jnp.argmax(logits, axis=-1) == labels
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

    def __post_init__(self) -> None:
        as_int("`k`", self.k, 1)

    def update(self, logits: Any, labels: Any, *, weights: Any = None) -> "TopKAccuracy":
        """This metric with `logits` `[batch, ..., class]` and integer `labels` `[batch, ...]`."""
        logits, labels = _logits_and_labels(logits, labels)
        if not 1 <= self.k <= logits.shape[-1]:
            raise ValueError(f"There are no {self.k} greatest of {logits.shape[-1]} classes: `k` is from 1 up to that.")
        _, best = jax.lax.top_k(logits, self.k)
        right = jnp.any(best == labels[..., None], axis=-1)
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
        """Of no examples; ValueError if there are no classes."""
        if num_classes < 1:
            raise ValueError(f"There are {num_classes} classes: one at least is counted.")
        return cls(jnp.zeros((num_classes, num_classes), jnp.float32))

    def update(self, predictions: Any, labels: Any, *, weights: Any = None) -> "ConfusionMatrix":
        """This metric with predicted and right classes, integers `[batch, ...]`; -1 or another that is none is left out."""
        predictions, labels = _classes(predictions, labels)
        size = len(self.counts)
        known = (labels >= 0) & (labels < size) & (predictions >= 0) & (predictions < size)
        weight = 1.0 if weights is None else broadcast_weights(weights, labels, "labels").astype(jnp.float32)
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


def _floats(name: str, values: Any) -> jax.Array:
    is_key = isinstance(values, jax.Array) and jnp.issubdtype(values.dtype, jax.dtypes.prng_key)
    if is_key or np.iscomplexobj(values):
        raise TypeError(f"{name} is {dtype_and_shape(values)}: metrics add up real numbers.")
    # On the host first: an int64 that JAX would cut to 32 bits is a float32 here.
    return jnp.asarray(values if isinstance(values, jax.Array) else np.asarray(values, np.float32)).astype(jnp.float32)


def _ratio(a: Any, b: Any) -> jax.Array:
    return jnp.asarray(a / jnp.where(b == 0, 1, b))


def _difference(predictions: Any, targets: Any) -> jax.Array:
    predictions, targets = _floats("predictions", predictions), _floats("targets", targets)
    if predictions.shape != targets.shape:
        raise ValueError(
            f"predictions {dtype_and_shape(predictions)} and targets {dtype_and_shape(targets)} have different shapes."
        )
    return predictions - targets


def _logits_and_labels(logits: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    fits = logits.ndim > 0 and logits.shape[:-1] == labels.shape and logits.shape[-1] > 0
    if not fits or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"logits {dtype_and_shape(logits)} are [batch, ..., class] and need integer labels [batch, ...], got "
            f"{dtype_and_shape(labels)}."
        )
    return logits, labels


def _classes(predictions: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    predictions, labels = jnp.asarray(predictions), jnp.asarray(labels)
    integers = all(jnp.issubdtype(x.dtype, jnp.integer) for x in (predictions, labels))
    if predictions.shape != labels.shape or not integers:
        raise ValueError(
            f"predictions {dtype_and_shape(predictions)} and labels {dtype_and_shape(labels)} are classes, integers "
            "of one shape. Of logits, take "
            "`logits.argmax(-1)`."
        )
    return predictions.astype(jnp.int32), labels.astype(jnp.int32)
