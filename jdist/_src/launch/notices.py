"""Notices of a process to its launcher: its errors, its answers, and whether it has joined the other processes.

A notice is a line: empty as an answer, the exit status after an error, or a presence.
"""

import sys
from typing import Literal, get_args

# Of a process among the others: it waits for them, it is one of them, or it has separated from them at its end.
Presence = Literal["joining", "joined", "left"]
PRESENCES: tuple[Presence, ...] = get_args(Presence)


def note_presence(presence: Presence) -> None:
    """Reports the presence of this process to its launcher, if `jdist run` has started it."""
    child = sys.modules.get("_jdist_child")  # the program of the process, which runs as a file
    if child is not None:
        child.write_notice(presence)
