"""What the launcher writes: all of it, on every kind of stream."""

import contextlib
import errno
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
        lines = Console(stdout=stream).lines(3)[0]
        lines.feed(LINE + b"\nend\n")
    thread.join()
    os.close(reader)
    assert b"".join(parts) == b"[3] " + LINE + b"\n[3] end\n"


class FullDisk(io.RawIOBase):
    """A file whose disk is full after a number of bytes, until `limit` grows."""

    def __init__(self, limit):
        self.limit, self.data = limit, b""

    def writable(self):
        return True

    def write(self, data):
        if len(self.data) >= self.limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(data[: self.limit - len(self.data)])
        self.data += part
        return len(part)


def test_output_to_a_full_disk_is_left_out_and_the_missing_bytes_are_counted():
    full, errors = FullDisk(10), FullDisk(10_000)
    streams = [io.TextIOWrapper(file, write_through=True) for file in (full, errors)]
    console = Console(*streams)
    lines = console.lines(0)[0]
    lines.feed(b"1234\n5678\n")  # with the prefix, 18 bytes
    lines.feed(b"abcd\n")
    assert full.data == b"[0] 1234\n["
    assert (
        errors.data
        == b"jdist run: standard output cannot be written: No space left on device. The processes continue.\n"
    )
    full.limit = 10_000
    lines.feed(b"last\n")
    console.close()
    assert full.data == b"[0] 1234\n[\njdist run: 17 bytes are missing here: No space left on device.\n[0] last\n"
    assert lines.tail() == [b"1234", b"5678", b"abcd", b"last"]


def test_output_that_is_missing_at_the_end_is_reported():
    errors = FullDisk(10_000)
    console = Console(*(io.TextIOWrapper(file, write_through=True) for file in (FullDisk(0), errors)))
    console.lines(0)[0].feed(b"line\n")
    console.close()
    assert errors.data.endswith(
        b"jdist run: the last 9 bytes of standard output could not be written: No space left on device.\n"
    )
