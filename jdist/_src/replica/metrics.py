"""Metrics that are accumulated example by example, on any replica and in any order.

A metric is a tree of sums. `update` adds examples, `merge` adds two metrics, and `compute` returns the value, so the result is
the value over all examples, never a mean of means. Merging is associative and commutative, and an empty metric is its identity.

Merging adds leaf by leaf, so a metric can be reduced by `jdist.all_reduce("sum", metric)` in a step, or stored in its state as
`jdist.SyncOnRead(metric, "sum")`, which uses no communication until `read`. Sums are float32: counts are exact up to 2**24
examples, and accurate to seven digits beyond.
"""

import abc
import dataclasses
import operator
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.core.migration_hints import explains_attributes
from jdist._src.core.tree import dtype_and_shape
from jdist._src.replica.losses import broadcast_weights, weighted_sums
from jdist._src.values.array_checks import check_array


@explains_attributes("metric")
class Metric(abc.ABC):
    """A frozen tree of sums over examples. `update` returns a metric with more examples.

    Weights are `[batch]`, one per example, or `[batch, ...]`. An example with weight 0, such as padding, has no effect.
    """

    @abc.abstractmethod
    def compute(self) -> jax.Array:
        """Returns the value over all examples so far."""

    def merge(self, other: Self) -> Self:
        """Returns the metric over the examples of both.

        Raises:
            ValueError: The classes or the sizes of the metrics differ.
        """
        sizes, others = (jax.tree.map(np.shape, metric) for metric in (self, other))
        if sizes != others:
            raise ValueError(f"Cannot merge {sizes} and {others}: metrics must have the same class and size.")
        return jax.tree.map(operator.add, self, other)


def _zero() -> Any:
    # A numpy number, like counts without weights: their sum over the replicas is intended, and gives no `RepeatedSumWarning`.
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
        """Returns this sum with `values` `[batch, ...]` added."""
        total, _ = weighted_sums("values", _floats("values", values), weights)
        return Sum(self.total + total)

    def compute(self) -> jax.Array:
        """Returns the sum, `[]`."""
        return jnp.asarray(self.total)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean(Metric):
    """The weighted mean of values; 0 without values.

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
        """Returns this mean with `values` `[batch, ...]` added."""
        total, weight = weighted_sums("values", _floats("values", values), weights)
        return Mean(self.total + total, self.weight + weight)

    def compute(self) -> jax.Array:
        """Returns the mean, `[]`."""
        return _ratio(self.total, self.weight)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accuracy(Metric):
    """The fraction of examples whose label has the largest logit.

    Attributes:
        correct: The mean of 1 for a correct prediction and 0 for a wrong one.

    Example:
        >>> logits = np.float32([[0.1, 0.9], [0.8, 0.2]])
        >>> float(Accuracy().update(logits, np.array([1, 1])).compute())
        0.5
    """

    correct: Mean = dataclasses.field(default_factory=Mean)

    def update(self, logits: Any, labels: Any, *, weights: Any = None) -> "Accuracy":
        """Returns this metric with `logits` `[batch, ..., class]` and integer `labels` `[batch, ...]` added."""
        logits, labels = _logits_and_labels(logits, labels)
        is_correct = jnp.argmax(logits, axis=-1) == labels
        return Accuracy(self.correct.update(is_correct, weights=weights))

    def compute(self) -> jax.Array:
        """Returns the fraction, 0 to 1."""
        return self.correct.compute()


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopKAccuracy(Metric):
    """The fraction of examples whose label is among the `k` largest logits.

    Of equal logits, the one of the lower class is ranked first, as in `jax.lax.top_k`.

    Attributes:
        k: The number of logits.
        correct: The mean of 1 for a correct prediction and 0 for a wrong one.

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
        """Returns this metric with `logits` `[batch, ..., class]` and integer `labels` `[batch, ...]` added."""
        logits, labels = _logits_and_labels(logits, labels)
        if not 1 <= self.k <= logits.shape[-1]:
            raise ValueError(f"`k` must be from 1 to the number of classes, {logits.shape[-1]}, got {self.k}.")
        _, top_classes = jax.lax.top_k(logits, self.k)
        is_correct = jnp.any(top_classes == labels[..., None], axis=-1)
        return dataclasses.replace(self, correct=self.correct.update(is_correct, weights=weights))

    def compute(self) -> jax.Array:
        """Returns the fraction, 0 to 1."""
        return self.correct.compute()


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeanSquaredError(Metric):
    """The mean of squared differences.

    Attributes:
        squares: The mean of the squares so far.

    Example:
        >>> float(MeanSquaredError().update(np.float32([1, 5]), np.float32([1, 3])).compute())
        2.0
    """

    squares: Mean = dataclasses.field(default_factory=Mean)

    def update(self, predictions: Any, targets: Any, *, weights: Any = None) -> "MeanSquaredError":
        """Returns this metric with `predictions` and `targets`, both `[batch, ...]`, added."""
        return MeanSquaredError(self.squares.update(jnp.square(_difference(predictions, targets)), weights=weights))

    def compute(self) -> jax.Array:
        """Returns the mean, `[]`; its square root is the root mean squared error."""
        return self.squares.compute()


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeanAbsoluteError(Metric):
    """The mean of absolute differences.

    Attributes:
        distances: The mean of the absolute differences so far.

    Example:
        >>> float(MeanAbsoluteError().update(np.float32([1, 5]), np.float32([1, 3])).compute())
        1.0
    """

    distances: Mean = dataclasses.field(default_factory=Mean)

    def update(self, predictions: Any, targets: Any, *, weights: Any = None) -> "MeanAbsoluteError":
        """Returns this metric with `predictions` and `targets`, both `[batch, ...]`, added."""
        return MeanAbsoluteError(self.distances.update(jnp.abs(_difference(predictions, targets)), weights=weights))

    def compute(self) -> jax.Array:
        """Returns the mean, `[]`."""
        return self.distances.compute()


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfusionMatrix(Metric):
    """The number of examples for each pair of label and predicted class.

    Attributes:
        counts: `[label, prediction]`; start with `ConfusionMatrix.empty(num_classes)`.

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
        """Returns the metric without examples; raises ValueError if `num_classes` is less than 1."""
        if num_classes < 1:
            raise ValueError(f"`num_classes` must be at least 1, got {num_classes}.")
        return cls(jnp.zeros((num_classes, num_classes), jnp.float32))

    def update(self, predictions: Any, labels: Any, *, weights: Any = None) -> "ConfusionMatrix":
        """Returns this metric with predicted classes and labels added, integers `[batch, ...]`.

        Examples whose label or prediction is not a class, such as -1, have no effect.
        """
        predictions, labels = _classes(predictions, labels)
        size = len(self.counts)
        is_valid = (labels >= 0) & (labels < size) & (predictions >= 0) & (predictions < size)
        weight = 1.0 if weights is None else broadcast_weights(weights, labels, "labels").astype(jnp.float32)
        indices = jnp.where(is_valid, labels, 0), jnp.where(is_valid, predictions, 0)
        return ConfusionMatrix(self.counts.at[indices].add(jnp.where(is_valid, weight, 0)))

    def compute(self) -> jax.Array:
        """Returns the counts, `[label, prediction]`."""
        return self.counts

    def precision(self) -> jax.Array:
        """Returns for each class the fraction of its predictions that are correct, `[class]`; 0 without predictions."""
        return _ratio(jnp.diag(self.counts), self.counts.sum(axis=0))

    def recall(self) -> jax.Array:
        """Returns for each class the fraction of its examples that are predicted correctly, `[class]`; 0 without examples."""
        return _ratio(jnp.diag(self.counts), self.counts.sum(axis=1))

    def f1(self) -> jax.Array:
        """Returns the harmonic mean of precision and recall, `[class]`; 0 without examples and predictions."""
        return _ratio(2 * jnp.diag(self.counts), self.counts.sum(axis=0) + self.counts.sum(axis=1))


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class F1(Metric):
    """The harmonic mean of precision and recall, averaged over the classes with equal weight ("macro").

    Attributes:
        confusion: The confusion matrix; start with `F1.empty(num_classes)`.

    Example:
        >>> round(
        ...     float(F1.empty(2).update(np.array([1, 1, 0]), np.array([1, 0, 0])).compute()), 4
        ... )
        0.6667
    """

    confusion: ConfusionMatrix

    @classmethod
    def empty(cls, num_classes: int) -> "F1":
        """Returns the metric without examples; raises ValueError if `num_classes` is less than 1."""
        return cls(ConfusionMatrix.empty(num_classes))

    def update(self, predictions: Any, labels: Any, *, weights: Any = None) -> "F1":
        """Returns this metric with predicted classes and labels added, integers `[batch, ...]`."""
        return F1(self.confusion.update(predictions, labels, weights=weights))

    def compute(self) -> jax.Array:
        """Returns the mean of the F1 of the classes, `[]`."""
        return self.confusion.f1().mean()


def _floats(name: str, values: Any) -> jax.Array:
    check_array(name, values)
    is_key = isinstance(values, jax.Array) and jnp.issubdtype(values.dtype, jax.dtypes.prng_key)
    if is_key or np.iscomplexobj(values):
        raise TypeError(f"{name} is {dtype_and_shape(values)}: a metric needs real numbers.")
    # numpy converts first: JAX would truncate an int64 to 32 bits.
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
    check_array("logits", logits)
    check_array("labels", labels)
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    is_matching = logits.ndim > 0 and logits.shape[:-1] == labels.shape and logits.shape[-1] > 0
    if not is_matching or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"logits {dtype_and_shape(logits)} are [batch, ..., class] and need integer labels [batch, ...], got "
            f"{dtype_and_shape(labels)}."
        )
    return logits, labels


def _classes(predictions: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    check_array("predictions", predictions)
    check_array("labels", labels)
    predictions, labels = jnp.asarray(predictions), jnp.asarray(labels)
    is_integer = all(jnp.issubdtype(x.dtype, jnp.integer) for x in (predictions, labels))
    if predictions.shape != labels.shape or not is_integer:
        raise ValueError(
            f"predictions {dtype_and_shape(predictions)} and labels {dtype_and_shape(labels)} must be classes, integers of "
            "the same shape. For logits, use `logits.argmax(-1)`."
        )
    return predictions.astype(jnp.int32), labels.astype(jnp.int32)
