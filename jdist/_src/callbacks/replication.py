"""A comparison of the copies of the state during training."""

from typing import Any, final

from jdist._src.core.arguments import as_int
from jdist._src.debug.copies import Comparison, raise_differences, start_comparison
from jdist._src.training.events import Callback, Event, Moment

_CALLS_UNTIL_READ = 16  # a result that is read so much later does not delay the steps in between


@final
class CheckReplicated(Callback):
    """Stops training with an error if the copies of the state differ between devices or processes.

    It compares parameters, optimizer state and model state as `jdist.debug.check_replicated` does: at the start, every `every`
    steps, and at the end. The devices compute the checksums between two steps, and the result is read 16 calls of the step
    later, or earlier at a validation, at the end of an epoch, or before the next comparison. So the loop does not wait for it.

    The error is the `__cause__` of the `jdist.FitError` that `fit` raises. States on parameter servers have one copy, and are
    not compared.

    Mutable: it holds the comparison that was started last.

    Args:
        every: The number of steps between two comparisons.

    Raises:
        TypeError: `every` is not an integer.
        ValueError: `every` is less than 1.

    Example:
        >>> callback = jdist.callbacks.CheckReplicated(every=500)
        >>> # trainer.fit(data, batch_size=64, epochs=3, callbacks=[callback])
    """

    is_collective = True

    def __init__(self, every: int = 100):
        self.every = as_int("`every`", every, 1)
        self.identity = f"CheckReplicated(every={self.every})"
        self._running: Comparison | None = None
        self._structure: Any = None  # of the state, from the first comparison
        self._last_step = self._num_calls = 0
        self._has_copies = True

    def __repr__(self) -> str:
        return f"CheckReplicated(every={self.every})"

    def __call__(self, event: Event, /) -> None:
        """Starts a comparison, or reads the result of one.

        Raises:
            CopiesDifferError: Copies differ.
        """
        if event.moment is Moment.START:
            self._structure, self._has_copies = None, True
            self._start(event)
            assert self._running is not None
            self._has_copies = bool(self._running.copies)
            self._read()
        elif event.moment is Moment.STEP:
            self._num_calls += 1
            if event.step // self.every > self._last_step // self.every:
                self._read()
                self._start(event)
            elif self._num_calls == _CALLS_UNTIL_READ:
                self._read()
        else:
            self._read()
            if event.moment is Moment.END and event.step != self._last_step:
                self._start(event)
                self._read()

    def close(self) -> None:
        """Discards a comparison whose result was not read."""
        self._running = None

    def _start(self, event: Event) -> None:
        self._last_step, self._num_calls = event.step, 0
        if self._has_copies:  # of parameter servers, `event.state` would read all values
            self._running = start_comparison(event.state, "state", self._structure)
            self._structure = self._running.structure

    def _read(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            raise_differences(running, f" after step {self._last_step}")
