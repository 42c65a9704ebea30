"""The example of a tested project: passes on 1, 2 and 8 devices and on two processes, and fails without its all-reduce."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
REDUCTION = '    loss, grads = jdist.all_reduce("mean", (loss, grads))\n'


def run(folder, *arguments):
    """Runs the tests of a copy of the example as its user does; returns the output and the numbers of outcomes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_NUM", "PYTEST"))}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "pytest", "-p", "jdist_tools.pytest_plugin", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    return done.stdout, {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}


@pytest.fixture
def project(tmp_path):
    return shutil.copytree(ROOT / "examples/tested", tmp_path / "tested", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_example_passes_on_any_number_of_devices(project, devices):
    output, outcomes = run(project, "-o", f"jdist_devices={devices}")
    assert outcomes == {"passed": 12}, output
    assert f"jdist: {devices} CPU devices (jdist_devices)" in output


@pytest.mark.slow
def test_example_fails_without_its_all_reduce(project):
    code = (project / "regression.py").read_text()
    assert REDUCTION in code
    (project / "regression.py").write_text(code.replace(REDUCTION, ""))
    output, outcomes = run(project, "-o", "jdist_devices=2")
    assert outcomes == {"failed": 8, "passed": 4}, output  # the tests of the loss do not use the step
    assert "NotMirroredError" in output
