"""What a loop waits for."""

import dataclasses


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
    """

    batches: int = 0
    examples: int = 0
    startup: float = 0.0
    waiting: float = 0.0
    working: float = 0.0
    stalled: int = 0

    @property
    def stalled_fraction(self) -> float:
        """Which part of the steps had to wait; 0 before there were two."""
        return self.stalled / max(1, self.batches - 1)

    @property
    def waiting_fraction(self) -> float:
        """Which part of the time went by waiting; 0 before there were two."""
        return self.waiting / (self.waiting + self.working) if self.waiting else 0.0

    @property
    def rows_per_second(self) -> float:
        """How many examples a second it has taken, the time until the first batch not counted; 0 before there were two."""
        spent = self.waiting + self.working
        return self.examples / spent if spent else 0.0

    def after(self, waited: float, worked: float | None, stalled: bool, examples: int) -> "Stats":
        """With one more batch; `worked` is None for the first."""
        counted = dataclasses.replace(self, batches=self.batches + 1, examples=self.examples + examples)
        if worked is None:
            return dataclasses.replace(counted, startup=waited)
        return dataclasses.replace(
            counted, waiting=self.waiting + waited, working=self.working + worked, stalled=self.stalled + stalled
        )
