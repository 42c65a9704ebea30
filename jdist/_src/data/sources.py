"""What examples come from: some have numbers, and others come one after the other. There is no third kind."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from jdist._src.core.tree import PyTree
from jdist._src.data.array_rows import Stack, as_rows, check_ranges
from jdist._src.data.shuffle import ExampleOrder


class Indexed(Protocol):
    """Examples found by their numbers."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def take(self, numbers: np.ndarray, where: str) -> PyTree:
        """These examples, leaves `[example, ...]`, in memory of their own."""
        ...


@dataclasses.dataclass(frozen=True)
class Stream:
    """Elements one after the other, gone through anew in each epoch.

    Attributes:
        start: From the number of the epoch, and that of the first element wanted, to the elements.
        batches: Whether an element is a batch, and not an example.
        batch_size: How many examples a batch has, where the source says so.
        lends: Whether the source may write into a batch that it gave before.
        endless: Whether it has no end, and so no partial batch.
        repeats: Whether an epoch that is begun again comes in the same order.
        reads_ahead: Whether the source has threads or processes of its own that read ahead.
        if_not_batched: What to do where an element has to be a batch, and its leaves have no rows.
    """

    start: Callable[[int, int], Iterator[Any]]
    batches: bool
    batch_size: int | None = None
    lends: bool = False
    endless: bool = False
    repeats: bool = True
    reads_ahead: bool = False
    if_not_batched: str = "If it is an example and no batch, say how many make one: `batch_size=64`"


class Arrays:
    """Arrays in host memory, with one row an example."""

    def __init__(self, tree: PyTree):
        arrays = as_rows(tree)
        check_ranges(arrays)  # here, because another process may hold the rows that do not fit
        self._arrays, self._treedef = jax.tree.flatten(arrays)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def take(self, numbers: np.ndarray, where: str) -> PyTree:
        """These rows."""
        return self._treedef.unflatten([array.take(numbers, axis=0) for array in self._arrays])


class Examples:
    """A sequence that gives one example a number."""

    def __init__(self, sequence: Any):
        self._sequence = sequence

    def __len__(self) -> int:
        return len(self._sequence)

    def take(self, numbers: np.ndarray, where: str) -> PyTree:
        """These examples, stacked."""
        stack = Stack(where)
        for number in numbers.tolist():
            example = self._sequence[number]
            if example is None:
                raise ValueError(
                    f"Example {number} is None{where}. Where a `grain.MapDataset` filters, `to_iter_dataset()` leaves those "
                    "out."
                )
            stack.add(example)
        return stack.rows()


class Columns:
    """A Hugging Face dataset, which gives many examples at once."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, numbers: np.ndarray, where: str) -> PyTree:
        """These examples, column by column."""
        return as_rows(self._dataset[numbers.tolist()], where)


def by_number(source: Indexed, order: ExampleOrder) -> Stream:
    """A stream of the batches that have these numbers."""
    batch = lambda number: jax.tree.map(lambda x: x[0], source.take(np.array([number]), ""))
    return Stream(lambda epoch, first: map(batch, order.epoch(epoch)[first:]), True)


READ_AGAIN = (
    "Pass a source that can be read again: a generator function without arguments, or an object whose `__iter__` starts at "
    "the beginning."
)


class Called:
    """An iterable that calls a function for a new iterator each time.

    Args:
        make: A function without arguments that returns an iterable.
        convert: Converts the result of `make` to an iterable of elements.
    """

    def __init__(self, make: Callable[[], Any], convert: Callable[[Any], Iterable[Any]]):
        self._make, self._convert = make, convert

    def __iter__(self) -> Iterator[Any]:
        return iter(self._convert(self._make()))


def restarted(source: Iterable[Any]) -> Callable[[int, int], Iterator[Any]]:
    """Goes through `source` again for each epoch; elements before the first wanted are read and let go."""
    once = isinstance(source, Iterator)
    begun = False

    def start(epoch: int, first: int) -> Iterator[Any]:
        nonlocal begun
        if once and begun:
            raise ValueError(
                f"The source is a {type(source).__name__}, which can be gone through once, and was. {READ_AGAIN}"
            )
        begun = True
        for part in shufflers(source):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        iterator = iter(source)
        next(itertools.islice(iterator, first, first), None)
        return iterator

    return start


def shufflers(source: Any) -> list[Any]:
    """What may choose the order: the source, or in torch its samplers."""
    batch_sampler = getattr(source, "batch_sampler", None)
    return [source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
