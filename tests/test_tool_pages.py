"""The programs of the pages on sweeps, trackers and configuration run with the real libraries, in session `libraries`."""

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys

import pytest
from test_docs import ROOT

PAGES = ["sweeps", "trackers", "configuration"]
PROGRAMS = {
    name: code
    for page in PAGES
    for name, code in re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
}


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs a program of a page and returns its standard output."""

    def call(name, *arguments, status=0, changes=(), **variables):
        for program, code in PROGRAMS.items():
            for old, new in {"n_trials=12": "n_trials=4", **dict(changes)}.items():
                code = code.replace(old, new)
            (tmp_path / program).write_text(code, encoding="utf-8")
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", **variables}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, name, *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def test_pages_have_these_programs():
    names = ["parallel.py", "sweep.py", "train_config.py", "train_mlflow.py", "train_wandb.py", "tune.py"]
    assert sorted(PROGRAMS) == names
    for name, code in PROGRAMS.items():
        compile(code, name, "exec")


@pytest.mark.parametrize("name, devices", [("sweep.py", "2"), ("parallel.py", "4")])
def test_sweep_completes_its_trials(name, devices, run):
    pytest.importorskip("optuna")
    complete, pruned = map(
        int, re.search(r"(\d+) complete, (\d+) pruned", run(name, JAX_NUM_CPU_DEVICES=devices)).groups()
    )
    assert complete >= 1
    assert complete + pruned == 4


def test_run_of_wandb_continues_where_it_ended(run, tmp_path):
    pytest.importorskip("wandb")
    assert "last step 64" in run("train_wandb.py", WANDB_MODE="offline")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-run-1")
    assert list(folder.glob("*.wandb"))


def test_run_of_mlflow_continues_where_it_ended(run, tmp_path):
    pytest.importorskip("mlflow")
    run("train_mlflow.py")
    run("train_mlflow.py", changes={"epochs=4": "epochs=5"})
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        rows = database.execute(
            "SELECT DISTINCT run_uuid, step FROM metrics WHERE key = 'loss' ORDER BY step"
        ).fetchall()
    assert {run_id for run_id, _ in rows} == {(tmp_path / "run/mlflow_run_id").read_text()}
    assert [step for _, step in rows] == [10, 16, 20, 30, 32, 40, 48, 50, 60, 64, 70, 80]


def test_configuration_of_a_run_is_checked_when_it_continues(run, tmp_path):
    pytest.importorskip("tyro")
    arguments = ("--width", "16", "--optimizer.learning-rate", "0.02")
    assert "MirroredStrategy, step 64" in run("train_config.py", *arguments)
    assert json.loads((tmp_path / "run/config.json").read_text())["optimizer"]["learning_rate"] == 0.02
    assert "ShardedStrategy, step 80" in run("train_config.py", *arguments, "--strategy", "sharded", "--epochs", "5")
    assert "config.json differs in width" in run(
        "train_config.py", *arguments[2:], "--epochs", "5", "--strategy=sharded", status=1
    )
