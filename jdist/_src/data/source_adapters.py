"""Which kind of source an object is.

The libraries that it may come from are never imported: who hands in an object of one has imported it.
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.data.shuffle import ExampleOrder
from jdist._src.data.sources import Arrays, Called, Columns, Examples, Indexed, Stream, by_number, restarted, shufflers
from jdist._src.values.base import is_distributed

_ENDLESS = 2**40  # a `grain.MapDataset` that repeats for ever says that it has `sys.maxsize` examples


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
        _refuse_list_of_examples(source)
        if batches:
            raise ValueError(
                "Arrays have to be cut into batches: say how many examples a batch has, as `batch_size=64`."
            )
        return Arrays(source)
    if isinstance(source, (str, bytes)):
        raise ValueError(f"The source is {source!r}. To read files, say how: `jdist.data.Files(paths, read)`.")
    if isinstance(source, Mapping):
        raise ValueError(
            f"The source is a {type(source).__name__} of {', '.join(map(repr, source))}. Hand in one of them; or, if they are "
            "arrays of the same examples, `dict(source)`."
        )
    if _is(source, "datasets", "Dataset"):
        found = Columns(_as_numpy(source))
        return by_number(found, ExampleOrder(len(found), shuffle, seed)) if batches else found
    if _is(source, "torch", "utils.data.DataLoader"):
        _refuse_shuffle(shuffle, "is a DataLoader")
        return _loader(source, batches)
    iterable = _is(source, "torch", "utils.data.IterableDataset")  # which has `__getitem__`, and refuses it
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not iterable:
        if len(source) < _ENDLESS:
            found = Examples(source)
            return by_number(found, ExampleOrder(len(found), shuffle, seed)) if batches else found
        _refuse_shuffle(shuffle, "has no end")
        start = lambda epoch, first: map(source.__getitem__, itertools.count(first))
        return Stream(start, batches, lends=True, endless=True)
    if isinstance(source, Iterable):
        _refuse_shuffle(shuffle, "gives one element after the other")
        reads_ahead = _is(source, "grain", "IterDataset") or _is(source, "grain", "DataLoader")
        return Stream(restarted(_iterable(source)), batches, lends=True, reads_ahead=reads_ahead)
    if callable(source) and _makes_elements(source):
        _refuse_shuffle(shuffle, "is a generator function")
        return Stream(restarted(Called(source, _elements)), batches, lends=True)
    if callable(source):
        _refuse_shuffle(shuffle, "is a function of the step")
        start = lambda epoch, first: map(source, itertools.count(first))
        return Stream(start, True, lends=True, endless=True)
    raise ValueError(
        f"The source is {type(source).__name__}, from which no examples can be had. Pass arrays, a sequence or an iterable of "
        "examples, a dataset of grain, TensorFlow, torch or Hugging Face, `jdist.data.Files`, a generator function without "
        "arguments, or a function of the step."
    )


def _iterable(source: Iterable[Any]) -> Iterable[Any]:
    """Returns an iterable that gives numpy arrays where the library has other arrays by default."""
    if _is(source, "tensorflow", "data.Dataset"):
        return _NumpyOfTensorflow(source)
    return source.with_format("numpy") if _is(source, "datasets", "IterableDataset") else source  # pyright: ignore


def _makes_elements(function: Callable[..., Any]) -> bool:
    """Returns True for a function without arguments that makes an iterable, False for a function of the step.

    Raises:
        ValueError: It is neither, by its arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return False
    generates = any(map(inspect.isgeneratorfunction, (function, type(function).__call__)))
    if generates and not _accepts(signature):
        raise ValueError(
            f"The source is a generator function with the arguments {signature}. It is called without arguments: bind them by "
            "`functools.partial`. Or pass a function of the step, which returns one batch and has no `yield`."
        )
    if generates or _accepts(signature, 0):
        return generates
    if not _accepts(signature):
        raise ValueError(
            f"The source is a function with the arguments {signature}. Pass a function of the step, with one argument, or a "
            "generator function, without arguments. Bind the others by `functools.partial`."
        )
    return True


def accepts_one(function: Callable[..., Any]) -> bool:
    """Whether a function may be called with one positional argument, as far as it has a signature."""
    try:
        return _accepts(inspect.signature(function), 0)
    except (TypeError, ValueError):
        return True


def _accepts(signature: inspect.Signature, *args: Any) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _elements(result: Any) -> Iterable[Any]:
    """Returns the elements that a function without arguments made, as an iterable.

    Raises:
        ValueError: It is not an iterable of elements.
    """
    if is_single(result) or not isinstance(result, Iterable):
        raise ValueError(
            f"The source is a function without arguments, and returned {dtype_and_shape(result)}. Such a function returns an iterator "
            "over the elements, as a generator function does. Pass arrays without a function. A function of the step has one "
            "argument."
        )
    return _iterable(result)


def is_single(result: Any) -> bool:
    """Whether the result of a function is an array, a tree other than a list, or text: not a series of elements."""
    if isinstance(result, (str, bytes, Mapping)) or hasattr(result, "__array__"):
        return True
    return not isinstance(result, list) and _is_tree(result)


def _loader(loader: Any, batches: bool) -> Stream:
    """A torch `DataLoader`."""
    samplers = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
    repeats = not any(_is(part, "torch", f"utils.data.{name}") for part in shufflers(loader) for name in samplers)
    if loader.batch_size is None and loader.batch_sampler is None:
        return Stream(restarted(loader), batches, lends=True, repeats=repeats)
    return Stream(restarted(loader), True, loader.batch_size, repeats=repeats)


class _NumpyOfTensorflow:
    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self._dataset.as_numpy_iterator()


def _as_numpy(dataset: Any) -> Any:
    if dataset.format["type"] is not None:
        return dataset
    return dataset.with_format("numpy", columns=dataset.format["columns"], dtype=None)  # None: those of the columns


def _is(source: Any, library: str, name: str) -> bool:
    loaded = sys.modules.get(library)
    kind = loaded and functools.reduce(lambda part, name: getattr(part, name, None), name.split("."), loaded)
    return isinstance(kind, type) and isinstance(source, kind)


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
    if any(map(is_distributed, jax.tree.leaves(source, is_leaf=is_distributed))):
        raise ValueError("The source lies on the devices of a strategy already. Hand in what it was made from.")
    if not isinstance(source, list) or len(source) < 2:
        return
    like = {(jax.tree.structure(part), *(dtype_and_shape(x) for x in jax.tree.leaves(part))) for part in source}
    if len(like) == 1 and all(hasattr(x, "__array__") for x in jax.tree.leaves(source)):
        raise ValueError(
            f"The source is a list of {len(source)} parts that look alike: if each is an example, hand in "
            "`grain.MapDataset.source(examples)`; if each is an array of all examples, hand in a tuple of them."
        )
