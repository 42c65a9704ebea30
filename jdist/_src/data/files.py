"""Examples in files: who reads which file, and in which order."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.data.shuffle import ExampleOrder
from jdist._src.data.source_adapters import source_of
from jdist._src.data.sources import Indexed, Stream

_CHUNK = 256  # examples that are taken from a file at once


@dataclasses.dataclass(frozen=True)
class Files:
    """Examples in files, each file read by a function.

    Under `AutoShardPolicy.FILE` process i of n reads the files i, i + n, i + 2n, ...; otherwise every process reads them
    all, one after the other.

    Attributes:
        paths: The files, the same list on every process.
        read: From a path to the examples in it: anything that `Strategy.distribute_dataset` takes, such as a generator, a
            tree of arrays, or `grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path)).map(decode)`.
            `shuffle=True` needs examples that can be found by their numbers; each epoch then has another order of the files,
            and of the examples in each.

    Raises:
        ValueError: There are no paths.
        TypeError: `paths` is a single path, or `read` is no function.

    Example:
        >>> files = Files(["3", "2"], lambda path: np.arange(int(path)))
        >>> strategy = jdist.OneDeviceStrategy("cpu:0")
        >>> [batch.tree.tolist() for batch in strategy.distribute_dataset(files, batch_size=5)]
        [[[0, 1, 2, 0, 1]]]
    """

    paths: Sequence[str | os.PathLike[str]]
    read: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if isinstance(self.paths, (str, bytes, os.PathLike)) or not isinstance(self.paths, Iterable):
            raise TypeError(f"`paths` is a list of paths, got {self.paths!r}: write `[{str(self.paths)!r}]`.")
        if not callable(self.read):
            raise TypeError(f"`read` is a function from a path to the examples in that file, got {self.read!r}.")
        object.__setattr__(self, "paths", tuple(self.paths))
        if not self.paths:
            raise ValueError("`paths` is empty: there is no file to read.")

    def stream(self, batches: bool, shuffle: bool, seed: int, shard: int, shards: int) -> Stream:
        """What is in every file, or in those of one of several shards."""

        def start(epoch: int, first: int) -> Iterator[Any]:
            order = ExampleOrder(len(self.paths), shuffle, seed).epoch(epoch)
            for number in order[shard::shards].tolist():
                try:
                    found = source_of(self.read(self.paths[number]), batches, shuffle, seed)
                    if isinstance(found, Stream) and found.batches and not batches:
                        raise ValueError(
                            "`read` gives batches, and not examples: take them as they are, `batch_size=None`."
                        )
                    if isinstance(found, Stream):
                        for element in found.start(epoch, 0):
                            if first == 0:
                                yield element
                            first = max(0, first - 1)
                    else:
                        # The order within a file is that of a shard which comes after all others.
                        within = ExampleOrder(len(found), shuffle, seed, len(self.paths) + number)
                        yield from _in_order(found, within.epoch(epoch)[first:])
                        first = max(0, first - len(found))
                except Exception as error:
                    error.add_note(f"while reading {self.paths[number]}")
                    raise

        return Stream(start, batches, lends=True)


def _in_order(source: Indexed, numbers: np.ndarray) -> Iterator[Any]:
    for start in range(0, len(numbers), _CHUNK):
        chunk = numbers[start : start + _CHUNK]
        block = source.take(chunk, "")
        yield from (jax.tree.map(lambda array, i=i: array[i], block) for i in range(len(chunk)))
