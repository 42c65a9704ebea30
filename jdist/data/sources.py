"""What people feed a step from, brought to two kinds: examples found by their numbers, and streams.

Libraries that a source may come from are never imported: who hands in an object of one has imported it.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from jdist._tree import PyTree, spec
from jdist.data.order import Order
from jdist.data.rows import as_rows, check_range, stacked

_ENDLESS = 2**40  # a `grain.MapDataset` that repeats for ever says that it has `sys.maxsize` examples


class Indexed(Protocol):
    """Examples found by their numbers."""

    in_memory: bool

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
        lends: Whether the source may write into what it gave before.
    """

    start: Callable[[int, int], Iterator[Any]]
    batches: bool
    batch_size: int | None = None
    lends: bool = False


class Arrays:
    """Arrays in host memory, with one row an example."""

    in_memory = True

    def __init__(self, tree: PyTree):
        _refuse_list_of_examples(tree)
        arrays = as_rows(tree)
        check_range(arrays)  # here, because another process may hold the rows that do not fit
        self._arrays, self._treedef = jax.tree.flatten(arrays)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def take(self, numbers: np.ndarray, where: str) -> PyTree:
        """These rows."""
        return self._treedef.unflatten([array.take(numbers, axis=0) for array in self._arrays])


class Examples:
    """A sequence that gives one example a number."""

    in_memory = False

    def __init__(self, sequence: Any):
        self._sequence = sequence

    def __len__(self) -> int:
        return len(self._sequence)

    def take(self, numbers: np.ndarray, where: str) -> PyTree:
        """These examples, stacked."""
        found = [self._sequence[number] for number in numbers.tolist()]
        for number, example in zip(numbers, found, strict=True):
            if example is None:
                raise ValueError(
                    f"Example {number} is None{where}. Where a `grain.MapDataset` filters, `to_iter_dataset()` leaves those "
                    "out."
                )
        return stacked(found, where)


class Columns:
    """A Hugging Face dataset, which gives many examples at once."""

    in_memory = False

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, numbers: np.ndarray, where: str) -> PyTree:
        """These examples, column by column."""
        return as_rows(self._dataset[numbers.tolist()], where)


def source_of(source: Any, batches: bool, shuffle: bool, seed: int) -> Indexed | Stream:
    """What `source` is.

    Args:
        source: What the user hands in.
        batches: Whether its elements are batches.
        shuffle: Whether the order is to be another in each epoch.
        seed: What that order depends on.

    Raises:
        ValueError: It is of no kind that is known, or cannot be shuffled.
    """
    if _is_tree(source) or hasattr(source, "__array__"):
        if batches:
            raise ValueError(
                "Arrays have to be cut into batches: say how many examples a batch has, as `batch_size=64`."
            )
        return Arrays(source)
    if isinstance(source, (str, bytes)):
        raise ValueError(f"The source is {source!r}. To read files, say how: `jdist.data.Files(paths, read)`.")
    if _is(source, "datasets", "Dataset"):
        return _indexed(Columns(_as_numpy(source)), batches, shuffle, seed)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        if len(source) < _ENDLESS:
            return _indexed(Examples(source), batches, shuffle, seed)
        _refuse_shuffle(shuffle, "has no end")
        return Stream(lambda epoch, first: map(source.__getitem__, itertools.count(first)), batches)
    if _is(source, "torch.utils.data", "DataLoader"):
        _refuse_shuffle(shuffle, "is a DataLoader")
        if source.batch_size is None and source.batch_sampler is None:
            return Stream(_restarted(source), batches)
        return Stream(_restarted(source), True, source.batch_size)
    if _is(source, "tensorflow.data", "Dataset"):
        source = _NumpyOfTensorflow(source)
    elif _is(source, "datasets", "IterableDataset"):
        source = source.with_format("numpy")
    if isinstance(source, Iterable):
        _refuse_shuffle(shuffle, "gives one element after the other")
        return Stream(_restarted(source), batches, lends=True)
    if callable(source):
        _refuse_shuffle(shuffle, "is a function of the step")
        return Stream(lambda epoch, first: map(source, itertools.count(first)), True, lends=True)
    raise ValueError(
        f"The source is {type(source).__name__}, from which no examples can be had. Pass arrays, a sequence or an iterable of "
        "examples, a dataset of grain, TensorFlow, torch or Hugging Face, `jdist.data.Files`, or a function of the step."
    )


def _indexed(source: Examples | Columns, batches: bool, shuffle: bool, seed: int) -> Indexed | Stream:
    if not batches:
        return source
    whole = lambda number: jax.tree.map(lambda x: x[0], source.take(np.array([number]), ""))
    order = Order(len(source), shuffle, seed)
    return Stream(lambda epoch, first: map(whole, order.epoch(epoch)[first:]), True)


def _restarted(source: Iterable[Any]) -> Callable[[int, int], Iterator[Any]]:
    """Goes through `source` again for each epoch; elements before the first wanted are read and let go."""
    once = isinstance(source, Iterator)
    begun = False

    def start(epoch: int, first: int) -> Iterator[Any]:
        nonlocal begun
        if once and begun:
            raise ValueError(
                f"The source is a {type(source).__name__}, which can be gone through once, and was. Hand in what makes it "
                "anew: an object whose `__iter__` starts at the beginning."
            )
        begun = True
        shuffling: list[Any] = [source, getattr(source, "sampler", None), getattr(source, "batch_sampler", None)]
        for part in shuffling:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        iterator = iter(source)
        next(itertools.islice(iterator, first, first), None)
        return iterator

    return start


class _NumpyOfTensorflow:
    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self._dataset.as_numpy_iterator()


def _as_numpy(dataset: Any) -> Any:
    if dataset.format["type"] is not None:
        return dataset
    return dataset.with_format("numpy", columns=dataset.format["columns"])


def _is(source: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(source, kind)


def _is_tree(source: Any) -> bool:
    if isinstance(source, Iterator):  # which JAX would rather not be asked about
        return False
    treedef = jax.tree.structure(source)
    return not (treedef.num_leaves == treedef.num_nodes == 1)


def _refuse_shuffle(shuffle: bool, why: str) -> None:
    if shuffle:
        raise ValueError(
            f"The source {why}, and shuffle=True needs examples that can be found by their numbers (`__len__` and "
            "`__getitem__`). Shuffle in the source."
        )


def _refuse_list_of_examples(source: PyTree) -> None:
    """A list of trees that look all alike may be a list of examples; read as arrays it would be mixed up in silence."""
    if not isinstance(source, list) or len(source) < 2:
        return
    like = {(jax.tree.structure(part), *(spec(x) for x in jax.tree.leaves(part))) for part in source}
    if len(like) == 1 and all(hasattr(x, "__array__") for x in jax.tree.leaves(source)):
        raise ValueError(
            f"The source is a list of {len(source)} parts that look alike: if each is an example, hand in "
            "`grain.MapDataset.source(examples)`; if each is an array of all examples, hand in a tuple of them."
        )
