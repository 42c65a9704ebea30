"""Scalars for TensorBoard."""

import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from jdist._src.callbacks.arguments import make_directory, path_of
from jdist._src.callbacks.log_rows import Also, RowWriter, measured
from jdist._src.training.events import Event, Moment


@final
class TensorBoard(RowWriter):
    """Writes the metrics by step, for TensorBoard: after each epoch, and each `every` steps. Needs the extra `tensorboard`.

    A resumed run writes a new file into the directory, and hides what others in it have beyond the step that it resumes
    from. Process 0 writes.

    Args:
        directory: Where to.
        every: Each how many steps besides; each time reads the metrics from the devices.
        also: What to write besides, functions from an event to names and numbers, as `jdist.callbacks.learning_rate()`.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
        ValueError: Said before the first step: it cannot be written there.

    Example:
        >>> import tempfile
        >>> trainer = jdist.Trainer(
        ...     (lambda key, x: jax.numpy.zeros(3), lambda w, x: x @ w), optax.sgd(0.1), optax.squared_error,
        ...     strategy=jdist.OneDeviceStrategy("cpu:0"),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = (np.ones((10, 3), np.float32), np.ones(10, np.float32))
        ...     fit = trainer.fit(data, batch_size=2, callbacks=[TensorBoard(folder)], progress="off")
        ...     print(len(os.listdir(folder)))
        1
    """

    def __init__(self, directory: str | os.PathLike[str], *, every: int | None = None, also: Sequence[Also] = ()):
        super().__init__(every, also)
        self.directory = path_of("directory", directory)
        if importlib.util.find_spec("tensorboardX") is None:
            raise ModuleNotFoundError(
                'TensorBoard logs need tensorboardX: `python -m pip install "jdist[tensorboard]"`.'
            )
        self._writer: Any = None
        self._written: tuple[int, set[str]] = (-1, set())  # the last step, and what was written of it

    @property
    def destination(self) -> pathlib.Path:
        """The directory."""
        return self.directory

    def __call__(self, event: Event, /) -> None:
        """Called by the loop."""
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
        # The suffix: without it, two runs that begin in the same second write the same file.
        options: dict[str, Any] = {"purge_step": step + 1, "filename_suffix": f".{step}"} if step else {}
        self._writer = tensorboardX.SummaryWriter(str(self.directory), flush_secs=5, **options)

    def _write(self, event: Event) -> None:
        step, names = self._written
        names = names if step == event.step else set()
        found = {name: value for name, value in measured(event, self._also).items() if name not in names}
        for name, value in found.items():
            if np.ndim(value):  # no scalar
                continue
            self._writer.add_scalar(name, float(value), event.step)
        self._written = (event.step, names | set(found))
