"""Checkpoints during training."""

from typing import final

from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.training.events import Callback, Event, Moment


@final
class Checkpoint(Callback):
    """Saves the training state, the position of the data, the states of callbacks, and the history.

    A checkpoint is saved after each step that is a multiple of the checkpointer's `every`, or after the call of several steps
    that contains it; at the end of an epoch, after its validation; and at the end of training, where the callback waits for
    it. The last checkpoint contains the state after the last step, even if another callback ends training with a different
    state: a resumed run continues from the last step.

    Args:
        checkpointer: The checkpointer, which determines the steps, the folder, and the number of checkpoints kept.

    Raises:
        TypeError: `checkpointer` is not a `jdist.Checkpointer`.

    Example:
        >>> import tempfile
        >>> trainer = jdist.Trainer(
        ...     (lambda key, x: jax.numpy.zeros(3), lambda w, x: x @ w), optax.sgd(0.1), optax.squared_error,
        ...     strategy=jdist.OneDeviceStrategy("cpu:0"),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder, jdist.Checkpointer(folder, every=2) as checkpointer:
        ...     data = (np.ones((10, 3), np.float32), np.ones(10, np.float32))
        ...     callbacks = [Checkpoint(checkpointer)]
        ...     fit = trainer.fit(data, batch_size=2, callbacks=callbacks, resume=checkpointer, progress="off")
        ...     print(checkpointer.steps())
        (2, 4, 5)
    """

    def __init__(self, checkpointer: Checkpointer):
        if not isinstance(checkpointer, Checkpointer):
            raise TypeError(
                f"`Checkpoint` needs a `jdist.Checkpointer`, got {checkpointer!r}. Write "
                "`with jdist.Checkpointer(path, every=100) as checkpointer:` and, inside, "
                "`trainer.fit(..., callbacks=[jdist.callbacks.Checkpoint(checkpointer)], resume=checkpointer)`."
            )
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
            case Moment.STEP if self._is_due and not event.ends_epoch:
                self._save(event)
            case Moment.EPOCH if self._is_due:
                self._save(event)
            case Moment.END:
                # The step number may have decreased: steps after a loss that is not finite were rejected.
                if event.step > self._last_saved:
                    self._save(event)
                self._checkpointer.wait()

    def close(self) -> None:
        """Waits for the checkpoint that is being saved."""
        self._checkpointer.wait()

    def _save(self, event: Event) -> None:
        self._is_due = False
        if not event.is_finite():
            return
        seed, extra = event.position.get("seed"), event.resume_data()
        self._checkpointer.save(event.step, event.state, event.position, seed=seed, extra=extra, now=True)
        self._last_saved = event.step
