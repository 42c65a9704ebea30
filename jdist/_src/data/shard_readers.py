"""Readers of one shard of the data: a block of rows per batch."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jdist._src.core.tree import PyTree
from jdist._src.data.array_rows import ExampleStack, as_rows, check_same_rows, copy_example, num_rows
from jdist._src.data.buckets import Buckets
from jdist._src.data.shards import ShardRows
from jdist._src.data.source_check import NUM_COMPARED, Digest, digest_of, digest_of_rows
from jdist._src.data.source_state import close_iterator, get_state, set_state
from jdist._src.data.sources import Examples, Indexed, Stream, is_list_of_examples, is_tree, lists_as_columns


class ShardBlock(NamedTuple):
    """The rows of one shard in one batch.

    Attributes:
        examples: The number of rows that are examples; the others are padding.
        rows: Makes the rows that this process holds, leaves `[row, ...]`.
        is_example: Returns for each row that this process holds whether it is an example, `[row]`.
    """

    examples: int
    rows: Callable[[], PyTree]
    is_example: Callable[[], np.ndarray]


class IndexedReader:
    """Reads the blocks of a shard in one epoch, sequentially: examples by their index.

    Args:
        source: The examples.
        indices: Their indices, in the order of this epoch.
        first: The number of examples to skip.
    """

    def __init__(self, source: Indexed, indices: np.ndarray, first: int):
        self._source, self._indices, self._next = source, indices, first

    def read(self, part: ShardRows, where: str) -> ShardBlock:
        """Returns the next block. Blocks after the last one do not contain examples."""
        indices = self._indices[self._next : self._next + part.size]
        self._next += part.size
        # Padding repeats the first example: its values are valid inputs, and its weight is zero.
        first = (indices if len(indices) else self._indices)[:1]
        missing = max(part.size, part.rows[-1] + 1) - len(indices)
        padded = np.concatenate([indices, np.repeat(first, missing)]) if missing else indices
        rows = lambda: self._source.take(padded[part.rows], where)
        return ShardBlock(len(indices), rows, lambda: part.rows < len(indices))

    def state(self) -> Any:
        """Returns None: the position is determined by the batch number."""
        return None

    def close(self) -> None:
        """Does nothing."""


class StreamReader:
    """Reads the blocks of a shard in one epoch, sequentially: a stream of examples or of batches.

    Args:
        source: The stream.
        epoch: The epoch.
        first: The number of elements to skip.
        batches_per_block: The number of the stream's batches per block; each fills its own part of the block.
        state: The position of the source, which replaces skipping.
        buckets: The widths of examples of different width, if they are padded.
        compares: Whether to compute the digest of the first examples.

    Attributes:
        digest: The digest of the first examples of the first block that was read, until the next one; None unless `compares`.
    """

    digest: Digest | None

    def __init__(
        self,
        source: Stream,
        epoch: int,
        first: int,
        batches_per_block: int = 1,
        state: Any = None,
        buckets: Buckets | None = None,
        compares: bool = False,
    ):
        self._source, self._epoch, self._batches_per_block = source, epoch, batches_per_block
        self.digest, self._compares = None, compares
        self._buckets = buckets
        self._elements = source.start(epoch, first if state is None else 0)
        if state is not None:
            set_state(self._elements, state)
        self._peeked: list[PyTree] = []
        self._ended = False
        self._example: PyTree = None  # an example or a batch for padding

    def peek_num_rows(self, where: str) -> int:
        """Returns the number of rows of the next batch; 0 at the end."""
        self._peeked = [self._as_batch(element, where) for element in self._next_elements(1)]
        return num_rows(self._peeked[0]) if self._peeked else 0

    def read(self, part: ShardRows, where: str) -> ShardBlock:
        """Returns the next block. Blocks after the last one do not contain examples."""
        return self._read_batches(part, where) if self._source.are_batches else self._read_examples(part, where)

    def state(self) -> Any:
        """Returns the position of the source as JSON-able data, or None if the source does not report it."""
        return get_state(self._elements)

    def close(self) -> None:
        """Closes the iterator of the source if it can be closed."""
        close_iterator(self._elements)

    def _next_elements(self, count: int) -> Iterator[PyTree]:
        """Yields up to `count` elements. `next` is not called again after the end: some iterators would restart."""
        while count and not self._ended:
            try:
                element = next(self._elements)
            except StopIteration:
                self._ended = True
                return
            yield element
            count -= 1

    def _read_examples(self, part: ShardRows, where: str) -> ShardBlock:
        is_local = np.zeros(part.size, bool)
        is_local[part.rows[part.rows < part.size]] = True
        stack, count = ExampleStack(where, self._buckets), 0
        compared: list[PyTree] = []
        for example in self._next_elements(part.size):
            if count == 0:
                self._example = copy_example(example, where)
            if self._compares and count < NUM_COMPARED:
                compared.append(copy_example(example, where))
            if is_local[count]:
                stack.add(example)
            count += 1
        self.digest = digest_of(compared) if self._compares else None
        self._compares = False

        def rows() -> PyTree:
            for _ in range(len(part.rows) - len(stack)):
                stack.add(self._padding())
            return stack.stacked()

        return ShardBlock(count, rows, lambda: part.rows < count)

    def _read_batches(self, part: ShardRows, where: str) -> ShardBlock:
        size = part.size // self._batches_per_block
        elements = self._next_elements(self._batches_per_block - len(self._peeked))
        batches = [*self._peeked, *(self._as_batch(element, where) for element in elements)]
        self._peeked = []
        counts = [num_rows(batch) for batch in batches]
        for count in counts:
            if not 0 < count <= size or (self._source.endless and count < size):
                raise ValueError(
                    f"The source yields a batch of {count} rows{where}, expected {size} rows. Only the last batches of an "
                    "epoch may have fewer, and at least one."
                )
        self._example = batches[0] if batches else self._example
        self.digest = digest_of_rows(batches[0]) if self._compares and batches else None
        self._compares = False
        missing = self._batches_per_block - len(batches)
        # With one batch per block, the block may have further rows for padding.
        num_rows_padded = size if self._batches_per_block > 1 else max(size, part.rows[-1] + 1)

        def rows() -> PyTree:
            padded = [_pad(batch, num_rows_padded) for batch in batches + [self._padding()] * missing]
            if len(padded) == 1 and len(part.rows) == num_rows_padded:
                return padded[0]
            for batch in padded:
                check_same_rows(padded[0], batch, where)
            return jax.tree.map(lambda *arrays: np.concatenate(arrays)[part.rows], *padded)

        all_counts = counts + [0] * missing
        is_example = lambda: np.concatenate([np.arange(num_rows_padded) < count for count in all_counts])[part.rows]
        return ShardBlock(sum(counts), rows, is_example)

    def _as_batch(self, element: PyTree, where: str) -> PyTree:
        if is_list_of_examples(element, self._buckets) and is_tree(element[0]):
            return Examples(element, self._buckets).take(np.arange(len(element)), where)
        element = lists_as_columns(element, where)
        element = element if self._buckets is None else self._buckets.as_arrays(element)
        rows = as_rows(element, where, self._source.advice)
        return jax.tree.map(np.array, rows) if self._source.reuses_buffers else rows

    def _padding(self) -> PyTree:
        if self._example is None:  # the reader started after the end of this shard
            first = next(self._source.start(self._epoch, 0))
            self._example = self._as_batch(first, "") if self._source.are_batches else copy_example(first)
        return self._example


ShardReader: TypeAlias = IndexedReader | StreamReader


def _pad(rows: PyTree, size: int) -> PyTree:
    """Returns `rows` padded to `size` rows with their first row."""

    def pad(array: np.ndarray) -> np.ndarray:
        missing = size - len(array)
        return np.concatenate([array, np.repeat(array[:1], missing, axis=0)]) if missing else array

    return jax.tree.map(pad, rows)
