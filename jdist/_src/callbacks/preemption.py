"""A checkpoint when the platform announces that it will end the job."""

from collections.abc import Callable, Mapping
from typing import Any, final

import jax

from jdist._src.callbacks.checkpoint import check_is_checkpointer, row_metrics, save_event
from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.checkpoint.preemption import exit_preempted
from jdist._src.faults.preemption_notice import PreemptionNotice
from jdist._src.training.events import Callback, Event, Moment

_STEP_INTERVAL_SECONDS = 0.1  # in a single process


@final
class Preemption(Callback):
    """After SIGTERM, saves a checkpoint and ends the program with exit status 42.

    SIGTERM on any process is a notice for all: they agree on a step, save a checkpoint of it together, as
    `callbacks.Checkpoint` does, and `fit` raises `SystemExit(42)` when it is written. A program that starts again with
    `fit(resume=checkpointer)` continues with bitwise equal results. During a validation, the checkpoint follows the validation.

    `fit` installs the handler of SIGTERM in the main thread, and restores the previous one at its end; see
    `PreemptionCheckpointHandler`.

    Args:
        checkpointer: Saves the checkpoint. A `Checkpoint` callback with the same checkpointer saves others in between.
        watcher: A function without arguments that returns whether the platform has announced the end of this machine, for
            platforms that announce it in another way than by SIGTERM. It is called every 5 seconds, in a thread.

    Raises:
        TypeError: `checkpointer` is not a `jdist.Checkpointer`, or `watcher` is not a function.

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
        ...     callbacks = [jdist.callbacks.Checkpoint(checkpointer), Preemption(checkpointer)]
        ...     fit = trainer.fit(
        ...         data, batch_size=2, callbacks=callbacks, resume=checkpointer, progress="off"
        ...     )
        ...     print(checkpointer.steps())
        (2, 4, 5)
    """

    def __init__(self, checkpointer: Checkpointer, *, watcher: Callable[[], Any] | None = None):
        check_is_checkpointer("Preemption", checkpointer)
        self.checkpointer = self._checkpointer = checkpointer
        self._notice = PreemptionNotice(watcher)
        self._is_due = False

    def __call__(self, event: Event, /) -> None:
        """Saves a checkpoint and raises `SystemExit` if all processes have agreed on this event."""
        if event.moment is Moment.START:
            self._start()
            return
        # Checked at each event, so that the number of checks is equal on all processes.
        self._is_due = self._notice.is_agreed() or self._is_due
        if not self._is_due or (event.moment is Moment.STEP and (event.ends_epoch or event.validates)):
            return
        self._is_due = False
        has_row = event.moment in (Moment.VALIDATION, Moment.EPOCH)
        metrics: Mapping[str, float] | None = row_metrics(event) if has_row else None
        if save_event(self._checkpointer, event, metrics):
            self._checkpointer.wait()
            exit_preempted(self._checkpointer)

    def close(self) -> None:
        """Restores the handler of SIGTERM that was installed before."""
        self._notice.close()

    def _start(self) -> None:
        self._is_due = False
        self._notice.start()
        # Processes check equally often only if they receive the same STEP events.
        self.step_interval_seconds = 0.0 if jax.process_count() > 1 else _STEP_INTERVAL_SECONDS
        if self._notice.is_agreed():  # no step was taken since the newest checkpoint
            exit_preempted(self._checkpointer)
