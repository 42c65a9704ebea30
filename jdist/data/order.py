"""Which examples make which batch: pure arithmetic, the same on every process and for any number of devices."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np

Remainder: TypeAlias = Literal["drop", "pad"]


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of the examples: a function of the seed, the epoch and the position.

    Attributes:
        num_examples: How many there are.
        batch_size: Examples in a global batch.
        shuffle: Whether each epoch has an order of its own.
        seed: What that order depends on, besides the epoch.
        remainder: Whether the last partial batch of an epoch is left out or filled up.

    Example:
        >>> order = Order(5, 2, shuffle=False, seed=0, remainder="pad")
        >>> [batch.tolist() for batch in order.epoch_batches(0)]
        [[0, 1], [2, 3], [4]]
    """

    num_examples: int
    batch_size: int
    shuffle: bool
    seed: int
    remainder: Remainder

    @property
    def batches(self) -> int:
        """How many batches an epoch has."""
        whole, left = divmod(self.num_examples, self.batch_size)
        return whole + (left > 0 and self.remainder == "pad")

    @property
    def left_out(self) -> int:
        """How many examples of an epoch are in no batch."""
        return self.num_examples % self.batch_size if self.remainder == "drop" else 0

    def epoch(self, epoch: int) -> np.ndarray:
        """The numbers of all examples in the order of this epoch, `[example]`."""
        if not self.shuffle:
            return np.arange(self.num_examples)
        # Raw bits, because numpy promises that they never change; its `permutation` may from version to version.
        bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.num_examples)
        return np.argsort(bits, kind="stable")

    def epoch_batches(self, epoch: int) -> Iterator[np.ndarray]:
        """The numbers of the examples in each batch of this epoch, `[batch]`; fewer in a partial one."""
        order = self.epoch(epoch)
        for start in range(0, self.batches * self.batch_size, self.batch_size):
            yield order[start : start + self.batch_size]
