"""The declared types of steps, `run`, `init` and the constructors, checked by pyright on a program with wrong lines."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

import jdist

PROGRAM = """
import dataclasses
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
import jdist
from flax.training.train_state import TrainState
from jdist import metrics

State = dict[str, jax.Array]
strategy = jdist.MirroredStrategy(jax.devices()[:2], virtual_replicas=4)
x = jnp.ones(3)


def initial_state(key: jax.Array) -> State:
    return {"w": jnp.zeros(3)}


def train(state: State, x: jax.Array, rate: float = 0.1) -> tuple[State, jax.Array]:
    return state, x


state = strategy.init(initial_state, jax.random.key(0))
assert_type(state, State)
step = strategy.step(train)
state, loss = step(state, x)
assert_type(state, State)
assert_type(loss, jax.Array)
state, loss = step(state, x, 0.2)
state, loss = step(state, x, rate=0.2)
state, loss = strategy.step(train, static_argnames="rate")(state, x=x, rate=0.2)
many = strategy.step(train, steps_per_call=2)
state, loss = many(state, [x, x])
assert_type(state, State)


@strategy.step(precision=jdist.Precision(), donate=False)
def decorated(state: State, x: jax.Array) -> tuple[State, float]:
    return state, 1.0


state, value = decorated(state, x)
assert_type(value, float)
assert_type(strategy.run(train, (state, x)), tuple[State, jax.Array])
untyped = strategy.step(lambda state, x: (state, None))
untyped(state, x)
strategy.compile(step, state, x)
strategy.reduce("mean", loss, axis=None)
assert_type(strategy.put(state), State)
assert_type(strategy.put(1.0), jax.Array)
assert_type(strategy.put(np.ones(3)), jax.Array)
assert_type(strategy.split((x, x)), tuple[jax.Array, jax.Array])
assert_type(strategy.gather(loss, axis=0), jax.Array)
assert_type(strategy.reduce("mean", loss, axis=None), jax.Array)
float(strategy.reduce("mean", jdist.PerReplica(x), axis=None))
with jdist.Checkpointer("folder") as checkpointer:
    assert_type(checkpointer.restore(strategy, like=state).state, State)
    assert_type(checkpointer.restore(strategy).step, int)
devices: tuple[jax.Device, ...] = strategy.devices
step.proof.replicated

strategy.step(3)  # error
strategy.step(initial_state)  # error
strategy.run("train")  # error
strategy.init(3)  # error
step(state)  # error
step(state, x, 0.1, 2)  # error
step(3, x)  # error
strategy.reduce("avg", loss, axis=None)  # error
jdist.MirroredStrategy(8)  # error
jdist.MirroredStrategy(None, jdist.AllReduce())  # error
jdist.ShardedStrategy("fsdp")  # error
jdist.variable(1.0, synchronization="sometimes")  # error

adam = optax.adam(1e-3)
model = (lambda key, x: x), (lambda w, x: x @ w)
jdist.Trainer(model, optax.chain(jdist.sync.mean(), adam), optax.squared_error, metrics={"a": metrics.Accuracy()}, seed=3)
jdist.Trainer(model, loss=optax.squared_error)
jdist.Trainer(model, adam, objective=lambda params, batch, key, apply: batch, metrics=["accuracy"])
jdist.Trainer(model, step=lambda state, batch: (state, batch), loss=optax.squared_error, metrics=["accuracy"])
jdist.Trainer(model, "adam")  # error
jdist.Trainer(model, adam, optax.squared_error, metrics=["accuracy"])  # error
jdist.Trainer(model, adam, seed="x")  # error

train_step = jdist.train_step(lambda w, x: w, adam)
train_state = jdist.TrainState.create(x, adam)
assert_type(train_step(train_state, x)[0], jdist.TrainState)
train_step(train_state, x, x)
train_step.on(strategy)(train_state, x)
train_step(train_state)  # error
train_step(3, x)  # error
train_step(train_state, x, x, x)  # error
jdist.train_step(lambda w, x: w, "adam")  # error


def train_flax(state: TrainState):
    assert_type(train_step(state, x)[0], TrainState)


@jdist.eval_step
def evaluate(state: Any, batch: Any) -> dict[str, jax.Array]:
    return {"a": batch}


assert_type(evaluate(state, x), dict[str, metrics.Metric])
assert_type(evaluate.over(state, [x]), dict[str, Any])
evaluate(state)  # error
jdist.eval_step(lambda state, batch: batch)(state, x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array

    @jdist.step
    def train(self, batch: jax.Array) -> tuple["Model", jax.Array]:
        return self, batch

    @jdist.eval_step
    def test(self, batch: jax.Array) -> dict[str, jax.Array]:
        return {"a": batch}


assert_type(Model(x).train(x), tuple[Model, jax.Array])
assert_type(Model(x).test(x), dict[str, metrics.Metric])
Model.train.on(strategy)
Model(x).train()  # error
Model(x).train(x, x)  # error
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="NOT TESTED: declared types. `pip install pyright`")
def test_pyright_accepts_correct_calls_and_rejects_wrong_ones(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(pathlib.Path(jdist.__file__).parent.parent)], "reportInvalidTypeForm": False})
    )
    completed = subprocess.run(
        ["pyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    errors = [item for item in json.loads(completed.stdout)["generalDiagnostics"] if item["severity"] == "error"]
    lines = {item["range"]["start"]["line"] + 1: item["message"] for item in errors}
    expected = {number for number, line in enumerate(PROGRAM.splitlines(), start=1) if line.endswith("# error")}
    assert set(lines) == expected, lines
