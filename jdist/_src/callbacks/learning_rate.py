"""The learning rate as a column of logs."""

from collections.abc import Mapping

from jdist._src.callbacks.arguments import check_function
from jdist._src.callbacks.rows import ExtraColumns
from jdist._src.training.events import Event
from jdist._src.training.state import Schedule, learning_rate_of


def learning_rate(schedule: Schedule | None = None) -> ExtraColumns:
    """Returns a function from an event to the learning rate of the last step, for logs: `CSVLog(path, also=[learning_rate()])`.

    Args:
        schedule: The schedule of the optimizer. Without it, the optimizer must be
            `optax.inject_hyperparams(optax.adamw)(learning_rate=...)` or similar, whose state contains the rate.

    Raises:
        TypeError: `schedule` is not a function.
        ValueError: Raised when the row is written: the state contains no rate, or several different ones.

    Example:
        >>> rate = jdist.callbacks.learning_rate(optax.linear_schedule(1.0, 0.0, 10))
        >>> rate.__name__
        'learning_rate'
    """
    if schedule is not None:
        check_function("schedule", schedule, "the number of updates")

    def learning_rate(event: Event) -> Mapping[str, float]:
        rate = learning_rate_of(event.state, schedule, step=event.step)
        if rate is None:
            raise ValueError(
                "The state contains no learning rate, or several. Pass the schedule, `learning_rate(schedule)`, or use "
                "`optax.inject_hyperparams(optax.adamw)(learning_rate=...)` as the optimizer."
            )
        return {"learning_rate": rate}

    return learning_rate
