"""What is measured besides the loss: metrics, and how they are fed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.replica.metrics import Mean, Metric
from jdist._src.training.loss_adapters import adapt_loss, is_keras_metric

# What else is in a row of the history, or in what `evaluate` gives.
_TAKEN = ("loss", "examples", "epoch", "step", "seconds", "rows_per_second", "stalled", "learning_rate")


class MetricAdapter(NamedTuple):
    """A metric, and how it is fed.

    Attributes:
        empty: The metric of no examples.
        of: From outputs and targets to what its `update` takes.
    """

    empty: Metric
    of: Callable[[PyTree, PyTree], tuple[Any, ...]]


def adapt_metrics(metrics: Any) -> dict[str, MetricAdapter]:
    """The metrics that a user hands in, by name.

    Raises:
        TypeError: They are no mapping, or there is something else among them.
        ValueError: One is called as the library calls something itself.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"`metrics` maps names to metrics, as in {{'accuracy': jdist.metrics.Accuracy()}}; got {metrics!r}."
        )
    taken = [name for name in metrics if not isinstance(name, str) or name in _TAKEN or name.startswith("val_")]
    if taken:
        raise ValueError(
            f"A metric is called {taken[0]!r}, and {', '.join(_TAKEN)} and what begins with val_ mean something else."
        )
    return {name: _measure(name, metric) for name, metric in metrics.items()}


def epoch_names(measures: Mapping[str, MetricAdapter], has_validation: bool) -> list[str]:
    """Returns the names of the loss and the metrics at the end of an epoch."""
    names = ["loss", *measures]
    return names + [f"val_{name}" for name in names if has_validation]


def batch_metrics(
    measures: Mapping[str, MetricAdapter], losses: jax.Array, outputs: PyTree, targets: PyTree, weights: Any
) -> dict[str, Metric]:
    """The loss and the metrics of one batch."""
    seen: dict[str, Metric] = {"loss": Mean().update(losses, weights=weights)}
    for name, measure in measures.items():
        try:
            seen[name] = measure.empty.update(*measure.of(outputs, targets), weights=weights)  # type: ignore[attr-defined]
        except (TypeError, ValueError) as error:
            error.add_note(f"It is the metric {name!r}, of outputs {_specs(outputs)} and targets {_specs(targets)}.")
            raise
        _check_sums(name, measure.empty, seen[name])
    return jax.tree.map(jnp.asarray, seen)


def checked_losses(losses: Any, rows: int) -> jax.Array:
    """What a loss function returned for so many examples.

    Raises:
        TypeError: It is not one array.
        ValueError: It is not one value an example, or several.
    """
    if not hasattr(losses, "dtype") and not isinstance(losses, (int, float)):
        raise TypeError(f"`loss` returns one array, the losses of the examples, and returned {_specs(losses)}.")
    if jnp.ndim(losses) == 0 or jnp.shape(losses)[0] != rows:
        raise ValueError(
            f"`loss` returned {dtype_and_shape(losses)} for {rows} examples, and a value for each of them is needed, [{rows}, ...]: leave "
            "`.mean()` or `.sum()` out. They are averaged over the examples of all replicas; padding counts for nothing."
        )
    return jnp.asarray(losses)


def _measure(name: str, metric: Any) -> MetricAdapter:
    if isinstance(metric, Metric):
        return MetricAdapter(metric, lambda outputs, targets: (outputs, targets))
    if isinstance(metric, (tuple, list)) and len(metric) == 2 and isinstance(metric[0], Metric) and callable(metric[1]):
        return MetricAdapter(metric[0], _tuple_from(name, metric[1]))
    if is_keras_metric(metric):
        raise TypeError(
            f"The metric {name!r} is a Keras metric, {type(metric).__name__}, which counts in variables of its own. Take one "
            "of `jdist.metrics`, or a function from outputs and targets to values [batch, ...]."
        )
    if callable(metric) and not isinstance(metric, type):
        return MetricAdapter(Mean(), _values_from(name, adapt_loss(metric)))
    called = f"the class {metric.__name__}: call it" if isinstance(metric, type) else repr(metric)
    raise TypeError(
        f"The metric {name!r} is a metric of `jdist.metrics`, a pair of one and a function from outputs and targets to what it "
        f"takes, or a function from them to values [batch, ...]; got {called}."
    )


def _tuple_from(name: str, fn: Callable[[PyTree, PyTree], Any]) -> Callable[[PyTree, PyTree], tuple[Any, ...]]:
    def of(outputs: PyTree, targets: PyTree) -> tuple[Any, ...]:
        given = fn(outputs, targets)
        if not isinstance(given, tuple):
            raise TypeError(
                f"The function of the metric {name!r} returns a tuple of what the metric takes, got {_specs(given)}."
            )
        return given

    return of


def _values_from(name: str, fn: Callable[[PyTree, PyTree], Any]) -> Callable[[PyTree, PyTree], tuple[Any, ...]]:
    def of(outputs: PyTree, targets: PyTree) -> tuple[Any, ...]:
        values, rows = fn(outputs, targets), len(jax.tree.leaves((targets, outputs))[0])
        if jnp.ndim(values) == 0 or jnp.shape(values)[0] != rows:
            raise ValueError(
                f"The metric {name!r} returned {_specs(values)} for {rows} examples, and a value for each is needed, "
                f"[{rows}, ...], to be averaged over the examples of all replicas."
            )
        return (values,)

    return of


def _check_sums(name: str, empty: Metric, seen: Metric) -> None:
    before, now = (jax.tree.map(jnp.shape, metric) for metric in (empty, seen))
    if before != now:
        raise ValueError(
            f"The metric {name!r} of no examples is {before}, and with some it is {now}: its sums keep their shapes, whatever "
            "the batch."
        )


def _specs(tree: PyTree) -> str:
    return str(jax.tree.map(dtype_and_shape, tree)).replace("'", "")
