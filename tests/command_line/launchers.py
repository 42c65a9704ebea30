"""Launchers that the tests start: `jdist run` with default signal handlers, and functions that observe its processes."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent.parent
# A launcher does not forward a signal that is ignored where it starts, as SIGINT is in a background job of a shell.
WITH_DEFAULT_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "jdist_tools", "run", *sys.argv[1:]])
"""
COMMAND = [sys.executable, "-I", "-S", "-c", WITH_DEFAULT_SIGNALS]
PROCESS = 'import os, signal, subprocess, sys, time; i = int(os.environ["JDIST_PROCESS_ID"])\n'


@contextlib.contextmanager
def starter(folder):
    """Returns a function that starts `jdist run OPTIONS train.py` in a folder, with the lines of the program."""
    with contextlib.ExitStack() as stack:

        def start(options, program, *arguments, **settings):
            (folder / "train.py").write_text(PROCESS + program)
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings.pop("environment", {})}
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | settings
            command = [*COMMAND, *options.split(), "train.py", *arguments]
            launcher = subprocess.Popen(command, cwd=folder, env=environment, **streams)
            stack.callback(end, launcher)
            return launcher

        yield start


def end(launcher):
    if launcher.poll() is None:
        launcher.kill()
    launcher.wait()
    for stream in (launcher.stdout, launcher.stderr):
        if stream is not None:
            stream.close()


def read_until(stream, *words):
    """Returns the lines of a stream up to the line after which each word has occurred."""
    lines = []
    while not all(any(word in line for line in lines) for word in words):
        lines.append(stream.readline())
        assert lines[-1], f"the output ended: {lines}"
    return lines


def is_running(pid):
    """Whether a process exists; one that has ended and was not waited for does not count."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_ended(pids):
    deadline = time.monotonic() + 30
    while running := list(filter(is_running, pids)):
        assert time.monotonic() < deadline, f"processes {running} are still running"
        time.sleep(0.02)


def children_of(pid):
    """Returns the ids of the processes that a process has started."""
    return list(map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
