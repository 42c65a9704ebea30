"""Timing of a loop over batches."""

import dataclasses
import time


@dataclasses.dataclass(frozen=True)
class Stats:
    """The waiting time of a loop over batches so far.

    Attributes:
        batches: The number of batches received.
        examples: The number of examples in them, over all replicas.
        startup: Seconds of waiting for the first batch.
        waiting: Seconds of waiting for the other batches.
        working: Seconds between receiving a batch and requesting the next one: the steps.
        stalled: The number of batches that were not ready when they were requested, without the first one.
        first: The number of examples in the first batch, which no step precedes.

    Example:
        >>> stats = jdist.data.Stats(
        ...     batches=5, examples=40, waiting=1.0, working=3.0, stalled=1, first=8
        ... )
        >>> stats.stalled_fraction, stats.waiting_fraction, stats.examples_per_second
        (0.25, 0.25, 8.0)
    """

    batches: int = 0
    examples: int = 0
    startup: float = 0.0
    waiting: float = 0.0
    working: float = 0.0
    stalled: int = 0
    first: int = 0

    @property
    def stalled_fraction(self) -> float:
        """The fraction of the steps that waited; 0 for fewer than two batches."""
        return self.stalled / max(1, self.batches - 1)

    @property
    def waiting_fraction(self) -> float:
        """The fraction of the time spent waiting; 0 for fewer than two batches."""
        seconds = self.waiting + self.working
        return self.waiting / seconds if seconds else 0.0

    @property
    def examples_per_second(self) -> float:
        """The number of examples per second since the first batch; 0 for fewer than two batches."""
        seconds = self.waiting + self.working
        return (self.examples - self.first) / seconds if seconds else 0.0


class LoopTimer:
    """Measures the time between requesting a batch and receiving it.

    Attributes:
        examples: The number of examples received.
    """

    def __init__(self) -> None:
        self._batches = self.examples = self._stalled = self._first = 0
        self._startup = self._waiting = self._total = 0.0
        self._first_received = self._last_received = 0.0  # since the last pause; 0 before the first batch

    def receive(self, requested: float, examples: int, stalled: bool) -> None:
        """Records that the loop receives a batch that it requested at `requested`, a value of `time.perf_counter()`."""
        now = time.perf_counter()
        self._batches += 1
        self.examples += examples
        if self._last_received:
            self._waiting += now - requested
            if stalled:
                self._stalled += 1
        else:
            self._startup += now - requested
            self._first += examples
            self._first_received = now
        self._last_received = now

    def pause(self) -> None:
        """Excludes the time until the next batch, which does not follow a step."""
        self._total += self._last_received - self._first_received
        self._first_received = self._last_received = 0.0

    @property
    def stalled_fraction(self) -> float:
        """The fraction of the steps that waited; 0 for fewer than two batches."""
        return self._stalled / max(1, self._batches - 1)

    def stats(self) -> Stats:
        """Returns the measurements so far."""
        working = self._total + self._last_received - self._first_received - self._waiting
        return Stats(self._batches, self.examples, self._startup, self._waiting, working, self._stalled, self._first)
