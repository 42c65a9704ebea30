"""Prefetching of items: in a thread, or in the consumer's thread where making an item does not block."""

import collections
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

import jax

from jdist._src.core import activity
from jdist._src.core.background_threads import STOP_SECONDS, start_thread

T = TypeVar("T")
_POLL_SECONDS = 0.5  # interval in which a waiting loop reacts to interrupts
_log = logging.getLogger("jdist")
Maker: TypeAlias = Callable[[Callable[[], bool]], Generator[T]]  # makes the items; its argument returns whether to stop


class Inline(Generic[T]):
    """Items that are made in `take`, `depth` items ahead. Sufficient where making an item only starts a transfer."""

    def __init__(self, make: Maker[T], depth: int):
        self._items = make(lambda: False)
        self._depth = depth
        self._made: collections.deque[T] = collections.deque()
        self._end: Exception | None = None  # raised after the last item: an error once, then StopIteration

    def ready(self) -> bool:
        """Returns whether an item is available without waiting."""
        return bool(self._made)

    def take(self) -> T:
        """Returns the next item.

        Raises:
            StopIteration: There are no more items.
        """
        made = self._made
        try:
            while self._end is None and len(made) <= self._depth:
                made.append(next(self._items))
        except Exception as error:
            self._end = error
        if made:
            return made.popleft()
        end, self._end = self._end, StopIteration()
        assert end is not None
        raise end

    def close(self) -> None:
        """Releases the generator and the items."""
        self._end = StopIteration()
        self._made.clear()
        self._items.close()


class Threaded(Generic[T]):
    """Items that a thread makes, at most `depth` items ahead.

    The thread does not reference this object, so that it ends when this object is deleted.
    """

    def __init__(self, make: Maker[T], depth: int):
        # `SimpleQueue.put` is reentrant, so `__del__`, which may run at any point, can call it.
        self._slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._slots.put(None)
        self._made: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()  # an item, or an error
        self._stop = threading.Event()
        # JAX's configuration contexts are thread-local.
        enable_x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        args = (make, self._slots, self._made, self._stop, enable_x64)
        stop = functools.partial(_request_stop, self._stop, self._slots)
        self._thread = start_thread(_make_items, args, name="jdist input", stop=stop)

    def ready(self) -> bool:
        """Returns whether an item is available without waiting."""
        return not self._made.empty()

    def take(self) -> T:
        """Returns the next item.

        Raises:
            StopIteration: There are no more items.
        """
        try:
            item, error = self._made.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            with activity.waiting_for_thread("the next batch"):
                item, error = self._wait()
        self._slots.put(None)
        if error is not None:
            self._made.put((None, StopIteration()))
            raise error
        return item

    def _wait(self) -> tuple[Any, BaseException | None]:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._made.get(timeout=_POLL_SECONDS)

    def close(self) -> None:
        """Ends the thread. Waits for the item that it makes, up to a limit."""
        self.stop(wait=STOP_SECONDS)
        if self._thread.is_alive():
            _log.warning("The source has not returned for %d s. Its thread ends when it does.", STOP_SECONDS)
        self._made = queue.SimpleQueue()
        self._made.put((None, StopIteration()))

    def stop(self, wait: float = 0) -> None:
        """Requests the thread to end, and waits for it up to `wait` seconds."""
        _request_stop(self._stop, self._slots)
        if wait:
            self._thread.join(wait)

    __del__ = stop


def _request_stop(stop: threading.Event, slots: queue.SimpleQueue[None]) -> None:
    stop.set()
    slots.put(None)


def _make_items(
    make: Maker[Any],
    slots: queue.SimpleQueue[None],
    made: queue.SimpleQueue[tuple[Any, BaseException | None]],
    stop: threading.Event,
    enable_x64: bool,
) -> None:
    try:
        with jax.enable_x64(enable_x64), contextlib.closing(make(stop.is_set)) as items:  # pyright: ignore
            while slots.get() is None and not stop.is_set():
                made.put((next(items), None))
    except BaseException as error:
        made.put((None, error))
