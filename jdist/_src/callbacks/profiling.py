"""Profiles of a few steps."""

import os
import warnings
from typing import final

from jdist._src.core.arguments import as_int
from jdist._src.core.path_arguments import local_path_argument, make_directory
from jdist._src.core.source_lines import levels_to_user
from jdist._src.profiling.profile import profile
from jdist._src.profiling.summary import ProfileSummary
from jdist._src.training.events import Callback, Event, Moment


@final
class Profile(Callback):
    """Traces steps as `jdist.profile` does, and summarizes where their time went.

    The trace starts before the first call whose first step is `start` or later, and ends after step `stop`. If a call takes
    several steps, the trace contains complete calls, and at least one. At both ends the callback waits for the devices, so that
    the trace contains the work of these steps only. See `jdist.profile` for the files and for several processes.

    Args:
        directory: The directory of the trace and of the summary.
        start: The first step, from 1. The first call also compiles, so choose a later step.
        stop: The last step.

    Raises:
        TypeError: `directory` is not a path, or a step is not an integer.
        ValueError: `start` is less than 1, `stop` is less than `start`, or `directory` is a URL. Raised before the first step:
            the directory is not writable.

    Example:
        >>> profile = jdist.callbacks.Profile("run/trace", start=10, stop=12)
    """

    def __init__(self, directory: str | os.PathLike[str], *, start: int, stop: int):
        self.directory = local_path_argument("directory", directory)
        self.start, self.stop = as_int("`start`", start, 1), as_int("`stop`", stop, 1)
        if stop < start:
            raise ValueError(f"`stop` must be >= `start`, got start={start}, stop={stop}.")
        self._profile = profile(self.directory)
        self._is_tracing = self._is_done = False

    def __repr__(self) -> str:
        return f"Profile({str(self.directory)!r}, start={self.start}, stop={self.stop})"

    @property
    def summary(self) -> ProfileSummary:
        """Where the time of the steps went.

        Raises:
            RuntimeError: The steps were not traced completely.
        """
        return self._profile.summary

    def __call__(self, event: Event, /) -> None:
        """Starts or ends the trace if it is due."""
        match event.moment:
            case Moment.START:
                make_directory(self.directory)
                self._is_done = event.step >= self.stop
                self._start_if_due(event)
            case Moment.STEP:
                if self._is_tracing and event.step >= self.stop:
                    self._end()
                self._start_if_due(event)
            case Moment.END:
                if not self._is_tracing and not self._is_done:
                    warnings.warn(
                        f"Steps {self.start} to {self.stop} were not traced: training ended after step {event.step}.",
                        stacklevel=levels_to_user(),
                    )
                self._end()

    def close(self) -> None:
        """Ends the trace without a summary, if it is open: training has failed."""
        self._end(has_failed=True)

    def _start_if_due(self, event: Event) -> None:
        if not (self._is_tracing or self._is_done or event.step < self.start - 1):
            self._profile.start()
            self._is_tracing = True

    def _end(self, has_failed: bool = False) -> None:
        if self._is_tracing:
            self._is_tracing, self._is_done = False, True
            self._profile.end(has_failed)
