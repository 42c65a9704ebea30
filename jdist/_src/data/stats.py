"""What a loop waits for."""

import dataclasses
import time


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a loop over batches has waited for so far.

    Attributes:
        batches: How many batches it has taken.
        examples: How many examples were in them, over all replicas.
        startup: Seconds until it had the first one.
        waiting: Seconds that it has waited for the others.
        working: Seconds between having a batch and asking for the next: the steps.
        stalled: How many batches were not ready when they were asked for, the first one not counted.
        first: How many examples were in the first batch, which no step came before.
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
        """Which part of the steps had to wait; 0 before there were two."""
        return self.stalled / max(1, self.batches - 1)

    @property
    def waiting_fraction(self) -> float:
        """Which part of the time went by waiting; 0 before there were two."""
        spent = self.waiting + self.working
        return self.waiting / spent if spent else 0.0

    @property
    def examples_per_second(self) -> float:
        """How many examples a second it has taken since it had the first batch; 0 before there were two."""
        spent = self.waiting + self.working
        return (self.examples - self.first) / spent if spent else 0.0


class LoopTimer:
    """Measures a loop, from when it asks for a batch to when it has it."""

    def __init__(self) -> None:
        self._batches = self._examples = self._stalled = self._first = 0
        self._startup = self._waiting = self._working = 0.0
        self._asked = 0.0
        self._had: float | None = None

    def ask(self) -> None:
        """The loop asks for a batch."""
        self._asked = time.perf_counter()

    def have(self, examples: int, stalled: bool) -> None:
        """It has one."""
        now = time.perf_counter()
        self._batches += 1
        self._examples += examples
        if self._had is None:
            self._startup += now - self._asked
            self._first += examples
        else:
            self._waiting += now - self._asked
            self._working += self._asked - self._had
            self._stalled += stalled
        self._had = now

    def pause(self) -> None:
        """What comes next is not a step after the last batch."""
        self._had = None

    def stats(self) -> Stats:
        """What was measured so far."""
        times = self._startup, self._waiting, self._working
        return Stats(self._batches, self._examples, *times, self._stalled, self._first)
