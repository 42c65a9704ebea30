"""The output of the processes: complete lines with the index of the process, and the last lines for the report of a failure."""

import collections
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

_MAX_LINE_BYTES = 1 << 16  # a longer line is divided
_TAIL_LINES = 400
_REPORTED_LINES = 20
_REPORTED_CHARACTERS = 50_000
_TRACEBACK = b"Traceback (most recent call last):"
_CHAIN = (b"During handling of the above exception", b"The above exception was the direct cause")


class PrefixedLines:
    """One output stream of a process, written line by line with a prefix.

    Mutable: it stores an incomplete line and the last lines. A part of a line that ends with a carriage return is overwritten
    by the next part, as on a terminal.

    Args:
        prefix: The text in front of each line.
        write: Writes complete lines.
    """

    def __init__(self, prefix: bytes, write: Callable[[bytes], None]):
        self._prefix, self._write = prefix, write
        self._incomplete = b""
        self._tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)

    def feed(self, data: bytes) -> None:
        """Adds output of the process, and writes the complete lines."""
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        if len(self._incomplete) > _MAX_LINE_BYTES:
            lines, self._incomplete = [*lines, self._incomplete], b""
        # The text before the last carriage return is overwritten; the last part has no line end yet.
        kept, separator, last = self._incomplete.rpartition(b"\r")
        self._incomplete = last if last or not separator else kept.rpartition(b"\r")[2] + separator
        self._write_lines(lines)

    def close(self) -> None:
        """Writes the incomplete last line."""
        if self._incomplete:
            lines, self._incomplete = [self._incomplete], b""
            self._write_lines(lines)

    def tail(self) -> list[bytes]:
        """Returns the last lines, the incomplete one too."""
        return [*self._tail, *filter(None, [_shown(self._incomplete)])]

    def _write_lines(self, lines: list[bytes]) -> None:
        lines = list(map(_shown, lines))
        if lines:
            self._tail.extend(lines)
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))


def _shown(line: bytes) -> bytes:
    return line.removesuffix(b"\r").rpartition(b"\r")[2]


class Console:
    """Standard output and standard error of the launcher.

    Mutable: a stream whose reader has ended is closed. Output that cannot be written, as to a full disk, is left out: the
    processes continue, and the next output that can be written follows a message with the number of bytes that are missing.

    Args:
        stdout: The standard output.
        stderr: The standard error.

    Attributes:
        is_closed: Whether the reader of a stream has ended.
    """

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None):
        self._stdout, self._stderr = stdout or sys.stdout, stderr or sys.stderr
        self.is_closed = False
        # The number of bytes that could not be written to a stream, and the error.
        self._missing: dict[TextIO, tuple[int, str]] = {}

    def lines(self, process: int) -> tuple[PrefixedLines, PrefixedLines]:
        """Returns the lines of the standard output and of the standard error of a process."""
        return self._lines(process, self._stdout), self._lines(process, self._stderr)

    def message(self, text: str) -> None:
        """Writes a message of the launcher to standard error."""
        self._write(self._stderr, f"jdist run: {text}\n".encode(errors="replace"))

    def _lines(self, process: int, stream: TextIO) -> PrefixedLines:
        is_colored = stream.isatty() and not os.environ.get("NO_COLOR")
        prefix = f"\x1b[{31 + (process + 1) % 6}m[{process}]\x1b[0m " if is_colored else f"[{process}] "
        return PrefixedLines(prefix.encode(), lambda data: self._write(stream, data))

    def close(self) -> None:
        """Reports output that is missing at the end of a stream, on either stream."""
        for stream, (count, error) in list(self._missing.items()):
            name = "standard output" if stream is self._stdout else "standard error"
            text = f"jdist run: the last {count} bytes of {name} could not be written: {error}.\n"
            self._missing.clear()
            self._write(self._stderr, text.encode())
            if self._missing:
                self._missing.clear()
                self._write(self._stdout, text.encode())

    def _write(self, stream: TextIO, data: bytes) -> None:
        count, error = self._missing.get(stream, (0, ""))
        prefix = f"\njdist run: {count} bytes are missing here: {error}.\n" if count else ""
        rest = memoryview(prefix.encode() + data)
        try:
            for written in _write_parts(stream, bytes(rest)):
                rest = rest[written:]
            self._missing.pop(stream, None)
        except BrokenPipeError:
            self.is_closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # otherwise Python reports the error at exit
        except OSError as error:  # the disk is full, or the terminal is closed
            text = error.strerror or str(error)
            self._missing[stream] = count + min(len(rest), len(data)), text
            if not count and stream is self._stdout:
                self.message(f"standard output cannot be written: {text}. The processes continue.")


def _write_parts(stream: TextIO, data: bytes) -> Iterator[int]:
    """Writes all of `data`, and returns the number of bytes of each part.

    A call of `write` may write a part, if a signal arrives, or nothing, if a pipe does not block.
    """
    binary: Any = getattr(stream, "buffer", None)
    if binary is None:  # a stream of a notebook
        stream.write(data.decode(errors="replace"))
        stream.flush()
        yield len(data)
        return
    stream.flush()
    file, rest = getattr(binary, "raw", binary), memoryview(data)
    while rest:
        if written := file.write(rest):
            rest = rest[written:]
            yield written
        else:
            select.select([], [file], [])


def failure_text(stderr: list[bytes], stdout: list[bytes]) -> str:
    """Returns the last traceback of a process with the exceptions that caused it, otherwise the last lines of its output.

    Args:
        stderr: The last lines of standard error.
        stdout: The last lines of standard output.
    """
    if _TRACEBACK not in stderr:
        return _text((stderr or stdout)[-_REPORTED_LINES:])
    starts = [number for number, line in enumerate(stderr) if line == _TRACEBACK]
    start = starts.pop()
    while starts and any(line.startswith(_CHAIN) for line in stderr[max(start - 3, 0) : start]):
        start = starts.pop()
    return _text(stderr[start:])


def _text(lines: list[bytes]) -> str:
    return b"\n".join(lines).decode(errors="replace").strip("\n")[-_REPORTED_CHARACTERS:]
