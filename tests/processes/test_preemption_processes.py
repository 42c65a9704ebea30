"""SIGTERM on one process: all save a checkpoint of one step and end with status 42, and continue with the same bits."""

import contextlib
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import jdist
from jdist._src.core.exit_statuses import PREEMPTED

pytestmark = pytest.mark.processes

HERE = pathlib.Path(__file__).parent
STEPS = 72


@contextlib.contextmanager
def started(processes, kind, folder):
    """Starts `jdist run`; yields the launcher, whose output is one stream."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-m", "jdist", "run", "-n", str(processes)]
    command += ["--devices-per-process", "1", "preempted_program.py", kind, str(folder)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launcher = subprocess.Popen(command, cwd=HERE, env=environment, **streams)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def results(output):
    return re.findall(r"process \d+ ends with (\w+)", output)


def run(processes, kind, folder):
    """Runs the program to its end; returns the bits of the parameters on each process."""
    with started(processes, kind, folder) as launcher:
        output, _ = launcher.communicate(timeout=200)
        assert launcher.returncode == 0, output
        return results(output)


def preempt(processes, kind, folder, victim, after):
    """Runs the program, and sends SIGTERM to a process, or with None to the launcher, after a number of steps of this run.

    Returns the exit status and the output.
    """
    ids, lines, steps = {}, [], 0
    with started(processes, kind, folder) as launcher:
        for line in launcher.stdout:
            lines.append(line)
            if found := re.search(r"process (\d+) has the id (\d+)", line):
                ids[int(found[1])] = int(found[2])
            steps += f"process {victim or 0} took step" in line
            if steps == after and len(ids) == processes:
                os.kill(launcher.pid if victim is None else ids[victim], signal.SIGTERM)
                break
        lines += launcher.stdout
        launcher.wait(timeout=100)
        return launcher.returncode, "".join(lines)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns a function that returns the bits of the parameters on each process after a run without signals."""

    @functools.cache
    def undisturbed(processes, kind):
        return run(processes, kind, tmp_path_factory.mktemp("undisturbed"))

    return undisturbed


def check(processes, kind, victims, folder, expected):
    assert len(set(expected)) == 1 and len(expected) == processes
    saved = 0
    for victim, after in victims:
        status, output = preempt(processes, kind, folder, victim, after)
        assert status == PREEMPTED, output
        exits = re.findall(r"^\[\d\] .*Preempted: the checkpoint of step \d+ is in .*exit status 42\.$", output, re.M)
        assert len(exits) == processes and not results(output)
        with jdist.Checkpointer(folder) as checkpointer:
            assert saved < checkpointer.latest < STEPS
            saved = checkpointer.latest
        steps = [
            max(map(int, re.findall(rf"process {i} took step (\d+)", output)), default=0) for i in range(processes)
        ]
        assert set(steps) <= {saved - 1, saved}  # the checkpoint is of the last step
    assert run(processes, kind, folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "fit"])
def test_sigterm_on_one_of_two_processes(kind, tmp_path, undisturbed):
    check(2, kind, [(1, 5)] if kind == "loop" else [(0, 10)], tmp_path, undisturbed(2, kind))


@pytest.mark.slow
def test_sigterm_before_the_first_step_and_by_the_launcher(tmp_path, undisturbed):
    check(2, "loop", [(1, 0), (None, 12)], tmp_path, undisturbed(2, "loop"))


@pytest.mark.slow
def test_sigterm_on_a_single_process(tmp_path, undisturbed):
    check(1, "fit", [(0, 9)], tmp_path, undisturbed(1, "fit"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, status", [("no handler", 143), ("own handler before", 3), ("own handler after", 3), ("JAX's service", 5)]
)
def test_sigterm_ends_joined_processes_unless_something_handles_it(kind, status):
    command = [sys.executable, "-m", "jdist", "run", "-n", "2", "--grace", "60", "sigterm_program.py", kind]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    launcher = subprocess.Popen(
        command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        lines = [line for line in (launcher.stdout.readline() for _ in range(2)) if "is ready" in line]
        assert len(lines) == 2, lines
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=50)  # before SIGKILL
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == status, output
    assert ("agreed" in output) == (kind == "JAX's service")
