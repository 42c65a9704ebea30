"""One shard of the data, a block of rows a batch."""

import base64
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jdist._src.core.tree import PyTree
from jdist._src.data.array_rows import Stack, as_rows, check_alike, kept, num_rows
from jdist._src.data.shards import ShardRows
from jdist._src.data.sources import Indexed, Stream


class ShardBlock(NamedTuple):
    """What one shard has for one batch.

    Attributes:
        examples: How many of its rows are examples; the others only fill up.
        rows: Makes the rows that this process holds, leaves `[row, ...]`.
        valid: Says which of all the rows are examples, `[row]`.
    """

    examples: int
    rows: Callable[[], PyTree]
    valid: Callable[[], np.ndarray]


class ShardReader(Protocol):
    """The blocks of a shard in one epoch, one after the other."""

    def read(self, part: ShardRows, where: str) -> ShardBlock:
        """The next block. After the last one all are without examples."""
        ...

    def state(self) -> Any:
        """Where the source is, if it can say so, as JSON-able data."""
        ...

    def close(self) -> None:
        """Lets the source go."""
        ...


class IndexedReader:
    """Blocks of examples found by their numbers.

    Args:
        source: The examples.
        numbers: Their numbers, in the order of this epoch.
        first: How many of them to leave out.
    """

    def __init__(self, source: Indexed, numbers: np.ndarray, first: int):
        self._source, self._numbers, self._next = source, numbers, first

    def read(self, part: ShardRows, where: str) -> ShardBlock:
        """The next block."""
        numbers = self._numbers[self._next : self._next + part.size]
        self._next += part.size
        # A row that fills up repeats the first example: its values are harmless, its weight is zero.
        first = (numbers if len(numbers) else self._numbers)[:1]
        missing = part.size - len(numbers)
        filled = np.concatenate([numbers, np.repeat(first, missing)]) if missing else numbers
        rows = lambda: self._source.take(filled[part.rows], where)
        return ShardBlock(len(numbers), rows, lambda: np.arange(part.size) < len(numbers))

    def state(self) -> Any:
        """None: the number of the batch says it all."""
        return None

    def close(self) -> None:
        """Nothing is open."""


class StreamReader:
    """Blocks of what a stream gives: of its examples, or of its batches.

    Args:
        source: The stream.
        epoch: Which epoch.
        first: How many elements of it to leave out.
        pieces: How many of the stream's batches make a block; each fills its own part of the block.
        state: Where the source said that it was then, instead of leaving out.
    """

    def __init__(self, source: Stream, epoch: int, first: int, pieces: int = 1, state: Any = None):
        self._source, self._epoch, self._pieces = source, epoch, pieces
        self._elements = source.start(epoch, first if state is None else 0)
        if state is not None:
            set_state(self._elements, state)
        self._peeked: list[PyTree] = []
        self._ended = False
        self._example: PyTree = None  # an element to fill up with

    def rows_of_first(self, where: str) -> int:
        """How many rows the batch has that comes next; 0 if none does."""
        self._peeked = [self._batch(element, where) for element in self._next(1)]
        return num_rows(self._peeked[0]) if self._peeked else 0

    def read(self, part: ShardRows, where: str) -> ShardBlock:
        """The next block."""
        return self._of_batches(part, where) if self._source.batches else self._of_examples(part, where)

    def state(self) -> Any:
        """What the iterator says of itself."""
        return get_state(self._elements)

    def close(self) -> None:
        """Closes the iterator, if it can be closed."""
        if hasattr(self._elements, "close"):
            self._elements.close()  # pyright: ignore[reportAttributeAccessIssue]

    def _next(self, count: int) -> Iterator[PyTree]:
        """The next elements. One that has ended is not asked again: it might begin anew."""
        while count and not self._ended:
            try:
                element = next(self._elements)
            except StopIteration:
                self._ended = True
                return
            yield element
            count -= 1

    def _of_examples(self, part: ShardRows, where: str) -> ShardBlock:
        wanted = np.zeros(part.size, bool)
        wanted[part.rows] = True
        stack, count = Stack(where), 0
        for example in self._next(part.size):
            if count == 0:
                self._example = kept(example, where)
            if wanted[count]:
                stack.add(example)
            count += 1

        def rows() -> PyTree:
            for _ in range(len(part.rows) - len(stack)):
                stack.add(self._filler())
            return stack.rows()

        return ShardBlock(count, rows, lambda: np.arange(part.size) < count)

    def _of_batches(self, part: ShardRows, where: str) -> ShardBlock:
        size = part.size // self._pieces
        read = (self._batch(element, where) for element in self._next(self._pieces - len(self._peeked)))
        batches, self._peeked = [*self._peeked, *read], []
        counts = [num_rows(batch) for batch in batches]
        for count in counts:
            if not 0 < count <= size or (self._source.endless and count < size):
                raise ValueError(
                    f"The source gives a batch of {count} rows{where}, where batches of {size} rows are expected. Only the "
                    "last ones of an epoch may have fewer, and at least one."
                )
        self._example = batches[0] if batches else self._example
        missing = self._pieces - len(batches)

        def rows() -> PyTree:
            whole = [_filled(batch, size) for batch in batches + [self._filler()] * missing]
            if len(whole) == 1 and len(part.rows) == size:
                return whole[0]
            for piece in whole:
                check_alike(whole[0], piece, where)
            return jax.tree.map(lambda *pieces: np.concatenate(pieces)[part.rows], *whole)

        each = counts + [0] * missing
        return ShardBlock(sum(counts), rows, lambda: np.concatenate([np.arange(size) < count for count in each]))

    def _batch(self, element: PyTree, where: str) -> PyTree:
        rows = as_rows(element, where, self._source.if_not_batched)
        return jax.tree.map(np.array, rows) if self._source.lends else rows

    def _filler(self) -> PyTree:
        if self._example is None:  # begun behind the end of this shard
            first = next(self._source.start(self._epoch, 0))
            self._example = as_rows(first) if self._source.batches else kept(first)
        return self._example


def get_state(iterator: Iterator[Any]) -> Any:
    """The position of an iterator that has one, as JSON-able data, or None."""
    if not (hasattr(iterator, "get_state") and hasattr(iterator, "set_state")):
        return None
    state = iterator.get_state()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"value": copy.deepcopy(state)}  # which the source may go on to change


def check_state(state: Any) -> None:
    """Raises ValueError if `state` is not the position of a source, as `get_state` returns it."""
    is_position = isinstance(state, Mapping) and ("base64" in state or "value" in state)
    if state is not None and not is_position:
        raise ValueError(
            f"The position has source={state!r}, which is not the position of a source. Pass it unchanged."
        )


def set_state(iterator: Iterator[Any], state: Any) -> None:
    """Brings an iterator to where `get_state` said that it was."""
    if not hasattr(iterator, "set_state"):
        raise ValueError(
            f"The position contains a position of the source, and this source ({type(iterator).__name__}) has no `set_state`. "
            "Resume with the source that the position was taken with."
        )
    given = base64.b64decode(state["base64"]) if "base64" in state else copy.deepcopy(state["value"])
    iterator.set_state(given)  # pyright: ignore[reportAttributeAccessIssue]


def _filled(rows: PyTree, size: int) -> PyTree:
    def one(array: np.ndarray) -> np.ndarray:
        missing = size - len(array)
        return np.concatenate([array, np.repeat(array[:1], missing, axis=0)]) if missing else array

    return jax.tree.map(one, rows)
