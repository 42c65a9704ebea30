"""Items that are made ahead of whoever takes them: by a thread, or where making one cannot stall, by the taker."""

import atexit
import collections
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

import jax

T = TypeVar("T")
Maker: TypeAlias = Callable[[Callable[[], bool]], Generator[T]]  # makes the items, given what says whether to stop


class Inline(Generic[T]):
    """Items that are made when one is taken, `depth` ahead: enough where making one is only to ask for it."""

    def __init__(self, make: Maker[T], depth: int):
        self._items = make(lambda: False)
        self._depth = depth
        self._made: collections.deque[T] = collections.deque()
        self._error: Exception | None = None

    def ready(self) -> bool:
        """Whether an item can be had at once."""
        return bool(self._made)

    def take(self) -> T:
        """The next item.

        Raises:
            StopIteration: There is none.
        """
        if not self._made and self._error:
            error, self._error = self._error, None
            raise error
        item = self._made.popleft() if self._made else next(self._items)
        try:
            while len(self._made) < self._depth:
                self._made.append(next(self._items))
        except StopIteration:
            pass
        except Exception as error:  # comes after what was made before it
            self._error = error
        return item

    def close(self) -> None:
        """Lets go of what makes the items, and of those that were made."""
        self._items.close()
        self._made.clear()


class Threaded(Generic[T]):
    """Items that a thread makes, at most `depth` of them before they are taken.

    The thread holds nothing of this object, so that it ends when this one is gone.
    """

    def __init__(self, make: Maker[T], depth: int):
        self._slots = threading.Semaphore(depth)
        self._made: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()
        self._stop = threading.Event()
        # What a thread sees of JAX's settings is its own.
        keeps_64_bits = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        work = (make, self._slots, self._made, self._stop, keeps_64_bits)
        self._thread = threading.Thread(target=_work, args=work, name="jdist input", daemon=True)
        _running.add(self)
        self._thread.start()

    def ready(self) -> bool:
        """Whether an item can be had at once."""
        return not self._made.empty()

    def take(self) -> T:
        """The next item.

        Raises:
            StopIteration: There is none.
        """
        give = self._made.get()
        self._slots.release()
        try:
            return give()
        except BaseException:
            self._made.put(_end)
            raise

    def close(self) -> None:
        """Ends the thread, and waits until it has made the item that it is at."""
        self.stop()
        self._thread.join()
        self._made = queue.SimpleQueue()
        self._made.put(_end)

    def stop(self, wait: float = 0) -> None:
        """Asks the thread to end, and waits so many seconds for it."""
        self._stop.set()
        self._slots.release()
        if wait:
            self._thread.join(wait)

    __del__ = stop


def _work(
    make: Maker[Any],
    slots: threading.Semaphore,
    made: queue.SimpleQueue[Callable[[], Any]],
    stop: threading.Event,
    keeps_64_bits: bool,
) -> None:
    try:
        with jax.enable_x64(keeps_64_bits), contextlib.closing(make(stop.is_set)) as items:  # pyright: ignore
            while slots.acquire() and not stop.is_set():
                made.put(_giving(next(items)))
    except BaseException as error:
        made.put(_raising(error))


def _giving(item: T) -> Callable[[], T]:
    return lambda: item


def _raising(error: BaseException) -> Callable[[], Any]:
    def give() -> Any:
        raise error

    return give


_end = _raising(StopIteration())
_running: weakref.WeakSet[Threaded[Any]] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that is still in JAX when Python goes away takes the process with it."""
    for threaded in list(_running):
        threaded.stop(wait=2)
