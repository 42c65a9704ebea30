"""Only one job at a time saves into a folder of checkpoints; reading is always possible."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.checkpoint.storage import CheckpointError

from laws import STRATEGIES

# Saves step 1, forks a child that runs longer than its parent, and waits.
HOLDER = """
import os, sys, warnings
import numpy as np, jdist
warnings.simplefilter("ignore")
checkpointer = jdist.Checkpointer(sys.argv[1])
checkpointer.save(1, jdist.OneDeviceStrategy("cpu:0").put(np.arange(3.0)))
checkpointer.wait()
if os.fork() == 0:
    os.close(1)
    sys.stdin.read()
    os._exit(0)
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def state():
    return STRATEGIES["one_device"]().put(np.arange(3.0))


@pytest.fixture
def holder(tmp_path):
    """Another process that has saved step 1 and is still running."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "saved\n"
    yield process
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()


def test_folder_of_a_running_process_can_be_read_and_is_locked_until_it_is_killed(holder, state, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            with pytest.raises(
                CheckpointError, match=r"Another process saves to .*Use another folder, or end that process"
            ):
                checkpointer.save(step, state)
        assert checkpointer.restore(STRATEGIES["one_device"]()).state.tolist() == [0, 1, 2]
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert checkpointer.save(2, state)
    assert checkpointer.steps() == (1, 2)


def test_second_checkpointer_of_a_process_saves_when_the_first_is_closed_or_garbage_collected(state, tmp_path):
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.save(1, state)
    with pytest.raises(CheckpointError, match=r"Another `Checkpointer` of this process saves to .*Close it first"):
        second.save(2, state)
    first.wait()
    assert second.restore(STRATEGIES["one_device"]()).step == 1
    first.close()
    assert second.save(2, state)
    with pytest.raises(CheckpointError, match="Another `Checkpointer` of this process"):
        first.save(3, state)
    second.wait()
    del second
    assert first.save(3, state)
    first.close()
    assert first.steps() == (1, 2, 3)
