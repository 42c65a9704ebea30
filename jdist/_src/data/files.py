"""The source of examples in files."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jdist._src.core.tree import one_line


@dataclasses.dataclass(frozen=True)
class Files:
    """Examples in files, each file read by a function.

    Under `AutoShardPolicy.FILE` process i of n reads the files i, i + n, i + 2n, ...; otherwise every process reads all files,
    one after the other.

    Attributes:
        paths: The files, the same list on every process.
        read: A function from a path to the examples of that file: any source of `Strategy.distribute_dataset`, such as a
            generator, a tree of arrays, or `grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path)).map(decode)`.
            `shuffle=True` needs examples with an index; each epoch then has another order of the files, and of the examples
            in each file.

    Raises:
        ValueError: `paths` is empty.
        TypeError: `paths` is a single path, or `read` is not a function.

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
            raise TypeError(
                f"`paths` must be a list of paths, got {one_line(self.paths)}. Write `[{one_line(str(self.paths))}]`."
            )
        if not callable(self.read):
            raise TypeError(
                f"`read` must be a function from a path to the examples of that file, got {one_line(self.read)}."
            )
        object.__setattr__(self, "paths", tuple(self.paths))
        if not self.paths:
            raise ValueError("`paths` is empty. Pass at least one path.")
