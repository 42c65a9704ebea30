"""Recognition of sources: converts the object that the user passes to an `Indexed` source or a `Stream`.

No data library is imported: a user who passes an object of a library has imported the library.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jdist._src.core.tree import PyTree, dtype_and_shape, one_line, short_line, supports_array
from jdist._src.data.array_rows import STACK_EXAMPLES
from jdist._src.data.buckets import Buckets
from jdist._src.data.files import Files
from jdist._src.data.shuffle import ExampleOrder
from jdist._src.data.source_iterators import (
    CallableIterable,
    is_instance,
    one_shot_advice,
    restart_each_epoch,
    samplers,
)
from jdist._src.data.sources import (
    Arrays,
    Columns,
    Examples,
    Indexed,
    Stream,
    Table,
    columns_as_arrays,
    indexed_batches,
    is_list_of_examples,
    is_ragged,
    is_tree,
    lists_as_columns,
)
from jdist._src.values.base import is_distributed

_ENDLESS = 2**40  # an endlessly repeated `grain.MapDataset` reports `sys.maxsize` examples
_CHUNK = 256  # examples read from a file per call


def source_of(
    source: Any, are_batches: bool, shuffle: bool, seed: int, buckets: Buckets | None = None
) -> Indexed | Stream:
    """Returns the source that the user passes as one of the two kinds of sources.

    Args:
        source: The object that the user passes.
        are_batches: Whether its elements are batches.
        shuffle: Whether each epoch has its own order.
        seed: The seed of that order.
        buckets: The widths of examples of different width, if they are padded.

    Raises:
        ValueError: The source is not recognized, or cannot be shuffled.
    """
    if are_batches and _is_list_of_batches(source):
        return indexed_batches(source.__getitem__, ExampleOrder(len(source), shuffle, seed))
    if not are_batches and is_list_of_examples(source, buckets):
        return Examples(source, buckets)
    source = source if are_batches else lists_as_columns(source)
    if is_tree(source) or supports_array(source):
        _check_arrays(source, are_batches)
        return Columns(Table(source), buckets) if buckets is not None and is_ragged(source) else Arrays(source)
    if isinstance(source, (str, bytes)):
        raise ValueError(f"The source is {one_line(source)}. To read files, pass `jdist.data.Files(paths, read)`.")
    if isinstance(source, Mapping):
        raise ValueError(
            f"The source is a {type(source).__name__} with the keys {short_line(', '.join(map(repr, source)))}. Pass one of "
            "its values; or, if they are arrays of the same examples, `dict(source)`."
        )
    if is_instance(source, "datasets", "Dataset"):
        dataset = _with_numpy_format(source)
        if are_batches:
            get = lambda index: columns_as_arrays(dataset[index])
            return indexed_batches(get, ExampleOrder(len(dataset), shuffle, seed))
        return Columns(dataset, buckets)
    if is_instance(source, "torch", "utils.data.DataLoader"):
        _refuse_shuffle(shuffle, "is a DataLoader")
        return _torch_loader(source, are_batches)
    # A torch `IterableDataset` has a `__getitem__` that raises.
    is_torch_stream = is_instance(source, "torch", "utils.data.IterableDataset")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not is_torch_stream:
        if len(source) < _ENDLESS:
            if are_batches:
                return indexed_batches(source.__getitem__, ExampleOrder(len(source), shuffle, seed))
            return Examples(source, buckets)
        _refuse_shuffle(shuffle, "is endless")
        start = lambda epoch, first: map(source.__getitem__, itertools.count(first))
        return Stream(start, are_batches, reuses_buffers=True, endless=True)
    if isinstance(source, Iterable):
        _refuse_shuffle(shuffle, "yields its elements sequentially")
        reads_ahead = is_instance(source, "grain", "IterDataset") or is_instance(source, "grain", "DataLoader")
        start = restart_each_epoch(_with_numpy_elements(source))
        if are_batches and is_instance(source, "datasets", "IterableDataset"):
            elements = start
            start = lambda epoch, first: map(columns_as_arrays, elements(epoch, first))
        return Stream(
            start, are_batches, reuses_buffers=True, reads_ahead=reads_ahead, one_shot=one_shot_advice(source)
        )
    if callable(source) and _makes_elements(source):
        _refuse_shuffle(shuffle, "is a generator function")
        return Stream(restart_each_epoch(CallableIterable(source, _as_elements)), are_batches, reuses_buffers=True)
    if callable(source):
        _refuse_shuffle(shuffle, "is a function of the step")
        start = lambda epoch, first: map(source, itertools.count(first))
        return Stream(start, True, reuses_buffers=True, endless=True)
    raise ValueError(
        f"The source is {type(source).__name__}, which is not supported. Pass arrays, a sequence or an iterable of examples, a "
        "dataset of grain, TensorFlow, torch or Hugging Face, `jdist.data.Files`, a generator function without arguments, or a "
        "function of the step."
    )


def stream_of_files(
    files: Files, are_batches: bool, shuffle: bool, seed: int, shard: int, shards: int, buckets: Buckets | None = None
) -> Stream:
    """Returns the elements of the files `shard`, `shard + shards`, ... as one stream."""

    def start(epoch: int, first: int) -> Iterator[Any]:
        order = ExampleOrder(len(files.paths), shuffle, seed).epoch(epoch)
        for number in order[shard::shards].tolist():
            try:
                source = source_of(files.read(files.paths[number]), are_batches, shuffle, seed, buckets)
                if isinstance(source, Stream) and source.are_batches and not are_batches:
                    raise ValueError("`read` returns batches, not examples. Pass `batch_size=None`.")
                if isinstance(source, Stream):
                    for element in source.start(epoch, 0):
                        if first == 0:
                            yield element
                        first = max(0, first - 1)
                else:
                    # Shard numbers after the number of files, because shard 0 is the order of the files.
                    indices = ExampleOrder(len(source), shuffle, seed, len(files.paths) + number).epoch(epoch)[first:]
                    # Each example has its own width: in a chunk they would be padded to the largest one.
                    yield from _take_in_chunks(source, indices, _CHUNK if buckets is None else 1)
                    first = max(0, first - len(source))
            except Exception as error:
                error.add_note(f"while reading {files.paths[number]}")
                raise

    return Stream(start, are_batches, reuses_buffers=True)


def _take_in_chunks(source: Indexed, indices: np.ndarray, size: int) -> Iterator[Any]:
    for start in range(0, len(indices), size):
        chunk = indices[start : start + size]
        rows = source.take(chunk, "")
        yield from (jax.tree.map(lambda array, i=i: array[i], rows) for i in range(len(chunk)))


def _is_list_of_batches(source: Any) -> bool:
    """Returns whether `source` is a list of trees of arrays, such as `[(x, y), (x, y)]`: not a list of single arrays."""
    if not isinstance(source, list) or not source:
        return False
    leaves = jax.tree.leaves(source, is_leaf=is_distributed)
    are_arrays = all(supports_array(leaf) and not is_distributed(leaf) for leaf in leaves)
    return are_arrays and all(is_tree(batch) and jax.tree.leaves(batch) for batch in source)


def _check_arrays(source: PyTree, are_batches: bool) -> None:
    """Checks a tree of arrays that is passed as a source.

    Raises:
        ValueError: Its leaves are distributed already, it may be a list of examples or of batches, or it is not in batches.
    """
    if any(map(is_distributed, jax.tree.leaves(source, is_leaf=is_distributed))):
        raise ValueError("The source is distributed over the devices of a strategy already. Pass the original data.")
    if are_batches:
        hint = " If the source is a list of batches, pass `lambda: iter(batches)`." if isinstance(source, list) else ""
        raise ValueError(
            f"The source consists of arrays, which are split into batches. Pass the number of examples per batch: "
            f"`batch_size=64`.{hint}"
        )
    _check_lists(source)
    # A list whose elements look alike may be a list of examples. Read as arrays, examples and leaves would be swapped silently.
    if not isinstance(source, list) or len(source) < 2:
        return
    specs = {(jax.tree.structure(part), *map(dtype_and_shape, jax.tree.leaves(part))) for part in source}
    if len(specs) == 1 and all(map(supports_array, jax.tree.leaves(source))):
        raise ValueError(
            f"The source is a list of {len(source)} elements with equal dtypes and shapes, which is ambiguous. If each element "
            "is a batch, pass `batch_size=None`. If each element is an array of all examples, pass a tuple of the elements. "
            f"{STACK_EXAMPLES}."
        )


def _check_lists(source: PyTree) -> None:
    """Checks a source that consists of lists of arrays with equal shapes, of more arrays than these arrays have rows.

    Raises:
        ValueError: The lists may be columns.
    """
    columns = jax.tree.leaves(source, is_leaf=lambda node: isinstance(node, list) and node is not source)
    if isinstance(source, list) or not columns or not all(isinstance(column, list) for column in columns):
        return
    shapes = [(len(column), *set(map(np.shape, jax.tree.leaves(column)))) for column in columns]
    if all(len(shape) == 2 and shape[1] and shape[0] > shape[1][0] for shape in shapes):
        raise ValueError(
            f"The source consists of lists of {shapes[0][0]} arrays with equal shapes, which is ambiguous. If each list is a "
            "column with one value per example, pass an array: `np.stack(values)`. If each element is an array of all "
            "examples, pass tuples instead of lists."
        )


def _with_numpy_elements(source: Iterable[Any]) -> Iterable[Any]:
    """Returns an iterable of arrays that numpy can read, where the library yields other objects by default."""
    if is_instance(source, "tensorflow", "data.Dataset"):
        return CallableIterable(source.as_numpy_iterator)  # pyright: ignore[reportAttributeAccessIssue]
    if not is_instance(source, "datasets", "IterableDataset"):
        return source
    # numpy has no bfloat16, so torch tensors stay as they are.
    is_torch = getattr(getattr(source, "_formatting", None), "format_type", None) == "torch"
    return source if is_torch else source.with_format("numpy")  # pyright: ignore


def _makes_elements(function: Callable[..., Any]) -> bool:
    """Returns True for a function without arguments that makes an iterable, False for a function of the step.

    Raises:
        ValueError: Its arguments fit neither.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions do not have a signature
        return False
    is_generator = any(map(inspect.isgeneratorfunction, (function, type(function).__call__)))
    if is_generator and not _accepts(signature):
        raise ValueError(
            f"The source is a generator function with the arguments {signature}, but it is called without arguments. Bind them "
            "with `functools.partial`. Or pass a function of the step, which returns one batch and does not use `yield`."
        )
    if is_generator or _accepts(signature, 0):
        return is_generator
    if not _accepts(signature):
        raise ValueError(
            f"The source is a function with the arguments {signature}. Pass a function of the step, with one argument, or a "
            "generator function, without arguments. Bind further arguments with `functools.partial`."
        )
    return True


def accepts_one(function: Callable[..., Any]) -> bool:
    """Returns whether a function accepts one positional argument; True if it does not have a signature."""
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


def _as_elements(result: Any) -> Iterable[Any]:
    """Returns the result of a function without arguments as an iterable of elements.

    Raises:
        ValueError: It is not an iterable of elements.
    """
    if is_single(result) or not isinstance(result, Iterable):
        raise ValueError(
            f"The source is a function without arguments that returned {dtype_and_shape(result)}. Such a function must return "
            "an iterator over the elements, as a generator function does. Pass arrays directly, without a function. A function "
            "of the step has one argument."
        )
    return _with_numpy_elements(result)


def is_single(result: Any) -> bool:
    """Returns whether `result` is an array, a tree other than a list, or text: one element, not a series of elements."""
    if isinstance(result, (str, bytes, Mapping)) or supports_array(result):
        return True
    return not isinstance(result, list) and is_tree(result)


def _torch_loader(loader: Any, are_batches: bool) -> Stream:
    names = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
    is_random = lambda sampler: any(is_instance(sampler, "torch", f"utils.data.{name}") for name in names)
    repeatable = not any(map(is_random, samplers(loader)))
    start = restart_each_epoch(loader)
    if loader.batch_size is None and loader.batch_sampler is None:
        return Stream(start, are_batches, reuses_buffers=True, repeatable=repeatable)
    return Stream(start, True, loader.batch_size, repeatable=repeatable)


def _with_numpy_format(dataset: Any) -> Any:
    if dataset.format["type"] is not None:
        return dataset
    # dtype=None keeps the dtypes of the columns.
    return dataset.with_format("numpy", columns=dataset.format["columns"], dtype=None)


def _refuse_shuffle(shuffle: bool, source_property: str) -> None:
    if shuffle:
        raise ValueError(
            f"The source {source_property}, but shuffle=True needs examples with an index (`__len__` and `__getitem__`). "
            "Shuffle in the source."
        )
