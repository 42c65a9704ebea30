"""Notices of a process to its launcher: its errors, its answers, and whether it has joined the other processes.

A notice is a line: empty as an answer, the exit status after an error, or a `JoinState`.
"""

import sys
from typing import Literal, get_args

# A process waits for the others to join, it has joined them, or it has separated from them at its end.
JoinState = Literal["joining", "joined", "left"]
JOIN_STATES: tuple[JoinState, ...] = get_args(JoinState)


def report_join_state(state: JoinState) -> None:
    """Writes whether this process has joined the others to its launcher, if `jdist run` has started it."""
    child = sys.modules.get("_jdist_child")  # the program of the process, which runs as a file
    if child is not None:
        child.write_notice(state)
