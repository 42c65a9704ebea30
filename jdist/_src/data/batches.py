"""Global batches, as the rows of them that this process holds: which come next, and what the last one of an epoch is.

Nothing here knows devices or threads, so any share of any number of processes can be had anywhere.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree
from jdist._src.data.array_rows import check_alike, kind, narrowed, wide_floats
from jdist._src.data.batch_sync import ProcessBatchSync, SingleProcessSync
from jdist._src.data.files import Files
from jdist._src.data.shard_readers import IndexedReader, ShardBlock, ShardReader, StreamReader
from jdist._src.data.shards import ProcessShare, ShardRows, check_split
from jdist._src.data.shuffle import ExampleOrder
from jdist._src.data.sources import READ_AGAIN, Arrays, Indexed, Stream

Remainder: TypeAlias = Literal["drop", "pad", "error"]
_log = logging.getLogger("jdist")


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """How a source is read.

    Attributes:
        source: Where the examples come from.
        batch_size: Examples in a global batch; None if the source's batches say it.
        shuffle: Whether examples that have numbers come in another order in each epoch.
        seed: What that order depends on.
        epochs: How often the source is gone through; None for ever.
        remainder: What becomes of a batch that is not full.
        own: Whether each process has a source of its own, for its replicas only.
        replica_batches: Whether an element of the source is the batch of one replica.
        warn: Says something once.
    """

    source: Indexed | Stream | Files
    batch_size: int | None
    shuffle: bool
    seed: int
    epochs: int | None
    remainder: Remainder
    own: bool = False
    replica_batches: bool = False
    warn: Callable[[str], None] = _log.warning

    def __post_init__(self) -> None:
        if isinstance(self.source, Stream) and self.source.endless and self.epochs not in (None, 1):
            raise ValueError(
                f"The source has no end, so its first epoch never ends, got epochs={self.epochs}. Pass `epochs=None`, and end "
                "the loop after a number of batches: `itertools.islice(dataset, 1000)`."
            )

    @property
    def method(self) -> str:
        """The name of the method of a strategy that reads, for messages."""
        return "distribute_datasets_from_function" if self.replica_batches else "distribute_dataset"

    @property
    def smaller_batches(self) -> str:
        """Advice for messages: how to make smaller batches."""
        if self.replica_batches:
            return "Let the function return smaller batches"
        return "Let the source make smaller batches" if self.batch_size is None else "Take a smaller `batch_size`"

    @property
    def no_examples(self) -> str:
        """Advice for messages: what to do where a process has no examples."""
        if self.replica_batches:
            return "Let the function return at least one batch on each process."
        return 'Give each process some, or read it all on each: `auto_shard="data"`.'

    def part(self, shard: int, shards: int) -> Indexed | Stream:
        """What is in one of so many shards."""
        if not isinstance(self.source, Files):
            return self.source
        which = (0, 1) if self.own else (shard, shards)
        return self.source.stream(self.batch_size is None, self.shuffle, self.seed, *which)

    def num_examples(self, share: ProcessShare) -> int | None:
        """How many there are in an epoch, if that is known before they are read."""
        apart = self.own and share.num_pipelines > 1
        return None if apart or isinstance(self.source, (Stream, Files)) else len(self.source)


def check_epochs(epochs: Any) -> None:
    """Raises TypeError or ValueError if that is not how often something can be gone through."""
    if epochs is None:
        return
    if as_int("`epochs`", epochs) < 1:
        raise ValueError(f"`epochs` is at least 1, or None for no end, got {epochs}.")


class Position(NamedTuple):
    """Between two batches.

    Attributes:
        epoch: Of the batch that comes next.
        batch: Its number in the epoch.
        batch_size: Examples in a global batch, once it is known.
        shards: How many parts of the data make a batch together.
        source: Where the source said that it was, if it can.
    """

    epoch: int
    batch: int
    batch_size: int | None
    shards: int
    source: Any = None


class LocalBatch(NamedTuple):
    """What a process holds of a global batch.

    Attributes:
        rows: Leaves `[local replica, row, ...]`.
        weights: `[local replica, row]`: 1 for an example, 0 for a row that fills up; None unless batches are padded.
        examples: How many examples all processes hold of it.
        after: The position behind it.
        warning: What is to be said of it to the user, if anything.
    """

    rows: PyTree
    weights: np.ndarray | None
    examples: int
    after: Position
    warning: str | None = None


def read_batches(
    reading: InputConfig, share: ProcessShare, start: Position, name: str = "", stopped: Callable[[], bool] = bool
) -> Iterator[LocalBatch]:
    """All batches from `start` on.

    Args:
        reading: What is read, and how.
        share: What this process holds of it.
        start: Where to begin.
        name: That of the conversation with the other processes, if there are any.
        stopped: Says whether to give up waiting for them.
    """
    alone = share.num_pipelines == 1 or in_memory_on_all(reading, share)
    agreement = SingleProcessSync() if alone else ProcessBatchSync(name, share.pipeline, share.num_pipelines, stopped)
    try:
        yield from _Reader(reading, share, start, agreement).read()
    finally:
        agreement.leave()


def in_memory_on_all(reading: InputConfig, share: ProcessShare) -> bool:
    """Whether every process has the same arrays in memory, which cannot fail on one of them."""
    return isinstance(reading.source, Arrays) and (share.num_pipelines == 1 or not reading.own)


class _Reader:
    """One process on its way through the source."""

    def __init__(
        self,
        reading: InputConfig,
        share: ProcessShare,
        start: Position,
        agreement: SingleProcessSync | ProcessBatchSync,
    ):
        self._reading, self._share, self._start = reading, share, start
        self._size = start.batch_size
        # Counted when there may have been another number of replicas.
        if self._size and reading.batch_size is None:
            self._size = self._split(self._size, share.num_replicas)
        self._like: PyTree = None
        self._kind: str | None = None
        self._warning: str | None = None  # of the elements
        self._left_out = 0
        self._short: list[int] = []  # how many examples each shard had in the first batch left out
        self._keeps_64_bits = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        self._agreement = agreement

    def read(self) -> Iterator[LocalBatch]:
        """The batches of one epoch after the other."""
        start = self._start
        epochs = (
            itertools.count(start.epoch) if self._reading.epochs is None else range(start.epoch, self._reading.epochs)
        )
        for epoch in epochs:
            begin = start if epoch == start.epoch else Position(epoch, 0, self._size, start.shards)
            before, found = self._left_out, False
            for batch in self._epoch(begin):
                found = True
                yield batch._replace(warning=self._warning)
                self._warning = None
            if not found and begin.batch == 0:
                wrong = _nothing(self._reading, epoch, self._left_out - before, self._size, self._short)
                raise ValueError(f"{wrong} {self._warning}" if self._warning else wrong)
            if epoch == start.epoch and self._left_out and self._reading.num_examples(self._share) is None:
                least = "at least " if len(self._short) > 1 else ""
                self._reading.warn(
                    f"{self._reading.method} left out {least}{self._left_out} examples of the first epoch, which did not fill "
                    f'a batch of {self._size}. remainder="pad" keeps them.'
                )

    def _epoch(self, begin: Position) -> Iterator[LocalBatch]:
        feeds: dict[int, ShardReader] = {}
        try:
            self._agreement.told(lambda: self._open(feeds, begin))
            parts = self._parts(self._size or 0, begin.shards)
            for number in itertools.count(begin.batch):
                where = f" in batch {number} of epoch {begin.epoch}"
                blocks, rows = self._agreement.told(lambda where=where: self._read(parts, feeds, where))
                mine = {part.shard: block.examples for part, block in zip(parts, blocks, strict=True)}
                counts = self._agreement.counts(mine, self._kind, where)
                examples = sum(counts)
                if examples == 0:
                    return
                if number == 0 and 0 in counts:
                    raise ValueError(
                        f"Part {counts.index(0)} of the {len(counts)} that the data are read in has no examples. "
                        f"{self._reading.no_examples}"
                    )
                if examples != self._size and self._reading.remainder == "error":
                    raise ValueError(
                        f'There are {examples} of {self._size} examples{where}, and remainder="error" allows only full '
                        'batches: "drop" leaves the others out, "pad" fills them up.'
                    )
                if examples != self._size and self._reading.remainder == "drop":
                    self._left_out += examples
                    self._short = self._short or counts
                    if 0 in counts:  # a shard is at its end, and no batch will be full again
                        return
                    continue
                source = feeds[0].state() if begin.shards == 1 else None
                after = Position(begin.epoch, number + 1, self._size, begin.shards, source)
                yield LocalBatch(self._joined(blocks, rows, where), self._weights(parts, blocks), examples, after)
        finally:
            for feed in feeds.values():
                feed.close()

    def _open(self, feeds: dict[int, ShardReader], begin: Position) -> None:
        """Puts into `feeds` the shards that this process reads, at `begin`; and finds out how large a batch is."""
        pieces = len(self._share.replicas) if self._reading.replica_batches else 1
        for part in self._parts(self._size or self._share.num_replicas * begin.shards, begin.shards):
            source = self._reading.part(part.shard, begin.shards)
            if isinstance(source, Stream):
                first = begin.batch * (pieces if source.batches else part.size)
                feed = StreamReader(source, begin.epoch, first, pieces, begin.source)
                if self._size is None:
                    self._size = self._size_of(
                        source.batch_size or feed.rows_of_first(" in the first batch"), begin.shards
                    )
            else:
                numbers = ExampleOrder(len(source), self._reading.shuffle, self._reading.seed, part.shard).epoch(
                    begin.epoch
                )
                feed = IndexedReader(source, numbers, begin.batch * part.size)
            feeds[part.shard] = feed

    def _size_of(self, rows: int, shards: int) -> int:
        """How many examples a global batch has where an element of the source has `rows`."""
        if rows == 0:
            raise ValueError(_nothing(self._reading, 0, 0, None, []))
        if self._reading.replica_batches:
            return rows * self._share.num_replicas
        if self._reading.own:
            here = len(self._share.replicas)
            return self._split(rows, here) // here * self._share.num_replicas
        return self._split(rows * shards, self._share.num_replicas)

    def _split(self, rows: int, replicas: int) -> int:
        """`rows`, or if batches are padded the next number that can be split over so many replicas."""
        if self._reading.remainder == "pad":
            return -(-rows // replicas) * replicas
        check_split(rows, replicas)
        return rows

    def _parts(self, size: int, shards: int) -> list[ShardRows]:
        return self._share.own(size) if self._reading.own else self._share.common(size, shards)

    def _read(
        self, parts: list[ShardRows], feeds: dict[int, ShardReader], where: str
    ) -> tuple[list[ShardBlock], list[PyTree]]:
        """A block of each shard, and its rows where it has any examples."""
        blocks = [feeds[part.shard].read(part, where) for part in parts]
        return blocks, [self._checked(block.rows(), where) if block.examples else None for block in blocks]

    def _checked(self, rows: PyTree, where: str) -> PyTree:
        """`rows`, in the dtypes that devices hold, if they are like those before."""
        if self._like is None:
            self._like = jax.tree.map(lambda x: np.empty((0, *x.shape[1:]), x.dtype), rows)
            self._warning = _batched_elements(self._reading, rows)
            self._kind = f"batches of {self._size} examples of {kind(rows)}"
            if not self._keeps_64_bits and (wide := wide_floats(rows)):
                self._reading.warn(
                    f"{', '.join(wide)}: JAX keeps 32 bits of each number, and the others are cut off. Hand in float32, or let "
                    'JAX keep 64 bits: `jax.config.update("jax_enable_x64", True)`.'
                )
        else:
            check_alike(self._like, rows, where)
        return rows if self._keeps_64_bits else narrowed(rows)

    def _joined(self, blocks: list[ShardBlock], rows: list[PyTree], where: str) -> PyTree:
        """All rows of this process, one shard after the other, by replica."""
        given = [self._checked(b.rows(), where) if r is None else r for b, r in zip(blocks, rows, strict=True)]
        columns = zip(*map(jax.tree.leaves, given), strict=True)
        whole = [column[0] if len(column) == 1 else np.concatenate(column) for column in columns]
        return jax.tree.unflatten(jax.tree.structure(given[0]), [self._per_replica(array) for array in whole])

    def _weights(self, parts: list[ShardRows], blocks: list[ShardBlock]) -> np.ndarray | None:
        if self._reading.remainder != "pad":
            return None
        valid = [block.valid()[part.rows] for part, block in zip(parts, blocks, strict=True)]
        return self._per_replica(np.concatenate(valid).astype(np.float32))

    def _per_replica(self, array: np.ndarray) -> np.ndarray:
        replicas = len(self._share.replicas)
        return array.reshape(replicas, len(array) // replicas, *array.shape[1:])


def _batched_elements(reading: InputConfig, rows: PyTree) -> str | None:
    """Returns a warning if the examples of a source look like batches: the first dimension of every leaf is the batch size."""
    size, source = reading.batch_size, reading.source
    are_batches = isinstance(source, Stream) and source.batches
    if size is None or are_batches or isinstance(source, Arrays):
        return None
    if any(leaf.ndim < 2 or leaf.shape[1] != size for leaf in jax.tree.leaves(rows)):
        return None
    return (
        f"Each element of the source has {size} rows ({kind(rows)}), and batch_size={size}: a batch has {size} such elements, "
        f"{size} x {size} rows. If the elements are batches already, pass `batch_size=None`."
    )


def _nothing(reading: InputConfig, epoch: int, left_out: int, size: int | None, short: list[int]) -> str:
    if left_out and len(short) > 1:
        return (
            f"Part {short.index(min(short))} of the {len(short)} that the data are read in has only {min(short)} examples, "
            f'which do not fill its part of a batch of {size}, and remainder="drop" leaves out what does not. '
            f'{reading.smaller_batches}, or remainder="pad".'
        )
    if left_out:
        return (
            f'{left_out} examples do not fill one batch of {size}, and remainder="drop" leaves out what does not. '
            f'{reading.smaller_batches}, or remainder="pad".'
        )
    if epoch:
        return f"The source gave no examples in epoch {epoch}, and some in the one before. {READ_AGAIN}"
    return "The source is empty: there is nothing to distribute."
