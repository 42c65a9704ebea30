"""`jdist plan FILE.py`."""

import json

import pytest

from jdist._src.command_line.main import main

PLAN = """
import jax, jax.numpy as jnp, jdist

def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - 0.1 * jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)

def plan():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    batch = jdist.PerReplica(jax.ShapeDtypeStruct((2, 4, 16), "float32"))
    return jdist.plan(strategy, step, lambda: jnp.zeros((16, 16)), batch, over=[2, 4], {options})
"""


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Returns a function from the text of `train_plan.py` and options to the exit status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(text, *options):
        (tmp_path / "train_plan.py").write_text(text)
        status = main(["plan", "train_plan.py", *options])
        return status, *capsys.readouterr()

    return run


def test_it_prints_the_tables(run):
    status, output, _ = run(PLAN.format(options=""))
    assert status == 0
    assert "Plan of step" in output and "all-reduce" in output and "train_plan.py:6" in output


def test_json_and_page(run, tmp_path):
    status, output, errors = run(PLAN.format(options=""), "--json", "--html", "plan.html")
    assert status == 0
    assert [size["devices"] for size in json.loads(output)["sizes"]] == [2, 4]
    assert (tmp_path / "plan.html").read_text().startswith("<!DOCTYPE html>")
    assert "plan.html" in errors


def test_exit_status_is_1_if_the_step_does_not_fit(run):
    status, output, _ = run(PLAN.format(options="device_memory=100, remedies=False"))
    assert status == 1
    assert "no" in output


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1", "train_plan.py does not define a function `plan`. Write `def plan(): return jdist.plan("),
        ("plan = 3", "does not define a function `plan`"),
        ("def plan(): return 3", "must return the result of `jdist.plan(...)`, and returned int"),
        ("def plan(): pass", "must return the result of `jdist.plan(...)`, and returned None"),
    ],
)
def test_file_without_a_plan_is_named(run, text, message):
    status, output, errors = run(text)
    assert (status, output) == (2, "")
    assert message in errors


def test_missing_file_is_named(capsys):
    assert main(["plan", "nothing.py"]) == 2
    assert "nothing.py does not exist" in capsys.readouterr().err
