"""A process that is killed at any moment of a save leaves a complete checkpoint, from which the next process continues."""

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
MANY_STEPS = 10**6


def start(folder, last):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(WORKER), str(folder), str(last)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check(folder):
    """Checks that every checkpoint is complete and consistent; returns the newest step."""
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with Checkpointer(folder) as checkpointer:
        steps = checkpointer.steps()
        for step in steps:
            restored = checkpointer.restore(strategy, step=step)
            assert restored.data_position == {"batch": step}
            assert int(restored.state["n"]) == step
            assert np.asarray(restored.state["per_replica"].tree).tolist() == [step, step + 1]
            assert all((np.asarray(restored.state[f"w{i}"]) == step).all() for i in range(8))
    return max(steps, default=0)


def kill_while_saving(folder, draw, kills):
    newest = 0
    for _ in range(kills):
        worker = start(folder, MANY_STEPS)
        assert worker.stdout.readline() == f"begins {newest}\n", worker.communicate()[1]
        # The first worker completes checkpoints before it is killed; the others may be killed during their first save.
        for step in range(newest + 1, newest + (2 if newest else 4)):
            assert worker.stdout.readline() == f"saves {step}\n"
        time.sleep(draw.uniform(0, 0.4))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        assert worker.returncode == -signal.SIGKILL
        assert newest <= (newest := check(folder))
    return newest


@pytest.mark.slow
def test_process_killed_at_random_moments_of_saves_leaves_the_last_complete_checkpoint(tmp_path):
    newest = kill_while_saving(tmp_path, random.Random(1), kills=7)
    assert newest > 0
    last = start(tmp_path, newest + 2)
    stdout, stderr = last.communicate(timeout=60)
    assert (last.returncode, stdout.splitlines()[0]) == (0, f"begins {newest}"), stderr
    assert check(tmp_path) == newest + 2
    names = {child.name for child in tmp_path.iterdir()}
    assert names == {"jdist.json", str(newest + 1), str(newest + 2)}  # incomplete checkpoints are deleted
