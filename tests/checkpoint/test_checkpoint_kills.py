"""A process that is killed at any moment of a save leaves a complete checkpoint, and the next one goes on from it."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import jdist
from jdist._src.checkpoint.checkpointer import Checkpointer

WORKER = pathlib.Path(__file__).parent / "saving_worker.py"
FOR_EVER = 10**6


def start(folder, last):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(WORKER), str(folder), str(last)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check(folder):
    """Every checkpoint is complete, and of one step; returns the newest step."""
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with Checkpointer(folder) as checkpointer:
        steps = checkpointer.steps()
        for step in steps:
            found = checkpointer.restore(strategy, step=step)
            assert found.data_position == {"batch": step}
            assert int(found.state["n"]) == step
            assert np.asarray(found.state["own"].tree).tolist() == [step, step + 1]
            assert all((np.asarray(found.state[f"w{i}"]) == step).all() for i in range(8))
    return max(steps, default=0)


def kill_while_saving(folder, draw, kills):
    newest = 0
    for _ in range(kills):
        worker = start(folder, FOR_EVER)
        assert worker.stdout.readline() == f"begins {newest}\n", worker.communicate()[1]
        # The first writes whole checkpoints before it is killed, the others may be killed in their first.
        for step in range(newest + 1, newest + (2 if newest else 4)):
            assert worker.stdout.readline() == f"saves {step}\n"
        time.sleep(draw.uniform(0, 0.4))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        assert worker.returncode == -signal.SIGKILL
        assert newest <= (newest := check(folder))
    return newest


@pytest.mark.parametrize(
    "seed, kills", [(0, 3), pytest.param(1, 8, marks=pytest.mark.slow)], ids=["a_few_kills", "many_kills"]
)
def test_process_killed_at_random_moments_of_saves_leaves_the_last_complete_one(seed, kills, tmp_path):
    newest = kill_while_saving(tmp_path, random.Random(seed), kills)
    assert newest > 0
    last = start(tmp_path, newest + 2)
    printed, wrong = last.communicate(timeout=60)
    assert (last.returncode, printed.splitlines()[0]) == (0, f"begins {newest}"), wrong
    assert check(tmp_path) == newest + 2
    names = {child.name for child in tmp_path.iterdir()}
    assert names == {"jdist.json", str(newest + 1), str(newest + 2)}  # what was left unfinished is gone
