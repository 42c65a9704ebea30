"""The learning rate, as the optimizer's state knows it."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import optax

from jdist._src.callbacks.arguments import check_function
from jdist._src.callbacks.log_rows import Also
from jdist._src.core.tree import PyTree
from jdist._src.strategies.variables import read_values
from jdist._src.training.events import Event

Schedule: TypeAlias = Callable[[Any], Any]
NAME = "learning_rate"


def learning_rate(schedule: Schedule | None = None) -> Also:
    """The learning rate of the last step, for those who write logs: `CSVLog(path, also=[learning_rate()])`.

    Args:
        schedule: The one that the optimizer was made with. Without it, the optimizer has to be made by
            `optax.inject_hyperparams(optax.adamw)(learning_rate=...)`, whose state has the rate in it.

    Returns:
        A function from an event to the rate, by the name `learning_rate`.

    Raises:
        ValueError: Said when it is asked for: the state does not have it in one place.

    Example:
        >>> rate = jdist.callbacks.learning_rate(optax.linear_schedule(1.0, 0.0, 10))
        >>> rate.__name__
        'learning_rate'
    """
    if schedule is not None:
        check_function("schedule", schedule, "the number of updates")

    def learning_rate(event: Event) -> Mapping[str, float]:
        found = learning_rate_of(event.state, schedule, step=event.step)
        if found is None:
            raise ValueError(
                "The state says no learning rate, or several. Hand in the schedule, `learning_rate(schedule)`, or make the "
                "optimizer by `optax.inject_hyperparams(optax.adamw)(learning_rate=...)`."
            )
        return {NAME: found}

    return learning_rate


def learning_rate_of(state: PyTree, schedule: Schedule | None = None, *, step: int = 0) -> float | None:
    """The learning rate that the last update was made with; None if nothing says it, or several parts say different ones.

    Args:
        state: A training state, or an optimizer's.
        schedule: From the number of updates before to the rate. How many there were, the optimizer's state knows, if its
            optimizer was made with a schedule.
        step: How many there were, if it does not.

    Example:
        >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        >>> learning_rate_of(optimizer.init({"w": jnp.zeros(3)}))
        0.5
    """
    if schedule is not None:
        counts = _read(node.count for node in _nodes(state, lambda node: isinstance(node, optax.ScaleByScheduleState)))
        count = int(counts.pop()) if len(counts) == 1 else step
        return float(schedule(max(0, count - 1)))
    rates = _read(node.hyperparams[NAME] for node in _nodes(state, _has_rate))
    return rates.pop() if len(rates) == 1 else None


def _nodes(state: PyTree, is_wanted: Callable[[Any], bool]) -> list[Any]:
    return [node for node in jax.tree.leaves(state, is_leaf=is_wanted) if is_wanted(node)]


def _read(values: Any) -> set[float]:
    return {float(x) for value in values for x in jax.device_get(jax.tree.leaves(read_values(value)))}


def _has_rate(node: Any) -> bool:
    hyperparams = getattr(node, "hyperparams", None)
    return isinstance(hyperparams, Mapping) and NAME in hyperparams
