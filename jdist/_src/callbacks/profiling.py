"""Traces of a few steps."""

import os
import warnings
from typing import final

import jax

from jdist._src.callbacks.arguments import make_directory, path_of
from jdist._src.core.arguments import as_int
from jdist._src.training.events import Event, Moment


@final
class Profile:
    """Traces steps with `jax.profiler`, for XProf, TensorBoard or Perfetto.

    Begins before the first call that starts with step `start` or later, and ends when step `stop` is through: of calls of
    several steps it traces whole ones, and at least one. Both times it waits for the devices, so that the trace has the work
    of these steps and of no others. Process 0 writes.

    Args:
        directory: Where to.
        start: The first step, from 1. The very first ones are compiled: not them, usually.
        stop: The last step.

    Raises:
        ValueError: `stop` is before `start`. Said before the first step: it cannot be written there.

    Example:
        >>> traced = jdist.callbacks.Profile("run/trace", start=10, stop=12)
    """

    def __init__(self, directory: str | os.PathLike[str], *, start: int, stop: int):
        self.directory = path_of("directory", directory)
        self.start, self.stop = as_int("`start`", start, 1), as_int("`stop`", stop, 1)
        if stop < start:
            raise ValueError(f"Steps {start} to {stop} are none: `start` is the first of them, `stop` the last.")
        self._is_tracing = self._is_done = False

    def __repr__(self) -> str:
        return f"Profile({str(self.directory)!r}, start={self.start}, stop={self.stop})"

    def __call__(self, event: Event, /) -> None:
        """Called by the loop."""
        if jax.process_index() != 0:
            return
        match event.moment:
            case Moment.START:
                make_directory(self.directory)
                self._is_done = event.step >= self.stop
                self._begin(event)
            case Moment.STEP:
                self._end(event)
                self._begin(event)
            case Moment.END:
                self._miss(event)
                self.close()

    def close(self) -> None:
        """Ends the trace, if there is one."""
        if self._is_tracing:
            self._is_tracing, self._is_done = False, True
            jax.profiler.stop_trace()

    def _begin(self, event: Event) -> None:
        if self._is_tracing or self._is_done or event.step < self.start - 1:
            return
        jax.block_until_ready(event.state)
        jax.profiler.start_trace(self.directory)
        self._is_tracing = True

    def _end(self, event: Event) -> None:
        if self._is_tracing and event.step >= self.stop:
            jax.block_until_ready(event.state)
            self.close()

    def _miss(self, event: Event) -> None:
        if not self._is_tracing and not self._is_done:
            warnings.warn(
                f"Steps {self.start} to {self.stop} were to be traced, and training was at its end after step {event.step}.",
                stacklevel=2,
            )
