"""Iterators over the iterables that users pass, from the beginning in each epoch.

Several iterators may be open at the same time, as those of a loop that was left early and of a validation, and each reads
ahead in its own thread. Some libraries store the position in the object that is iterated over, so a second iterator would
move the first one. Each iterator reads a copy of such an object. If it cannot be copied, the first iterator ends with an error.
"""

import copy
import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jdist._src.data.source_state import close_iterator, decode_state, encode_state

_ENDED = "the iterator has ended"
READ_AGAIN_ADVICE = (
    "Pass a source that can be read again: a generator function without arguments, or an object whose `__iter__` starts at "
    "the beginning."
)
# By the `id` of the source, which the iterator keeps alive. Sources need not be hashable.
_open_iterators: weakref.WeakValueDictionary[int, "_OpenIterator"] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def is_instance(source: Any, library: str, class_name: str) -> bool:
    """Returns whether `source` is an instance of a class of a library, which is not imported for it."""
    module = sys.modules.get(library)
    cls = module and functools.reduce(lambda part, name: getattr(part, name, None), class_name.split("."), module)
    return isinstance(cls, type) and isinstance(source, cls)


def one_shot_advice(source: Any) -> tuple[str, str] | None:
    """Returns the class of an iterator and the advice to pass a source that can be read again; None for other sources."""
    if not isinstance(source, Iterator):
        return None
    name = getattr(source, "__name__", "<") if inspect.isgenerator(source) else "<"  # or "<genexpr>"
    example = f" Write `{name}` instead of `{name}()`, or bind arguments with `functools.partial`."
    return type(source).__name__, READ_AGAIN_ADVICE + ("" if name.startswith("<") else example)


class CallableIterable:
    """An iterable that calls a function for each new iterator.

    Args:
        make: A function without arguments.
        as_iterable: Converts the result of `make` to an iterable of elements.
    """

    def __init__(self, make: Callable[[], Any], as_iterable: Callable[[Any], Iterable[Any]] = iter):
        self._make, self._as_iterable = make, as_iterable

    def __iter__(self) -> Iterator[Any]:
        source = self._as_iterable(self._make())
        return iter(_copy_of_hugging_face(source) if _is_hugging_face(source) else source)


def restart_each_epoch(source: Iterable[Any]) -> Callable[[int, int], Iterator[Any]]:
    """Returns `Stream.start` for an iterable that is read from the beginning in each epoch.

    Elements before the first requested one are read and discarded. The iterators report the position of a source that has a
    `state_dict`.
    """
    one_shot = one_shot_advice(source)
    was_read = False

    def start(epoch: int, first: int) -> Iterator[Any]:
        nonlocal was_read
        if one_shot and was_read:
            raise ValueError(
                f"The source is a {one_shot[0]}, which can be read only once, and has been read. {one_shot[1]}"
            )
        was_read = True
        iterator = _iterator(source, epoch)
        next(itertools.islice(iterator, first, first), None)
        return iterator

    return start


def samplers(source: Any) -> list[Any]:
    """Returns the objects that may determine the order: the source, and the samplers of a torch loader."""
    batch_sampler = getattr(source, "batch_sampler", None)
    return [source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def _iterator(source: Iterable[Any], epoch: int) -> Iterator[Any]:
    """Returns an iterator over `source` that no other iterator moves."""
    if _is_hugging_face(source):
        # Its `state_dict` omits the examples in its shuffle buffer.
        return _started(_copy_of_hugging_face(source), epoch)
    is_loader = _is_torch_loader(source)
    has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    if not is_loader and not has_state:
        return _started(source, epoch)
    opened = (_StatefulIterator if has_state else _OpenIterator)(source)
    with _lock:
        other = _open_iterators.get(id(source))
        is_in_use = other is not None and other.is_open
        if not (is_loader and is_in_use):
            _open_iterators[id(source)] = opened
    if is_loader and (is_in_use or _shares_position(source, has_state)):
        opened.loader = _copy_of_loader(source)
    elif other is not None:
        other.end()
    opened.iterator = _started(opened.loader, epoch)
    return opened


def _started(source: Any, epoch: int) -> Iterator[Any]:
    for sampler in samplers(source):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
    return iter(source)


class _OpenIterator:
    """An iterator over a loader, which records whether it may still be read.

    Args:
        source: The iterable that the user passes.

    Attributes:
        loader: The iterable that is read: `source`, or a copy of it.
        iterator: The iterator over it.
        is_open: Whether the iterator may still be read.
    """

    iterator: Iterator[Any]

    def __init__(self, source: Any):
        self._source, self.loader = source, source
        self.is_open, self._was_ended = True, False
        self._reading = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._reading:
            self.check()
            try:
                return next(self.iterator)
            except StopIteration:
                self.is_open = False
                raise

    def check(self) -> None:
        """Raises ValueError if another iterator has moved the source."""
        if self._was_ended:
            raise ValueError(
                f"The source is a {type(self._source).__name__}, whose iterators share one position, and a later iterator "
                "over it was started, so this one has ended. Read one at a time, or pass a function without arguments that "
                "returns a new source."
            )

    def end(self) -> None:
        """Makes later reads an error if the iterator is open. Waits for the read that is in progress."""
        with self._reading:
            self._was_ended = self.is_open

    def close(self) -> None:
        """Closes the iterator of the loader if it can be closed."""
        self.is_open = False
        close_iterator(self.iterator)


class _StatefulIterator(_OpenIterator):
    """An iterator over a loader that has a `state_dict`, with its position.

    A position that is passed to `load_state_dict` applies to the loader's next iterator.
    """

    def get_state(self) -> Any:
        """Returns the position as JSON-able data."""
        with self._reading:
            self.check()
            # At the end a loader reports the beginning of its next epoch.
            return encode_state("state_dict()", self.loader.state_dict()) if self.is_open else _ENDED

    def set_state(self, state: Any) -> None:
        """Continues from a position."""
        if state == _ENDED:
            self.is_open, self.iterator = False, iter(())
            return
        if _is_torch_loader(self.loader):
            # Its Hugging Face stream would begin each later epoch at this position, too.
            self.loader = _copy_of_loader(self.loader)
        self.loader.load_state_dict(decode_state(state))
        self.iterator = iter(self.loader)


def _is_hugging_face(source: Any) -> bool:
    return is_instance(source, "datasets", "IterableDataset")


def _is_torch_loader(source: Any) -> bool:
    return is_instance(source, "torch", "utils.data.DataLoader")


def _shares_position(loader: Any, has_state: bool) -> bool:
    """Returns whether the data of a torch loader has one position, which other data sets may move.

    Worker processes have copies of the data. A loader with a `state_dict` reports the position of its data to the user.
    """
    return loader.num_workers == 0 and not has_state and _is_hugging_face(loader.dataset)


def _copy_of_loader(loader: Any) -> Any:
    """Returns a torch loader without the iterator that a loader keeps for its worker processes and for its `state_dict`."""
    copied = copy.copy(loader)
    copied.__dict__.update(
        _iterator=None,
        _initial_iter_for_state_dict=False,
        next_iter_state=None,
        dataset=_copy_of_hugging_face(loader.dataset) if _is_hugging_face(loader.dataset) else loader.dataset,
        sampler=copy.copy(loader.sampler),  # which has a separate epoch
        batch_sampler=copy.copy(loader.batch_sampler),
    )
    if hasattr(copied.batch_sampler, "sampler"):
        copied.batch_sampler.sampler = copy.copy(copied.batch_sampler.sampler)
    return copied


def _copy_of_hugging_face(dataset: Any) -> Any:
    """Returns a copy of a Hugging Face `IterableDataset`, with a separate position and epoch.

    Its position is stored in the nodes of its pipeline, which data sets derived from it, such as `take` and `skip`, share.
    https://github.com/huggingface/datasets/blob/5.2.0/src/datasets/iterable_dataset.py
    """
    copied = object.__new__(type(dataset))  # `copy.copy` shares `__dict__`: their `__setstate__` assigns it
    epoch = copy.deepcopy(dataset._epoch)  # with torch installed, a tensor that `set_epoch` modifies
    copied.__dict__.update(vars(dataset), _ex_iterable=_copy_of_node(dataset._ex_iterable), _epoch=epoch)
    return copied


def _copy_of_node(node: Any) -> Any:
    if isinstance(node, list):
        return [_copy_of_node(part) for part in node]
    if not hasattr(node, "_init_state_dict"):
        return node
    copied = copy.copy(node)
    vars(copied).update({name: _copy_of_node(value) for name, value in vars(node).items()})
    return copied
