"""Ctrl-C during a call of a step is raised after the caller has assigned the new state.

Python handles a signal after the C function in which it arrived. After the function that launches a step, the old state is
donated and no variable holds the new one yet, so an exception there would lose the state: a loop spends most of its time in
that function. The interrupt is therefore deferred until the next call of a program, which raises it before it donates
anything, or for a short time without such a call.
"""

import _signal  # pyright: ignore[reportMissingImports]  # the functions of `signal` convert handlers to enums: 20 times as slow
import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax
from jax import core

from jdist._src.core import activity

_DELAY_SECONDS = 0.1  # longer than an assignment takes, shorter than a person notices
_pending = activity.pending


def uninterrupted(
    fn: Callable[..., Any],
    finish: Callable[[Any], Any],
    runs_python: Callable[[], bool] = lambda: False,
    after_failure: Callable[[BaseException, tuple[Any, ...]], tuple[Any, ...] | None] = lambda error, args: None,
) -> Callable[[tuple[Any, ...]], Any]:
    """Returns a function of a tuple that returns `finish(fn(*args))` also if Ctrl-C is pressed during the call.

    The interrupt is then deferred, see `raise_pending`. It is raised immediately if it arrives before the memory of the first
    argument is donated, as while `fn` traces and compiles.

    Args:
        fn: A function that is implemented in C, and donates its first argument.
        finish: From the result to the result of the call. It is called again if Ctrl-C interrupts it.
        runs_python: Whether the next call of `fn` runs Python code, where Python would handle the signal.
        after_failure: Called after a call of `fn` that raised an error. Returns other arguments for another call, or None.
    """

    def call(args: tuple[Any, ...]) -> Any:
        results: list[Any] = []
        try:
            # Between the return of `fn` and the extension, no bytecode runs, where Python would handle the signal.
            if runs_python():
                with deferring_interrupts(lambda: is_donated(args)):
                    results.extend(itertools.starmap(fn, (args,)))
            else:
                results.extend(itertools.starmap(fn, (args,)))
            return finish(results[0])
        except BaseException as error:
            if not results and (other_args := after_failure(error, args)) is not None:
                return call(other_args)
            if not results or not isinstance(error, KeyboardInterrupt):
                raise
            defer_interrupt()
        return finish(results[0])

    return call


@contextlib.contextmanager
def deferring_interrupts(is_needed: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Defers Ctrl-C to the end of a block of Python; a second one is raised immediately, and one that arrives too early.

    It replaces the handler of the signal, which takes a microsecond. It has no effect in other threads than the main one,
    which receive no signals, and where the application has installed a handler.

    Args:
        is_needed: Whether an interrupt that arrives now has to be deferred.
    """
    if not _can_replace_handler():
        yield
        return
    deferred: list[int] = []
    raised: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if deferred or not is_needed():
            raised.append(number)
            _signal.signal(signal.SIGINT, signal.default_int_handler)  # here: it may interrupt `finally`
            raise KeyboardInterrupt
        deferred.append(number)

    _signal.signal(signal.SIGINT, handle)
    try:
        yield
    except Exception as error:
        # JAX reports an interrupt in Python code that its caches call as a ValueError: https://github.com/jax-ml/jax/issues/9082
        if raised:
            raise KeyboardInterrupt from error
        raise
    else:
        # Python has ignored it, in a callback of the garbage collector: https://github.com/jax-ml/jax/issues/18246
        if raised:
            defer_interrupt()
    finally:
        _signal.signal(signal.SIGINT, signal.default_int_handler)
        if deferred:
            defer_interrupt()


class BlockInterrupts:
    """Ctrl-C inside `with interrupts` sets `is_requested`; a second one, and one outside of the block, raises.

    Mutable: a signal handler writes to it.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._is_deferred = False

    def __enter__(self) -> None:
        self._is_deferred = True

    def __exit__(self, *error: object) -> None:
        self._is_deferred = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal."""
        if not self._is_deferred or self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


@contextlib.contextmanager
def interrupts_after_blocks() -> Iterator[BlockInterrupts]:
    """Handles Ctrl-C in the context by the result, for a loop that ends after a block. Limits: see `deferring_interrupts`."""
    interrupts = BlockInterrupts()
    if not _can_replace_handler():
        yield interrupts
        return
    _signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        _signal.signal(signal.SIGINT, signal.default_int_handler)


def _can_replace_handler() -> bool:
    """Whether this is the main thread, which receives signals, and the application has not installed a handler."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and _signal.getsignal(signal.SIGINT) is signal.default_int_handler


def run_deferring_interrupts(fn: Callable[[], Any]) -> Any:
    """Returns `fn()`, a Python function that donates the caller's state, with Ctrl-C deferred as by `deferring_interrupts`."""
    results: list[Any] = []
    try:
        with deferring_interrupts():
            results.append(fn())
    except KeyboardInterrupt:  # at the end of the block
        if not results:
            raise
        defer_interrupt()
    return results[0]


def handle_signals() -> None:
    """Raises KeyboardInterrupt if Ctrl-C was pressed: Python handles signals when a function begins."""


def raise_pending() -> None:
    """Raises KeyboardInterrupt if one is deferred, or the error that another thread has found."""
    if _pending:
        with contextlib.suppress(IndexError):  # the timer sends it at this moment
            pending = _pending.pop()
            if isinstance(pending, Exception):
                raise pending
            pending.cancel()
            raise KeyboardInterrupt


def defer_interrupt() -> None:
    """Defers an interrupt that the caller has caught: `raise_pending` raises it, or a timer sends it again."""
    timer = threading.Timer(_DELAY_SECONDS, _send_again)
    timer.daemon = True
    _remove_timer()
    _pending.append(timer)
    timer.start()


def _send_again() -> None:
    if _remove_timer():
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # wakes it where it sleeps


def _remove_timer() -> bool:
    timers = [pending for pending in _pending if isinstance(pending, threading.Timer)]
    for timer in timers:
        with contextlib.suppress(ValueError):  # a call of a program has raised it
            _pending.remove(timer)
    return bool(timers)


def is_donated(args: tuple[Any, ...]) -> bool:
    """Whether an array of the first argument is deleted."""
    leaves = jax.tree.leaves(args[:1])
    return any(
        isinstance(leaf, jax.Array) and not isinstance(leaf, core.Tracer) and leaf.is_deleted() for leaf in leaves
    )
