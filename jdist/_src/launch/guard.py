"""The program of the guard: a process that ends the child processes, and the processes that they started, after the launcher.

The launcher runs this file by its path. Standard input contains a line `+GROUP` per process group that starts and `-GROUP` per
process group that has ended. The end of the input is the end of the launcher, also if the launcher was killed.
"""

import contextlib
import os
import signal
import sys


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _main()
