"""Items that are made ahead of whoever takes them: by a thread, or where making one cannot stall, by the taker."""

import atexit
import collections
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

import jax

T = TypeVar("T")
_PATIENCE = 5  # seconds to wait for a source that is to be left
_LOOK = 0.5  # seconds after which a loop that waits sees that it was interrupted
_log = logging.getLogger("jdist")
Maker: TypeAlias = Callable[[Callable[[], bool]], Generator[T]]  # makes the items, given what says whether to stop


class Inline(Generic[T]):
    """Items that are made when one is taken, `depth` ahead: enough where making one is only to ask for it."""

    def __init__(self, make: Maker[T], depth: int):
        self._items = make(lambda: False)
        self._depth = depth
        self._made: collections.deque[T] = collections.deque()
        self._end: Exception | None = None  # what comes after the last item: StopIteration, or an error first

    def ready(self) -> bool:
        """Whether an item can be had at once."""
        return bool(self._made)

    def take(self) -> T:
        """The next item.

        Raises:
            StopIteration: There is none.
        """
        try:
            while self._end is None and len(self._made) <= self._depth:
                self._made.append(next(self._items))
        except Exception as error:
            self._end = error
        if self._made:
            return self._made.popleft()
        end, self._end = self._end, StopIteration()
        assert end is not None
        raise end

    def close(self) -> None:
        """Lets go of what makes the items, and of those that were made."""
        self._end = StopIteration()
        self._made.clear()
        self._items.close()


class Threaded(Generic[T]):
    """Items that a thread makes, at most `depth` of them before they are taken.

    The thread holds nothing of this object, so that it ends when this one is gone.
    """

    def __init__(self, make: Maker[T], depth: int):
        # A simple queue, because what `__del__` does may come in the middle of anything: it can be put to even then.
        self._slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._slots.put(None)
        self._made: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()
        self._stop = threading.Event()
        # What a thread sees of JAX's settings is its own.
        keeps_64_bits = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        work = (make, self._slots, self._made, self._stop, keeps_64_bits)
        self._thread = threading.Thread(target=_work, args=work, name="jdist input", daemon=True)
        _running[self._thread] = functools.partial(_ask_to_stop, self._stop, self._slots)
        self._thread.start()

    def ready(self) -> bool:
        """Whether an item can be had at once."""
        return not self._made.empty()

    def take(self) -> T:
        """The next item.

        Raises:
            StopIteration: There is none.
        """
        give = None
        while give is None:
            with contextlib.suppress(queue.Empty):
                give = self._made.get(timeout=_LOOK)
        self._slots.put(None)
        try:
            return give()
        except BaseException:
            self._made.put(_end)
            raise

    def close(self) -> None:
        """Ends the thread, and waits until it has made the item that it is at; but not for ever."""
        self.stop(wait=_PATIENCE)
        if self._thread.is_alive():
            _log.warning("The source has not answered for %d s. The thread that reads it ends when it does.", _PATIENCE)
        self._made = queue.SimpleQueue()
        self._made.put(_end)

    def stop(self, wait: float = 0) -> None:
        """Asks the thread to end, and waits so many seconds for it."""
        _ask_to_stop(self._stop, self._slots)
        if wait:
            self._thread.join(wait)

    __del__ = stop


def _ask_to_stop(stop: threading.Event, slots: queue.SimpleQueue[None]) -> None:
    stop.set()
    slots.put(None)


def _work(
    make: Maker[Any],
    slots: queue.SimpleQueue[None],
    made: queue.SimpleQueue[Callable[[], Any]],
    stop: threading.Event,
    keeps_64_bits: bool,
) -> None:
    try:
        with jax.enable_x64(keeps_64_bits), contextlib.closing(make(stop.is_set)) as items:  # pyright: ignore
            while slots.get() is None and not stop.is_set():
                made.put(_giving(next(items)))
    except BaseException as error:
        made.put(_raising(error))
    finally:
        _running.pop(threading.current_thread(), None)


def _giving(item: T) -> Callable[[], T]:
    return lambda: item


def _raising(error: BaseException) -> Callable[[], Any]:
    def give() -> Any:
        raise error

    return give


_end = _raising(StopIteration())
_running: dict[threading.Thread, Callable[[], None]] = {}  # and how to ask each to stop


@atexit.register
def _stop_all() -> None:
    """A thread that is still in JAX when Python goes away takes the process with it. One that waits for its source does not."""
    deadline = time.monotonic() + _PATIENCE
    for stop in list(_running.values()):
        stop()
    for thread in list(_running):
        thread.join(max(0, deadline - time.monotonic()))
