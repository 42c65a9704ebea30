"""Notices of a process to its launcher: its errors, its answers, and whether it has joined the other processes.

A notice is a line: `INDEX` as an answer, `INDEX STATUS` of an error, or `INDEX PRESENCE`.
"""

import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

# Of a process among the others: it waits for them, it is one of them, or it has separated from them at its end.
Presence = Literal["joining", "joined", "left"]
_PRESENCES: dict[str, Presence] = {presence: presence for presence in get_args(Presence)}


class Notice(NamedTuple):
    """A notice.

    Attributes:
        process: The index of the process.
        status: The exit status that it will have, after an error; else None.
        presence: Its new presence; else None.
    """

    process: int
    status: int | None = None
    presence: Presence | None = None


def parse_notices(data: bytes) -> Iterator[Notice]:
    """Returns the notices in complete lines.

    Example:
        >>> list(parse_notices(b"0 joined"))
        [Notice(process=0, status=None, presence='joined')]
    """
    for line in data.decode().splitlines():
        index, _, text = line.partition(" ")
        if text in _PRESENCES:
            yield Notice(int(index), presence=_PRESENCES[text])
        else:
            yield Notice(int(index), int(text) if text else None)


def note_presence(presence: Presence) -> None:
    """Reports the presence of this process to its launcher, if `jdist run` has started it."""
    child = sys.modules.get("_jdist_child")  # the program of the process, which runs as a file
    if child is not None:
        child.write_notice(presence)
