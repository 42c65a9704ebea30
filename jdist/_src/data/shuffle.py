"""The order of indexed examples: pure arithmetic, the same on every process and for any number of devices."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ExampleOrder:
    """The order of the examples, a function of the seed and the epoch.

    Attributes:
        num_examples: The number of examples.
        shuffle: Whether each epoch has its own order.
        seed: The seed of the shuffled order.
        shard: The index of these examples among several shards of the data; each shard has its own order.

    Example:
        >>> order = ExampleOrder(5, shuffle=False, seed=0)
        >>> order.epoch(0).tolist()
        [0, 1, 2, 3, 4]
    """

    num_examples: int
    shuffle: bool
    seed: int
    shard: int = 0

    def epoch(self, epoch: int) -> np.ndarray:
        """Returns the indices of all examples in the order of an epoch, `[example]`."""
        if not self.shuffle:
            return np.arange(self.num_examples)
        key, counter = np.array([self.seed, epoch], np.uint64), np.array([0, 0, 0, self.shard], np.uint64)
        # Of numpy's generators, only the legacy `RandomState` guarantees the same stream in every version.
        return np.random.RandomState(np.random.Philox(key=key, counter=counter)).permutation(self.num_examples)
