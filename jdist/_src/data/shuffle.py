"""In which order examples that have numbers come: pure arithmetic, the same on every process and any number of devices."""

import dataclasses
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class ExampleOrder:
    """The order of the examples: a function of the seed, the epoch and the position.

    Attributes:
        num_examples: How many there are.
        shuffle: Whether each epoch has an order of its own.
        seed: What that order depends on, besides the epoch.
        shard: Which of several parts of the data these examples are; each has an order of its own.

    Example:
        >>> order = Order(5, shuffle=False, seed=0)
        >>> [batch.tolist() for batch in order.batches(0, 2)]
        [[0, 1], [2, 3], [4]]
    """

    num_examples: int
    shuffle: bool
    seed: int
    shard: int = 0

    def epoch(self, epoch: int) -> np.ndarray:
        """The numbers of all examples in the order of this epoch, `[example]`."""
        if not self.shuffle:
            return np.arange(self.num_examples)
        key, counter = np.array([self.seed, epoch], np.uint64), np.array([0, 0, 0, self.shard], np.uint64)
        # Of numpy's generators only the legacy one promises that what it gives never changes.
        return np.random.RandomState(np.random.Philox(key=key, counter=counter)).permutation(self.num_examples)

    def batches(self, epoch: int, size: int, first: int = 0) -> Iterator[np.ndarray]:
        """The numbers of the examples in each batch of this epoch, `[batch]`, from the `first`; fewer in a partial one."""
        order = self.epoch(epoch)
        for start in range(first * size, self.num_examples, size):
            yield order[start : start + size]
