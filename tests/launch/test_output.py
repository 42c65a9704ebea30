"""What the launcher writes: all of it, on every kind of stream."""

import contextlib
import io
import os
import signal
import threading
import time

import pytest

from jdist._src.launch.output import Console

LINE = b"x" * 300_000  # more than a pipe holds


@contextlib.contextmanager
def interrupting_signals():
    """Sends a signal with a handler every millisecond, as SIGCHLD when processes end."""
    previous = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("blocks", [True, False], ids=["blocking", "non_blocking"])
@pytest.mark.parametrize("buffering", [0, -1], ids=["unbuffered", "buffered"])
def test_all_lines_are_written_to_a_slow_reader(buffering, blocks):
    reader, writer = os.pipe()
    os.set_blocking(writer, blocks)
    parts = []

    def read():
        while data := os.read(reader, 10_000):
            parts.append(data)
            time.sleep(0.001)

    thread = threading.Thread(target=read)
    thread.start()
    # As Python opens standard output, without a buffer under PYTHONUNBUFFERED.
    with (
        open(writer, "wb", buffering=buffering) as file,
        io.TextIOWrapper(file, write_through=True) as stream,
        interrupting_signals(),
    ):
        lines = Console(stdout=stream).stdout_lines(3)
        lines.feed(LINE + b"\nend\n")
    thread.join()
    os.close(reader)
    assert b"".join(parts) == b"[3] " + LINE + b"\n[3] end\n"
