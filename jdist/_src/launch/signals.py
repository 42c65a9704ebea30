"""The signals that the launcher receives and forwards to its processes."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ReceivedSignals:
    """The signals of `FORWARDED` that this process has received.

    Mutable: the handler adds the signals.

    Args:
        wake_up: A pipe that becomes readable at each of these signals, and at the end of a child process.

    Attributes:
        numbers: The signals, in the order of their arrival.
        listener: Called after each of them.
        wake_up: The pipe.
    """

    def __init__(self, wake_up: int):
        self.numbers: list[int] = []
        self.listener: Callable[[], None] = lambda: None
        self.wake_up = wake_up

    def discard_wake_ups(self) -> None:
        """Empties the pipe."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_up, 1 << 16)


@contextlib.contextmanager
def received_signals() -> Iterator[ReceivedSignals]:
    """Receives the signals of `FORWARDED` in place of their handlers while the block runs.

    A signal that is ignored, as SIGHUP by `nohup`, stays ignored.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        del frame
        if number != signal.SIGCHLD:
            received.numbers.append(number)
            received.listener()

    reader, writer = os.pipe()
    received = ReceivedSignals(reader)
    for pipe in (reader, writer):
        os.set_blocking(pipe, False)
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    numbers = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, receive) for number in (*numbers, signal.SIGCHLD)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_writer)
        os.close(reader)
        os.close(writer)
