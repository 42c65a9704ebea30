"""`jdist run --engine ray` with restarts on a Ray cluster of two nodes, of which one is lost and comes back."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from launchers import read_until
from ray_namespace import ROOT, has_nodes, ray_cluster, ray_node

pytestmark = pytest.mark.slow
NODE = {"num_cpus": 1, "store_bytes": 80_000_000}


@pytest.fixture(scope="module")
def prefix():
    """Returns the command in front of a command that runs beside a Ray cluster of one node with one CPU."""
    with ray_cluster(**NODE) as prefix:
        yield prefix


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Returns a function that starts training under `jdist run`, and returns the launcher and the folder of the training."""
    folder = tmp_path_factory.mktemp("training")
    shutil.copy(pathlib.Path(__file__).parent / "killed_training.py", folder / "train.py")
    with contextlib.ExitStack() as stack:

        def launch(prefix, options, name, *arguments):
            (folder / name).mkdir()
            command = [
                *prefix,
                sys.executable,
                "-m",
                "jdist_tools",
                "run",
                *options.split(),
                "--devices-per-process",
                "1",
            ]
            with (folder / name / "errors").open("w") as errors:
                launcher = subprocess.Popen(
                    [*command, "train.py", name, "exact", *arguments],
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/kit'}"},
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            stack.enter_context(launcher)
            stack.callback(launcher.kill)
            return launcher, folder / name

        yield launch


@pytest.fixture(scope="module")
def undisturbed(launch):
    """Returns the bits of the parameters after training in one process."""
    launcher, folder = launch([], "-n 1", "undisturbed")
    output, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, output + (folder / "errors").read_text()
    return (folder / "result").read_bytes()


@pytest.mark.parametrize(
    "options, continues, reason",
    [
        (
            "-n 2 --max-restarts 9",
            False,
            "waits for nodes of the Ray cluster: at least 2 processes must run, and 1 can run",
        ),
        ("--elastic 1:2 --rejoin-after 2", True, "The job continues with 1 instead of 2 processes."),
    ],
    ids=["restarts", "elastic"],
)
def test_training_continues_after_a_node_was_lost_and_ends_with_the_same_bits(
    prefix, launch, undisturbed, options, continues, reason, request
):
    with ray_node(prefix, **NODE) as node:
        launcher, folder = launch(prefix, f"--engine ray {options}", request.node.callspec.id, "saves", "slow")
        errors = folder / "errors"
        read_until(launcher.stdout, "[0] trains from step", "[1] trains from step")
        node.kill()
    if continues:
        lines = read_until(launcher.stdout, "of attempt 1", "trains from step")
        assert not any(line.startswith("[1] pid") for line in lines if "of attempt 1" in line)
    assert has_nodes(prefix, 1)
    with ray_node(prefix, **NODE):
        output, _ = launcher.communicate(timeout=200)
        assert launcher.returncode == 0, errors.read_text()
    assert reason in errors.read_text()
    assert "[1] trains from step" in output
    assert ("1 more process can run on the Ray cluster" in errors.read_text()) == continues
    assert (folder / "result").read_bytes() == undisturbed
