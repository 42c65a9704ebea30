"""Ctrl-C during a call of a step is raised after the caller has assigned the new state.

Python handles a signal after the C function in which it arrived. After the function that launches a step, the old state is
donated and no variable holds the new one yet, so an exception there would lose the state: a loop spends most of its time in
that function. The interrupt is therefore held back until the next call of a program, which raises it before it donates
anything, or for a short time if there is no such call.
"""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_DELAY_SECONDS = 0.1  # longer than an assignment takes, shorter than a person notices
_pending: list[threading.Timer] = []  # of the interrupt that is held back


def uninterrupted(
    fn: Callable[..., Any], record: Callable[[Any], None] | None = None
) -> Callable[[tuple[Any, ...]], Any]:
    """Returns a function of a tuple that returns `fn(*args)` also if Ctrl-C is pressed during the call.

    The interrupt is then held back, see `raise_pending`. It is raised immediately if `fn` runs Python when it arrives, as
    functions of `jax.jit` do while they trace and compile.

    Args:
        fn: A function that is implemented in C.
        record: Is called with the result. It is called again if Ctrl-C interrupts it.
    """

    def call(args: tuple[Any, ...]) -> Any:
        results: list[Any] = []
        try:
            # Between the return of `fn` and the append, no bytecode runs, where Python would handle the signal.
            results.extend(itertools.starmap(fn, (args,)))
            if record is not None:
                record(results[0])
        except KeyboardInterrupt:
            if not results:
                raise
            hold_back()
            if record is not None:
                record(results[0])
        return results[0]

    return call


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Defers Ctrl-C to the end of a block of Python; a second one is raised immediately.

    It replaces the handler of the signal, which takes a few microseconds. It has no effect in other threads than the main one,
    which receive no signals, and where the application has installed a handler.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    presses: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if presses:
            raise KeyboardInterrupt
        presses.append(number)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if presses:
            hold_back()


def raise_pending() -> None:
    """Raises KeyboardInterrupt if one is held back."""
    if _pending:
        _pending.pop().cancel()
        raise KeyboardInterrupt


def hold_back() -> None:
    """Holds back an interrupt that the caller has caught, see `raise_pending`."""
    timer = threading.Timer(_DELAY_SECONDS, _send_again)
    timer.daemon = True
    _pending[:] = [timer]
    timer.start()


def _send_again() -> None:
    if _pending:
        _pending.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # wakes it where it sleeps
