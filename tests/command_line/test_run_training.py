"""Training under `jdist run` with restarts: processes are killed at random moments, and the result is bitwise the same."""

import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from launchers import COMMAND, ROOT

PROGRAM = pathlib.Path(__file__).parent / "killed_training.py"


@pytest.fixture
def launch(tmp_path):
    """Returns a function that starts the training under `jdist run`."""
    shutil.copy(PROGRAM, tmp_path / "train.py")
    launchers = []

    def launch(options, folder, *arguments):
        (tmp_path / folder).mkdir()
        # A process that is killed may leave an incomplete entry in the compilation cache: the other tests have their own.
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/kit'}",
        }
        with (tmp_path / folder / "errors").open("w") as errors:
            launcher = subprocess.Popen(
                [*COMMAND, *options.split(), "--devices-per-process", "1", "train.py", folder, *arguments],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        launchers.append(launcher)
        return launcher

    yield launch
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.kill()
        launcher.wait()
        launcher.stdout.close()


def bits(folder):
    return (folder / "result").read_bytes()


def kill_repeatedly(launcher, folder, is_enough, draw):
    """Kills random processes, half of them while a checkpoint is written.

    Args:
        launcher: The launcher of the processes.
        folder: The folder of the training.
        is_enough: Returns whether to stop, from the number of processes at each kill. The only process of an elastic job is
            not killed: the job can grow.
        draw: The random numbers.

    Returns:
        The number of processes at each kill, and the number of kills at which a checkpoint was incomplete.
    """
    counts, hits = [], 0
    attempt, pids, trains = -1, {}, set()
    for line in launcher.stdout:
        if match := re.match(r"\[(\d+)\] pid (\d+) of attempt (\d+)", line):
            if int(match[3]) != attempt:
                attempt, pids, trains = int(match[3]), {}, set()
            pids[int(match[1])] = int(match[2])
        elif match := re.match(r"\[(\d+)\] trains from step", line):
            trains.add(int(match[1]))
        if len(pids) > 1 and trains == set(pids) and not is_enough(counts):
            if draw.random() < 0.5:
                wait_for_incomplete_checkpoint(folder, launcher)
            else:
                time.sleep(draw.uniform(0, 0.5))
            victim = draw.choice(sorted(pids))
            os.kill(pids[victim], signal.SIGKILL)
            hits += bool(incomplete(folder))
            counts.append(len(pids))
            trains = set()
    return counts, hits


def incomplete(folder):
    return list((folder / "checkpoints").glob("*tmp*"))


def wait_for_incomplete_checkpoint(folder, launcher):
    deadline = time.monotonic() + 60
    while not incomplete(folder):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.slow
def test_training_whose_processes_are_killed_4_times_ends_with_the_same_bits(launch, tmp_path):
    undisturbed = launch("-n 2", "undisturbed")
    assert undisturbed.wait(timeout=120) == 0, (tmp_path / "undisturbed/errors").read_text()
    killed = launch("-n 2 --max-restarts 4", "killed", "saves")
    counts, hits = kill_repeatedly(killed, tmp_path / "killed", lambda counts: len(counts) == 4, random.Random(8))
    assert killed.wait(timeout=60) == 0, (tmp_path / "killed/errors").read_text()
    assert len(counts) == 4 and hits >= 2  # of three kills that wait for an incomplete checkpoint, with this seed
    assert bits(tmp_path / "killed") == bits(tmp_path / "undisturbed")


@pytest.mark.slow
def test_exact_training_with_other_numbers_of_processes_ends_with_the_same_bits(launch, tmp_path):
    undisturbed = launch("-n 1", "undisturbed", "exact")
    assert undisturbed.wait(timeout=120) == 0, (tmp_path / "undisturbed/errors").read_text()
    killed = launch("--elastic 1:3 --rejoin-after 12 --max-restarts 20", "killed", "exact", "saves", "slow")

    def is_enough(counts):
        return len(counts) >= 2 and len(set(counts)) > 1 and "more process" in (tmp_path / "killed/errors").read_text()

    counts, _ = kill_repeatedly(killed, tmp_path / "killed", is_enough, random.Random(0))
    assert killed.wait(timeout=100) == 0, (tmp_path / "killed/errors").read_text()
    assert is_enough(counts)
    assert bits(tmp_path / "killed") == bits(tmp_path / "undisturbed")


@pytest.mark.slow
def test_global_batches_do_not_depend_on_the_number_of_processes(launch, tmp_path):
    results = []
    for count in (1, 2, 3):  # 3 processes pad the batches of 250 examples
        launcher = launch(f"-n {count}", f"with_{count}", "short")
        assert launcher.wait(timeout=120) == 0, (tmp_path / f"with_{count}/errors").read_text()
        results.append(np.frombuffer(bits(tmp_path / f"with_{count}"), np.float32))
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-4, atol=1e-6)
