"""Logs for TensorBoard."""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jdist._src.callbacks.rows import ExtraColumns, RowWriter
from jdist._src.core.optional_import import optional_import
from jdist._src.core.path_arguments import make_directory, path_argument
from jdist._src.training.events import Event, Moment


@final
class TensorBoard(RowWriter):
    """Writes scalars for TensorBoard: after each epoch and each validation, and every `every` steps.

    Needs the extra `tensorboard`.

    A resumed run writes a new file into the directory, and hides the values of other files after the step that it resumes
    from. Process 0 writes.

    Args:
        directory: The directory of the logs.
        every: The number of steps between additional values; each time the metrics are read from the devices.
        also: Additional scalars: functions from an event to names and numbers, such as `jdist.callbacks.learning_rate()`.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
        TypeError: `directory` is not a path, `every` is not an integer, or `also` is not a list of functions.
        ValueError: `every` is less than 1. Raised before the first step: the directory is not writable.

    Example:
        >>> import os, tempfile
        >>> trainer = jdist.Trainer(
        ...     (lambda key, x: jax.numpy.zeros(3), lambda w, x: x @ w),
        ...     optax.sgd(0.1),
        ...     optax.squared_error,
        ...     strategy=jdist.OneDeviceStrategy("cpu:0"),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = (np.ones((10, 3), np.float32), np.ones(10, np.float32))
        ...     fit = trainer.fit(
        ...         data, batch_size=2, callbacks=[TensorBoard(folder)], progress="off"
        ...     )
        ...     print(len(os.listdir(folder)))
        1
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, every: int | None = None, also: Sequence[ExtraColumns] = ()
    ):
        super().__init__(every, also)
        self.directory = self.destination = path_argument("directory", directory)
        with optional_import("TensorBoard logs need tensorboardX", "jdist[tensorboard]"):
            importlib.import_module("tensorboardX")
        self._writer: Any = None
        self._written: tuple[int, set[str]] = (-1, set())  # the last step, and the names written at this step

    def __call__(self, event: Event, /) -> None:
        """Writes scalars if they are due."""
        super().__call__(event)
        if event.moment is Moment.END:
            self.close()

    def close(self) -> None:
        """Closes the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _begin(self, step: int) -> None:
        import tensorboardX

        self.close()
        make_directory(self.directory)
        self._written = (-1, set())
        # Without the suffix, two runs that start in the same second write the same file.
        options: dict[str, Any] = {"purge_step": step + 1, "filename_suffix": f".{step}"} if step else {}
        self._writer = tensorboardX.SummaryWriter(str(self.directory), flush_secs=5, **options)

    def _write(self, event: Event, columns: Mapping[str, Any]) -> None:
        step, names = self._written
        names = names if step == event.step else set()
        for name, value in columns.items():
            if name not in names and np.ndim(value) == 0:
                self._writer.add_scalar(name, float(value), event.step)
        self._written = (event.step, names | set(columns))
