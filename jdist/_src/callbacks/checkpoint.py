"""Checkpoints during training."""

from collections.abc import Mapping
from typing import final

import numpy as np

from jdist._src.callbacks.arguments import check_has_metric
from jdist._src.checkpoint.checkpointer import Checkpointer, best_metric, is_best
from jdist._src.core.tree import one_line
from jdist._src.training.events import Callback, Event, Moment


@final
class Checkpoint(Callback):
    """Saves the training state, the position of the data, the states of callbacks, and the history.

    A checkpoint is saved after each step that is a multiple of the checkpointer's `every`, or after the call of several steps
    that contains it; where a validation or the end of an epoch follows the step, after these; and at the end of training, where
    the callback waits for it. With `Checkpointer(keep_best=...)`, one is also saved after each validation whose metric is
    better than in all saved ones. The last checkpoint contains the state after the last step, even if another callback ends
    training with a different state: a resumed run continues from the last step.

    Args:
        checkpointer: The checkpointer, which determines the steps, the folder, and the number of checkpoints kept.

    Raises:
        TypeError: `checkpointer` is not a `jdist.Checkpointer`.
        ValueError: Raised by `Trainer.fit` before the first step: the metric of `keep_best` does not exist.

    Example:
        >>> import tempfile
        >>> trainer = jdist.Trainer(
        ...     (lambda key, x: jax.numpy.zeros(3), lambda w, x: x @ w),
        ...     optax.sgd(0.1),
        ...     optax.squared_error,
        ...     strategy=jdist.OneDeviceStrategy("cpu:0"),
        ... )
        >>> with (
        ...     tempfile.TemporaryDirectory() as folder,
        ...     jdist.Checkpointer(folder, every=2) as checkpointer,
        ... ):
        ...     data = (np.ones((10, 3), np.float32), np.ones(10, np.float32))
        ...     callbacks = [Checkpoint(checkpointer)]
        ...     fit = trainer.fit(
        ...         data, batch_size=2, callbacks=callbacks, resume=checkpointer, progress="off"
        ...     )
        ...     print(checkpointer.steps())
        (2, 4, 5)
    """

    def __init__(self, checkpointer: Checkpointer):
        check_is_checkpointer("Checkpoint", checkpointer)
        self.checkpointer = self._checkpointer = checkpointer
        self._last_step = self._last_saved = 0
        self._is_due = False

    def __call__(self, event: Event, /) -> None:
        """Saves a checkpoint if one is due."""
        every = self._checkpointer.every
        self._is_due |= event.step // every > self._last_step // every
        self._last_step = event.step
        match event.moment:
            case Moment.START:
                self._last_saved, self._is_due = event.step, False
                name = best_metric(self._checkpointer)
                if name is not None and event.metric_names is not None:
                    check_has_metric("`Checkpointer(keep_best=...)`", name, event.metric_names)
            case Moment.STEP if self._is_due and not (event.ends_epoch or event.validates):
                self._save(event)
            case Moment.VALIDATION | Moment.EPOCH:
                metrics = row_metrics(event)
                if self._is_due or is_best(self._checkpointer, metrics):
                    self._save(event, metrics)
            case Moment.END:
                # The step number may have decreased: steps after a loss that is not finite were rejected.
                if event.step > self._last_saved:
                    self._save(event)
                self._checkpointer.wait()

    def close(self) -> None:
        """Waits for the checkpoint that is being saved."""
        self._checkpointer.wait()

    def _save(self, event: Event, metrics: Mapping[str, float] | None = None) -> None:
        self._is_due = False
        if save_event(self._checkpointer, event, metrics):
            self._last_saved = event.step


def check_is_checkpointer(name: str, checkpointer: object) -> None:
    """Raises TypeError if the argument of the callback `name` is not a `Checkpointer`."""
    if not isinstance(checkpointer, Checkpointer):
        raise TypeError(
            f"`{name}` needs a `jdist.Checkpointer`, got {one_line(checkpointer)}. Write "
            "`with jdist.Checkpointer(path, every=100) as checkpointer:` and, inside, "
            f"`trainer.fit(..., callbacks=[jdist.callbacks.{name}(checkpointer)], resume=checkpointer)`."
        )


def row_metrics(event: Event) -> dict[str, float]:
    """Returns the scalar metrics of a VALIDATION or EPOCH event."""
    return {name: value for name, value in event.logs.items() if np.ndim(value) == 0}


def save_event(checkpointer: Checkpointer, event: Event, metrics: Mapping[str, float] | None) -> bool:
    """Saves a checkpoint that `fit(resume=)` can continue from, unless the last step is not finite.

    Returns:
        Whether the last step is finite.
    """
    if not event.is_finite():
        return False
    seed, extra = event.position.get("seed"), event.resume_data()
    checkpointer._save(event.step, event.state, event.position, seed, extra, metrics)
    return True
