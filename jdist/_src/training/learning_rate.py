"""The learning rate in the state of an optimizer."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import optax

from jdist._src.core.tree import PyTree
from jdist._src.strategies.variables import read_values

Schedule: TypeAlias = Callable[[Any], Any]


def learning_rate_of(state: PyTree, schedule: Schedule | None = None, *, step: int = 0) -> float | None:
    """Returns the learning rate of the last update; None if the state contains none, or several different ones.

    Args:
        state: A training state, or the state of an optimizer.
        schedule: A function from the number of previous updates to the rate. The number is read from the state of an optimizer
            that was made with a schedule.
        step: The number of updates, if the state does not contain it.

    Example:
        >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        >>> learning_rate_of(optimizer.init({"w": jnp.zeros(3)}))
        0.5
    """
    if schedule is not None:
        nodes = _nodes(state, lambda node: isinstance(node, optax.ScaleByScheduleState))
        counts = _distinct_values([node.count for node in nodes])
        count = int(counts.pop()) if len(counts) == 1 else step
        return float(schedule(max(0, count - 1)))
    rates = _distinct_values([node.hyperparams["learning_rate"] for node in _nodes(state, _has_learning_rate)])
    return rates.pop() if len(rates) == 1 else None


def _nodes(state: PyTree, condition: Callable[[Any], bool]) -> list[Any]:
    return [node for node in jax.tree.leaves(state, is_leaf=condition) if condition(node)]


def _distinct_values(values: list[Any]) -> set[float]:
    return {float(x) for value in values for x in jax.device_get(jax.tree.leaves(read_values(value)))}


def _has_learning_rate(node: Any) -> bool:
    hyperparams = getattr(node, "hyperparams", None)
    return isinstance(hyperparams, Mapping) and "learning_rate" in hyperparams
