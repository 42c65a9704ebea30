"""Handles Ctrl-C, which must not separate a step from its state."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupt:
    """Records Ctrl-C while it is deferred.

    Mutable: a signal handler writes to it.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._is_deferred = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first Ctrl-C is only recorded; the second one raises KeyboardInterrupt."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal."""
        if not self._is_deferred or self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


@contextlib.contextmanager
def handle_interrupts() -> Iterator[Interrupt]:
    """Handles Ctrl-C inside. Has no effect in other threads than the main one, which receive no signals."""
    interrupt = Interrupt()
    previous_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous_handler is not signal.default_int_handler:
        yield interrupt  # the application has installed a handler: leave it in place
        return
    signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous_handler)
