"""Adapts the metrics of a `Trainer`, and checks the values of losses and metrics."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.tree import PyTree, describe_tree, dtype_and_shape, one_line
from jdist._src.replica.losses import is_loss
from jdist._src.replica.metrics import Mean, Metric
from jdist._src.training.foreign_metrics import (
    AdaptedMetric,
    adapt,
    is_foreign_metric,
    metrics_of_collection,
    takes_targets_first,
)
from jdist._src.training.history_columns import NON_METRIC_COLUMNS, VALIDATION_PREFIX
from jdist._src.training.loss_adapters import adapt_loss

# The other entries of a row of the history, or of a result of `evaluate`.
_RESERVED_NAMES = ("loss", "examples", *NON_METRIC_COLUMNS)
# For messages: the classes of `jdist.metrics` for names that Keras accepts.
_METRIC_CLASSES = {
    "accuracy": "Accuracy",
    "mae": "MeanAbsoluteError",
    "mean_absolute_error": "MeanAbsoluteError",
    "mean_squared_error": "MeanSquaredError",
    "mse": "MeanSquaredError",
}
PackedMetrics: TypeAlias = dict[str, jax.Array]  # by the name of their dtype: vectors of sums


class TrainerMetric(NamedTuple):
    """A metric of a `Trainer`, and the function that computes its arguments.

    Attributes:
        empty: The metric of no examples.
        arguments: From outputs and targets to the arguments of `Metric.update`: a tuple, or a dict of them by name.
    """

    empty: Metric
    arguments: Callable[[PyTree, PyTree], Any]


def adapt_metrics(metrics: Any, is_of_outputs: bool = True) -> dict[str, TrainerMetric]:
    """Returns the metrics of a user by name.

    Args:
        metrics: A mapping from names to metrics, or a collection of metrics of clu or flax.nnx.
        is_of_outputs: Whether the metrics are of outputs and targets. Otherwise they are of the auxiliary values and the batch
            of an objective or a step: a metric without a function has the arguments `aux[name]`, and a list of names is
            accepted, for means of these values.

    Raises:
        TypeError: `metrics` is not a mapping, or a value is not a metric.
        ValueError: A name is reserved.
    """
    if not is_of_outputs and isinstance(metrics, (list, tuple)) and all(isinstance(name, str) for name in metrics):
        metrics = {name: Mean() for name in metrics}
    metrics = metrics_of_collection(metrics)
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"`metrics` must be a dict from names to metrics, got {one_line(metrics)}. Write `metrics={_example(metrics)}`."
        )
    reserved = [
        name
        for name in metrics
        if not isinstance(name, str) or name in _RESERVED_NAMES or name.startswith(VALIDATION_PREFIX)
    ]
    if reserved:
        raise ValueError(
            f"A metric has the name {reserved[0]!r}. Reserved are {', '.join(_RESERVED_NAMES)} and names that start with "
            f"{VALIDATION_PREFIX}."
        )
    return {name: _adapt_metric(name, metric, is_of_outputs) for name, metric in metrics.items()}


def batch_metrics(
    metrics: Mapping[str, TrainerMetric],
    losses: jax.Array,
    outputs: PyTree,
    targets: PyTree,
    weights: Any,
    loss_weights: Any = None,
) -> dict[str, Metric]:
    """Returns the loss and the metrics of one batch.

    Args:
        metrics: The metrics, by name.
        losses: The losses, `[batch, ...]`.
        outputs: The outputs, or the auxiliary values of an objective or a step.
        targets: The targets, or the batch.
        weights: The weights of the examples.
        loss_weights: The weights of the losses, by default `weights`. Metrics whose values have their dimensions use them
            too.
    """
    updated: dict[str, Metric] = {
        "loss": Mean().update(losses, weights=weights if loss_weights is None else loss_weights)
    }
    for name, metric in metrics.items():
        # With weights, also those that XLA removes, a metric of another number of values is an error.
        ones = np.ones(len(losses), np.float32) if isinstance(metric.empty, AdaptedMetric) else jnp.ones(len(losses))
        try:
            arguments = metric.arguments(outputs, targets)
            has_loss_weights = loss_weights is not None and all(
                jnp.shape(x)[: loss_weights.ndim] == loss_weights.shape for x in jax.tree.leaves(arguments)
            )
            metric_weights = loss_weights if has_loss_weights else ones if weights is None else weights
            args, kwargs = ((), arguments) if isinstance(arguments, Mapping) else (arguments, {})
            updated[name] = metric.empty.update(*args, weights=metric_weights, **kwargs)  # type: ignore[attr-defined]
        except (TypeError, ValueError) as error:
            error.add_note(
                f"In the metric {name!r}, of outputs {describe_tree(outputs)} and targets {describe_tree(targets)}."
            )
            raise
    empty = empty_metrics(metrics)
    sums = jax.tree.map(lambda a, b: jnp.asarray(b).astype(jnp.result_type(a, b)), empty, updated)
    for name, value in sums.items():
        before, after = describe_tree(empty[name], 1000), describe_tree(value, 1000)
        if before != after:
            raise ValueError(
                f"The metric {name!r} is {before} without examples, and {after} with a batch. The shapes and the dtypes of its "
                "sums must not depend on the batch."
            )
    return sums


def empty_metrics(metrics: Mapping[str, TrainerMetric]) -> dict[str, Metric]:
    """Returns the loss and the metrics of no examples."""
    empty = {"loss": Mean(), **{name: metric.empty for name, metric in metrics.items()}}
    return jax.tree.map(jnp.asarray, empty)


def pack_metrics(metrics: Mapping[str, Metric]) -> PackedMetrics:
    """Returns the sums of metrics as one vector per dtype, because each argument and result of a program costs time.

    Example:
        >>> pack_metrics({"loss": Mean(np.float32(6), np.float32(4))})
        {'float32': Array([6., 4.], dtype=float32)}
    """
    parts: dict[str, list[jax.Array]] = {}
    for leaf in map(jnp.asarray, jax.tree.leaves(metrics)):
        parts.setdefault(leaf.dtype.name, []).append(leaf.ravel())
    return {dtype: jnp.concatenate(vectors) for dtype, vectors in parts.items()}


def unpack_metrics(packed: PackedMetrics, like: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns packed metrics with the structure of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    unpacked, starts = [], dict.fromkeys(packed, 0)
    for leaf in leaves:
        dtype = leaf.dtype.name
        start, starts[dtype] = starts[dtype], starts[dtype] + leaf.size
        unpacked.append(packed[dtype][start : start + leaf.size].reshape(leaf.shape))
    return treedef.unflatten(unpacked)


def check_losses(losses: Any, num_examples: int, name: str = "loss") -> jax.Array:
    """Returns the result of a loss function as an array; `name` is its name in error messages.

    Raises:
        TypeError: It is not one array.
        ValueError: It has not one or several values per example.
    """
    if not is_loss(losses):
        pair = ", or a pair of these and other values" if name == "objective" else ""
        raise TypeError(
            f"`{name}` must return one array, the losses of the examples{pair}, got {describe_tree(losses)}."
        )
    if jnp.ndim(losses) == 0 or jnp.shape(losses)[0] != num_examples:
        raise ValueError(
            f"`{name}` returned {dtype_and_shape(losses)} for {num_examples} examples. It must return one value per example, "
            f"[{num_examples}, ...]: remove `.mean()` or `.sum()`. The trainer averages over the examples of all replicas, "
            "without padding."
        )
    return jnp.asarray(losses)


def _example(metrics: Any) -> str:
    """Returns the dict to write instead of a list of names or metrics."""
    entries = metrics if isinstance(metrics, (list, tuple)) else [metrics]
    names = [entry.lower() if isinstance(entry, str) else type(entry).__name__.lower() for entry in entries]
    known_names = [name for name in names if name in _METRIC_CLASSES] or ["accuracy"]
    return "{" + ", ".join(f'"{name}": jdist.metrics.{_METRIC_CLASSES[name]}()' for name in known_names) + "}"


def _adapt_metric(name: str, metric: Any, is_of_outputs: bool) -> TrainerMetric:
    if is_foreign_metric(metric):
        metric = _adapt_foreign(name, metric)
        if is_of_outputs and takes_targets_first(metric):
            return TrainerMetric(metric, lambda outputs, targets: (targets, outputs))
    if isinstance(metric, (tuple, list)) and len(metric) == 2 and is_foreign_metric(metric[0]):
        metric = _adapt_foreign(name, metric[0]), metric[1]
    if isinstance(metric, Metric) and not is_of_outputs:
        return TrainerMetric(metric, functools.partial(_auxiliary_arguments, name))
    if isinstance(metric, Metric):
        return TrainerMetric(metric, lambda outputs, targets: (outputs, targets))
    if isinstance(metric, (tuple, list)) and len(metric) == 2 and isinstance(metric[0], Metric) and callable(metric[1]):
        return TrainerMetric(metric[0], functools.partial(_checked_arguments, name, metric[1]))
    if callable(metric) and not isinstance(metric, type):
        return TrainerMetric(Mean(), functools.partial(_checked_values, name, adapt_loss(metric)))
    got = f"the class {metric.__name__}: call it" if isinstance(metric, type) else one_line(metric)
    raise TypeError(
        f"The metric {name!r} must be a metric of jdist, flax.nnx, clu, metrax or Keras, a pair of a metric and a function "
        f"from outputs and targets to its arguments, or a function from outputs and targets to values [batch, ...]; got {got}."
    )


def _adapt_foreign(name: str, metric: Any) -> AdaptedMetric:
    if isinstance(metrics_of_collection(metric), Mapping):
        raise TypeError(
            f"The metric {name!r} is a collection of metrics. Pass it as `metrics=`, or its metrics by name."
        )
    return adapt(metric)


def _auxiliary_arguments(name: str, aux: PyTree, batch: PyTree) -> Any:
    """Returns the arguments of a metric: `aux[name]`, or its values if it is a tuple or a dict.

    A number is one value per example.
    """
    if not isinstance(aux, Mapping) or name not in aux:
        got = f"a dict with {', '.join(map(repr, aux))}" if isinstance(aux, Mapping) else describe_tree(aux)
        raise TypeError(
            f"The metric {name!r} needs the auxiliary value {name!r} of the objective or the step, got {got}."
        )
    if isinstance(aux[name], Mapping):
        return aux[name]
    values = aux[name] if isinstance(aux[name], tuple) else (aux[name],)
    num_examples = len(jax.tree.leaves(batch)[0])
    return tuple(jnp.broadcast_to(x, num_examples) if jnp.ndim(x) == 0 else x for x in values)


def _checked_arguments(name: str, fn: Callable[..., Any], outputs: PyTree, targets: PyTree) -> Any:
    result = fn(outputs, targets)
    if not isinstance(result, (tuple, Mapping)):
        raise TypeError(
            f"The function of the metric {name!r} must return a tuple of the metric's arguments, or a dict of them by name, "
            f"got {describe_tree(result)}."
        )
    return result


def _checked_values(name: str, fn: Callable[..., Any], outputs: PyTree, targets: PyTree) -> tuple[Any, ...]:
    values, num_examples = fn(outputs, targets), len(jax.tree.leaves((targets, outputs))[0])
    if jnp.ndim(values) == 0 or jnp.shape(values)[0] != num_examples:
        raise ValueError(
            f"The metric {name!r} returned {describe_tree(values)} for {num_examples} examples. It must return one "
            f"value per example, [{num_examples}, ...], which the trainer averages over the examples of all replicas."
        )
    return (values,)
