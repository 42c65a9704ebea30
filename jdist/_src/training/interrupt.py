"""Ctrl-C, which must not come between a step and its state."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupt:
    """Whether somebody has pressed Ctrl-C while it was held back.

    Mutable: a handler of signals writes to it.
    """

    def __init__(self) -> None:
        self.asked = False
        self._held = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, Ctrl-C is only noted; the second time it interrupts, whatever is lost by it."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        if not self._held or self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupt]:
    """Handles Ctrl-C within; in another thread than the main one, where nothing is told of signals, it does nothing."""
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield interrupt  # whoever handles it otherwise knows why
        return
    signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
