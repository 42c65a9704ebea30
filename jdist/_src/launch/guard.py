"""The program of the guard: a process that ends the child processes, and the processes that they started, after the launcher.

The launcher runs this file by its path. Standard input contains a line `=MARK` with the mark of the launch, a line `+GROUP` per
process group that starts and `-GROUP` per process group that has ended. The end of the input is the end of the launcher, also
if the launcher was killed.

Processes inherit the mark as an environment variable, also those that leave the process group, such as a daemon.
"""

import contextlib
import os
import signal
import sys
import time

MARK = "JDIST_LAUNCH"  # the environment variable; a program that removes it from the environment of a process keeps the process
_KILL_SECONDS = 2.0  # in which processes that start others meanwhile are killed


def marked_processes(mark: str) -> list[int]:
    """Returns the ids of the running processes with a mark. Only Linux shows it: elsewhere the result is empty."""
    marked: list[int] = []
    text = f"{MARK}={mark}".encode()
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # of another user, or ended
                if text in file.read().split(b"\0"):
                    marked.append(int(name))
    return marked


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    mark = ""
    for line in sys.stdin:
        if line[0] == "=":
            mark = line[1:].strip()
        else:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECONDS
    while (marked := marked_processes(mark)) and time.monotonic() < deadline:
        for process in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    _main()
