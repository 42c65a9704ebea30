"""Global batches, as the rows that this process holds: their order, their size, and the partial batch of an epoch.

Does not use devices or threads: a test can compute the rows of any process.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._src.core.tree import PyTree
from jdist._src.data.array_rows import canonicalize_dtypes, check_same_rows, describe_row, float64_warning
from jdist._src.data.batch_sync import Channel, ProcessBatchSync, batch_location
from jdist._src.data.config import InputConfig
from jdist._src.data.files import Files
from jdist._src.data.shard_readers import IndexedReader, ShardBlock, ShardReader, StreamReader
from jdist._src.data.shards import PAD_EVERY_BATCH, ProcessShare, ShardRows, check_split
from jdist._src.data.shuffle import ExampleOrder
from jdist._src.data.source_adapters import stream_of_files
from jdist._src.data.source_check import Digest
from jdist._src.data.source_iterators import READ_AGAIN_ADVICE
from jdist._src.data.sources import Arrays, Stream


class Position(NamedTuple):
    """A position between two batches.

    Attributes:
        epoch: The epoch of the next batch.
        batch: The number of the next batch in the epoch.
        batch_size: The number of examples in a global batch, once it is known.
        shards: The number of shards of the data that together make a batch.
        source: The position that the source reports, if it does.
    """

    epoch: int
    batch: int
    batch_size: int | None
    shards: int
    source: Any = None


class LocalBatch(NamedTuple):
    """The part of a global batch that a process holds, on the host or on its devices.

    Attributes:
        rows: On the host leaves `[local replica, row, ...]`; on devices `PerReplica` leaves.
        weights: `[local replica, row]`: 1 for an example, 0 for padding; None unless batches are padded.
        examples: The number of examples in the global batch.
        position: The position after the batch.
        warning: A warning for the user, if any.
    """

    rows: PyTree
    weights: Any
    examples: int
    position: Position
    warning: str | None = None


def read_batches(
    config: InputConfig,
    share: ProcessShare,
    start: Position,
    channel: Channel | None = None,
    should_stop: Callable[[], bool] = bool,
) -> Iterator[LocalBatch]:
    """Yields all batches from `start` on.

    Args:
        config: The source and its options.
        share: The part of each batch that this process holds.
        start: The position of the first batch.
        channel: The message exchange with the other processes, if any.
        should_stop: Whether to stop waiting for them; by default `bool`, which returns False.
    """
    is_single = share.num_pipelines == 1 or in_memory_on_all(config, share)
    with contextlib.closing(ProcessBatchSync(None if is_single else channel, share, should_stop)) as sync:
        yield from _BatchReader(config, share, start, sync).read()


def element_shapes(config: InputConfig, share: ProcessShare, start: Position, channel: Channel) -> PyTree:
    """Returns the shapes of an element `[local replica, row, ...]`: a batch, or with padding a pair of a batch and its weights.

    Raises:
        ValueError: The source can be read only once, and only reading it determines the shapes.
    """
    if config.one_shot is not None:
        kind, advice = config.one_shot
        raise ValueError(
            f"The source is a {kind}, whose first batch determines the shapes, and which can be read only once. {advice}"
        )
    if isinstance(config.source, (Stream, Files)) or config.batch_size is None or config.buckets is not None:
        batches = read_batches(config, share, start, channel)
        with contextlib.closing(batches):  # pyright: ignore[reportArgumentType]
            first = next(batches)
        element = first.rows if first.weights is None else (first.rows, first.weights)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), element)
    source = config.source
    row = source.tree if isinstance(source, Arrays) else source.take(np.zeros(1, int), "")
    rows = len(share.replicas), share.rows_per_replica(config.batch_size)
    dtype = jax.dtypes.canonicalize_dtype
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*rows, *x.shape[1:]), dtype(x.dtype)), row)
    return (shapes, jax.ShapeDtypeStruct(rows, np.float32)) if config.remainder == "pad" else shapes


def in_memory_on_all(config: InputConfig, share: ProcessShare) -> bool:
    """Returns whether every process has the same arrays in memory, so that reading cannot fail on only one process."""
    return isinstance(config.source, Arrays) and (share.num_pipelines == 1 or not config.own_source)


class _BatchReader:
    """Reads the batches of one process."""

    def __init__(self, config: InputConfig, share: ProcessShare, start: Position, sync: ProcessBatchSync):
        self._config, self._share, self._start, self._sync = config, share, start, sync
        self._size = start.batch_size
        # The size in a position may come from another number of replicas.
        if self._size and config.batch_size is None:
            self._check_size(self._size, share.num_replicas)
        self._first_rows: PyTree = None  # without rows; for the comparison with later batches
        self._description: str | None = None
        self._warning: str | None = None
        self._dropped = 0
        self._short_counts: list[int] = []  # examples per shard in the first dropped batch
        self._full_weights: np.ndarray | None = None  # of a batch without partial shards: one array for all of them

    def read(self) -> Iterator[LocalBatch]:
        """Yields the batches of one epoch after the other."""
        start, epochs = self._start, self._config.epochs
        for epoch in itertools.count(start.epoch) if epochs is None else range(start.epoch, epochs):
            begin = start if epoch == start.epoch else Position(epoch, 0, self._size, start.shards)
            dropped_before, is_empty = self._dropped, True
            for batch in self._read_epoch(begin):
                is_empty = False
                yield batch._replace(warning=self._warning) if self._warning else batch
                self._warning = None
            if is_empty and begin.batch == 0:
                dropped = self._dropped - dropped_before
                problem = empty_epoch_text(self._config, epoch, dropped, self._size, self._short_counts)
                raise ValueError(f"{problem} {self._warning}" if self._warning else problem)
            if epoch == start.epoch and self._dropped and self._config.num_examples(self._share) is None:
                at_least = "at least " if len(self._short_counts) > 1 else ""
                self._config.warn(
                    f"{self._config.method} dropped {at_least}{self._dropped} examples of the first epoch, which do not fill a "
                    f'batch of {self._size}. Pass remainder="pad" to keep them.'
                )

    def _read_epoch(self, begin: Position) -> Iterator[LocalBatch]:
        readers: dict[int, ShardReader] = {}
        try:
            self._sync.run(lambda: self._open(readers, begin))
            parts = self._parts(self._size or 0, begin.shards)
            for number in itertools.count(begin.batch):
                where = batch_location(begin.epoch, number)
                blocks, rows = self._sync.run(lambda where=where: self._read_blocks(parts, readers, where))
                local_counts = {part.shard: block.examples for part, block in zip(parts, blocks, strict=True)}
                width = self._sync.run(lambda rows=rows, where=where: self._width(rows, where))
                digest = reread = None
                if isinstance(reader := readers.get(0), StreamReader):
                    digest, reread = reader.digest, functools.partial(self._reread_digest, reader, begin)
                counts, width = self._sync.exchange(
                    local_counts, width, self._description, begin.epoch, number, digest, reread
                )
                examples = sum(counts)
                if examples == 0:
                    return
                if number == 0 and 0 in counts:
                    raise ValueError(
                        f"Shard {counts.index(0)} of the {len(counts)} shards of the data contains no examples. "
                        f"{self._config.no_examples_advice}"
                    )
                if examples != self._size and self._config.remainder == "error":
                    raise ValueError(
                        f'There are only {examples} of {self._size} examples{where}, and remainder="error" allows only full '
                        'batches. Pass "drop" to drop the examples, or "pad" to pad the batch.'
                    )
                if examples != self._size and self._config.remainder == "drop":
                    self._dropped += examples
                    self._short_counts = self._short_counts or counts
                    if 0 in counts:  # a shard has ended, so later batches are not full either
                        return
                    continue
                source_state = readers[0].state() if begin.shards == 1 else None
                position = Position(begin.epoch, number + 1, self._size, begin.shards, source_state)
                weights = self._weights(blocks, is_full=examples == self._size)
                yield LocalBatch(self._join(blocks, rows, width, where), weights, examples, position)
        finally:
            for reader in readers.values():
                reader.close()

    def _reread_digest(self, reader: StreamReader, begin: Position) -> Digest | None:
        """Returns the digest of the same examples after reading them again; the same digest if that is not possible."""
        if self._config.one_shot is not None or reader.state() is not None:
            return reader.digest
        readers: dict[int, ShardReader] = {}
        try:
            self._open(readers, begin)
            self._read_blocks(self._parts(self._size or 0, begin.shards), readers, "")
            return readers[0].digest  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            for other in readers.values():
                other.close()

    def _open(self, readers: dict[int, ShardReader], begin: Position) -> None:
        """Adds to `readers` the shards that this process reads, at `begin`; determines the batch size if it is unknown."""
        config = self._config
        batches_per_block = len(self._share.replicas) if config.replica_batches else 1
        for part in self._parts(self._size or self._share.num_replicas * begin.shards, begin.shards):
            source = config.source
            if isinstance(source, Files):
                shard, shards = (0, 1) if config.own_source else (part.shard, begin.shards)
                are_batches = config.batch_size is None
                source = stream_of_files(
                    source, are_batches, config.shuffle, config.seed, shard, shards, config.buckets
                )
            if isinstance(source, Stream):
                first = begin.batch * (batches_per_block if source.are_batches else part.size)
                compares = self._share.num_pipelines > 1 and begin.shards == 1 and not config.own_source
                reader = StreamReader(
                    source, begin.epoch, first, batches_per_block, begin.source, config.buckets, compares
                )
                if self._size is None:
                    rows = source.batch_size or reader.peek_num_rows(" in the first batch")
                    self._size = self._global_size(rows, begin.shards)
            else:
                indices = ExampleOrder(len(source), config.shuffle, config.seed, part.shard).epoch(begin.epoch)
                reader = IndexedReader(source, indices, begin.batch * part.size)
            readers[part.shard] = reader

    def _global_size(self, rows: int, shards: int) -> int:
        """Returns the number of examples in a global batch where an element of the source has `rows` rows."""
        if rows == 0:
            raise ValueError(empty_epoch_text(self._config, 0, 0, None, []))
        if self._config.replica_batches:
            return rows * self._share.num_replicas
        if self._config.own_source:
            local_replicas, replicas = len(self._share.replicas), self._share.num_replicas
            self._check_size(rows, local_replicas)
            size = rows * replicas // local_replicas
            # With different numbers of replicas per process, `size` is a multiple of the replicas.
            return size if self._share.own_size(size) == rows else -(-rows // local_replicas) * replicas
        self._check_size(rows * shards, self._share.num_replicas)
        return rows * shards

    def _check_size(self, rows: int, replicas: int) -> None:
        """Raises ValueError if batches are not padded, and `replicas` does not divide `rows`."""
        if self._config.remainder != "pad":
            check_split(rows, replicas, advice=PAD_EVERY_BATCH)

    def _parts(self, size: int, shards: int) -> list[ShardRows]:
        if self._config.own_source:
            return self._share.rows_of_own_shard(size)
        return self._share.rows_of_shards(size, shards)

    def _read_blocks(
        self, parts: list[ShardRows], readers: dict[int, ShardReader], where: str
    ) -> tuple[list[ShardBlock], list[PyTree]]:
        """Returns a block of each shard, and its rows; None for a block without examples."""
        blocks = [readers[part.shard].read(part, where) for part in parts]
        return blocks, [self._checked(block.rows(), where) if block.examples else None for block in blocks]

    def _checked(self, rows: PyTree, where: str) -> PyTree:
        """Returns `rows` in dtypes that JAX uses, after the comparison with the first batch."""
        buckets = self._config.buckets
        compared = rows if buckets is None else buckets.resized(rows, 0)
        if self._first_rows is None:
            if buckets is not None:
                buckets.check_leaves(rows, where)
            self._first_rows = jax.tree.map(lambda x: np.empty((0, *x.shape[1:]), x.dtype), compared)
            self._warning = _batched_elements_warning(self._config, compared)
            self._description = f"batches of {self._size} examples of {describe_row(compared)}"
            if warning := float64_warning(rows):
                self._config.warn(warning)
        else:
            check_same_rows(self._first_rows, compared, where)
        if self._config.check is not None:
            self._config.check(rows, where)
        return canonicalize_dtypes(rows)

    def _width(self, block_rows: list[PyTree], where: str) -> int:
        """Returns the width that the rows of this process have to be padded to; 0 without buckets, or without examples."""
        buckets = self._config.buckets
        return max((buckets.width(rows, where) for rows in block_rows if rows is not None), default=0) if buckets else 0

    def _join(self, blocks: list[ShardBlock], rows: list[PyTree], width: int, where: str) -> PyTree:
        """Returns all rows of this process, ordered by shard, as leaves `[local replica, row, ...]`."""
        trees = [self._checked(b.rows(), where) if r is None else r for b, r in zip(blocks, rows, strict=True)]
        if self._config.buckets is not None:
            # A block without examples has padding only, which may be cut.
            trees = [self._config.buckets.resized(tree, width) for tree in trees]
        columns = zip(*map(jax.tree.leaves, trees), strict=True)
        arrays = [column[0] if len(column) == 1 else np.concatenate(column) for column in columns]
        return jax.tree.unflatten(jax.tree.structure(trees[0]), [self._per_replica(array) for array in arrays])

    def _weights(self, blocks: list[ShardBlock], is_full: bool) -> np.ndarray | None:
        """Returns the weights of the rows of this process; the same object for all full batches."""
        if self._config.remainder != "pad":
            return None
        if is_full and self._full_weights is not None:
            return self._full_weights
        is_example = np.concatenate([block.is_example() for block in blocks])
        weights = self._per_replica(is_example.astype(np.float32))
        if is_full:
            self._full_weights = weights
        return weights

    def _per_replica(self, array: np.ndarray) -> np.ndarray:
        replicas = len(self._share.replicas)
        rows = (len(array) // replicas,) if self._config.has_rows else ()
        return array.reshape(replicas, *rows, *array.shape[1:])


def _batched_elements_warning(config: InputConfig, rows: PyTree) -> str | None:
    """Returns a warning if the examples of a source look like batches: the first dimension of every leaf is the batch size."""
    size, source = config.batch_size, config.source
    are_batches = isinstance(source, Stream) and source.are_batches
    if size is None or are_batches or isinstance(source, Arrays):
        return None
    if any(leaf.ndim < 2 or leaf.shape[1] != size for leaf in jax.tree.leaves(rows)):
        return None
    return (
        f"Each element of the source has {size} rows ({describe_row(rows)}), and batch_size={size}: a batch has {size} such "
        f"elements, {size} x {size} rows. If the elements are batches already, pass `batch_size=None`."
    )


def empty_epoch_text(config: InputConfig, epoch: int, dropped: int, size: int | None, short_counts: list[int]) -> str:
    """Returns the message for an epoch without batches.

    Args:
        config: The source and its options.
        epoch: The epoch.
        dropped: The number of examples that `remainder="drop"` dropped.
        size: The number of examples in a global batch, if it is known.
        short_counts: The number of examples of each shard in the first dropped batch; empty for one shard.
    """
    if dropped and len(short_counts) > 1:
        return (
            f"Shard {short_counts.index(min(short_counts))} of the {len(short_counts)} shards of the data has only "
            f'{min(short_counts)} examples, which do not fill its part of a batch of {size}, and remainder="drop" drops '
            f'partial batches. {config.smaller_batch_advice}, or pass remainder="pad".'
        )
    if dropped:
        return (
            f'{dropped} examples do not fill one batch of {size}, and remainder="drop" drops partial batches. '
            f'{config.smaller_batch_advice}, or pass remainder="pad".'
        )
    if epoch:
        return f"The source yields no examples in epoch {epoch}, but did in the one before. {READ_AGAIN_ADVICE}"
    return "The source is empty: there is nothing to distribute."
