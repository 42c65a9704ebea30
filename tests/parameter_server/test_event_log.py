"""A recorded run and its replay: the same order, and the same bits."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import jdist
from jdist._src.command_line.main import main

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax, jdist

jdist.use_cpu_devices(4)
strategy = jdist.ParameterServerStrategy(workers=3, servers=2, record="run.log")
optimizer = optax.chain(jdist.sync.mean(), optax.adam(0.1))
make = lambda key: (w := jax.random.normal(key, (64, 64)), optimizer.init(w))
state = strategy.init(make, jax.random.key(0))

@strategy.step
def step(state, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w @ w) ** 2))(state[0])
    updates, opt_state = optimizer.update(grads, state[1], state[0])
    return (optax.apply_updates(state[0], updates), opt_state), None

data = np.random.default_rng(0).normal(size=(400, 64)).astype(np.float32)
for batch in strategy.distribute_dataset(data, batch_size=8):
    state, _ = step(state, batch)
np.save(sys.argv[1], np.asarray(state[0]))
print(strategy.staleness_counts())
"""


def run(folder, *command):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.slow
def test_replay_of_a_program_gives_the_same_bits(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    first = run(tmp_path, sys.executable, "train.py", "w.npy")
    assert first.returncode == 0, first.stderr
    weights = np.load(tmp_path / "w.npy")
    events = [json.loads(line) for line in (tmp_path / "run.log").read_text().splitlines()][1:]
    assert sum("apply" in event for event in events) == sum("start" in event for event in events) == 50
    (tmp_path / "w.npy").unlink()
    second = run(tmp_path.parent, sys.executable, "-m", "jdist", "replay", str(tmp_path / "run.log"))
    assert second.returncode == 0, second.stderr
    assert np.load(tmp_path / "w.npy").tobytes() == weights.tobytes()
    assert second.stdout == first.stdout and "50 updates: python train.py w.npy" in second.stderr


def make_log(path, *events):
    lines = [{"format": 1, "workers": 2, "arguments": [], "folder": "."}, *events]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_other_program_is_refused(tmp_path, monkeypatch):
    log = tmp_path / "run.log"
    make_log(log, {"start": 0, "worker": 0, "version": 0, "step": "other"}, {"apply": 0})
    monkeypatch.setenv("JDIST_REPLAY", str(log))
    strategy = jdist.ParameterServerStrategy(workers=2, record=log)

    def add(total, x):
        return total + jdist.all_reduce("mean", x), None

    with pytest.raises(RuntimeError, match=r"event 1 is `other`, call 1, and the program calls `add`, call 1"):
        strategy.step(add)(strategy.put(np.float32(0)), np.float32(1))


def test_longer_program_is_refused(tmp_path, monkeypatch):
    log = tmp_path / "run.log"
    make_log(log)
    monkeypatch.setenv("JDIST_REPLAY", str(log))
    strategy = jdist.ParameterServerStrategy(workers=2, record=log)
    with pytest.raises(RuntimeError, match="event 1 is the end of the run"):
        strategy.step(lambda s: (s + 1, None))(strategy.put(np.float32(0)))


def test_other_number_of_workers_is_refused(tmp_path, monkeypatch):
    log = tmp_path / "run.log"
    make_log(log)
    monkeypatch.setenv("JDIST_REPLAY", str(log))
    with pytest.raises(ValueError, match="recorded with 2 workers, and this strategy has 3"):
        jdist.ParameterServerStrategy(workers=3, record=log)


@pytest.mark.parametrize("text", ["", "hello\n", '{"format": 9}\n', "[]\n"])
def test_file_that_is_not_a_log_is_refused(text, tmp_path, capsys):
    log = tmp_path / "run.log"
    log.write_text(text)
    assert main(["replay", str(log)]) == 2
    assert "is not a log of `ParameterServerStrategy(record=...)`" in capsys.readouterr().err


def test_interrupted_line_is_omitted(tmp_path, monkeypatch):
    log = tmp_path / "run.log"
    make_log(log, {"start": 0, "worker": 1, "version": 0, "step": "add"})
    log.write_text(log.read_text() + '{"app')
    monkeypatch.setenv("JDIST_REPLAY", str(log))
    strategy = jdist.ParameterServerStrategy(workers=2, record=log)

    @strategy.step
    def add(total, x):
        return total + jdist.all_reduce("mean", x), None

    total, _ = add(strategy.put(np.float32(0)), np.float32(1))
    assert float(total) == 1
