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
    assert "jdist replay: equal: 50 updates, 5 digests of the state." in second.stderr


# Adds to a scalar, as many times as the file "calls" says, the numbers in the file "data".
COUNTING = """
import jdist, pathlib, numpy as np
strategy = jdist.ParameterServerStrategy(workers=1, record=pathlib.Path("name").read_text())
state = strategy.put(np.float32(0))

@strategy.step
def add(total, x):
    return total + jdist.all_reduce("mean", x), None

for number in eval(pathlib.Path("data").read_text()):
    state, _ = add(state, np.float32(number))
"""


def write_files(folder, numbers, name="run.log"):
    for file, text in {"count.py": COUNTING, "data": repr(numbers), "name": name}.items():
        (folder / file).write_text(text)


@pytest.mark.slow
def test_replay_names_the_first_update_that_differs(tmp_path):
    numbers = list(range(25))
    write_files(tmp_path, numbers)
    assert run(tmp_path, sys.executable, "count.py").returncode == 0
    log = tmp_path / "run.log"
    recorded = log.read_text()
    cut = "".join(recorded.splitlines(keepends=True)[:-2])
    verdicts = [
        ("equal: 25 updates, 3 digests of the state.", numbers, "run.log", recorded, 0),
        (
            "differs from update 20: the state was equal after update 10.",
            [*numbers[:15], *numbers[10:20]], "run.log", recorded, 1,
        ),
        (
            "equal: 20 updates, 2 digests of the state; but the program ended after 20 of 25 updates.",
            numbers[:20], "run.log", recorded, 1,
        ),
        (
            "equal: 25 updates, 2 digests of the state; but the log has no end: the recorded run was killed, or the file was cut.",
            numbers, "run.log", cut, 1,
        ),
        (
            "the program did not replay this file: it ended before its first step, or records another file.",
            numbers, "other.log", recorded, 1,
        ),
    ]  # fmt: skip
    for verdict, data, name, text, status in verdicts:
        write_files(tmp_path, data, name)
        log.write_text(text)
        replay = run(tmp_path, sys.executable, "-m", "jdist", "replay", "run.log")
        assert (replay.returncode, replay.stderr.splitlines()[-1]) == (status, f"jdist replay: {verdict}")


@pytest.fixture
def replaying(tmp_path, monkeypatch):
    """Returns a function from events, and text after them, to a strategy that replays a log of two workers with these events."""

    def start(*events, text="", workers=2):
        log = tmp_path / "run.log"
        lines = [{"format": 2, "workers": 2, "arguments": [], "folder": "."}, *events]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines) + text)
        monkeypatch.setenv("JDIST_REPLAY", str(log))
        return jdist.ParameterServerStrategy(workers=workers, record=log)

    return start


def add(total, x):
    return total + jdist.all_reduce("mean", x), None


@pytest.mark.parametrize("events, message", [
    ([{"start": 0, "worker": 0, "version": 0, "step": "other"}, {"apply": 0}],
     "event 1 is `other`, call 1, and the program calls `add`, call 1"),
    ([], "event 1 is the end of the run"),
], ids=["other", "longer"])  # fmt: skip
def test_other_program_is_refused(events, message, replaying):
    strategy = replaying(*events)
    with pytest.raises(RuntimeError, match=message):
        strategy.step(add)(strategy.put(np.float32(0)), np.float32(1))


def test_other_number_of_workers_is_refused(replaying):
    with pytest.raises(ValueError, match="recorded with 2 workers, and this strategy has 3"):
        replaying(workers=3)


def test_log_of_another_version_is_refused(tmp_path, capsys):
    (tmp_path / "run.log").write_text('{"format": 9}\n')
    assert main(["replay", str(tmp_path / "run.log")]) == 2
    assert "is a log of format 9, written by another version of jdist, which reads format 2" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "hello\n", "{}\n", "[]\n"])
def test_file_that_is_not_a_log_is_refused(text, tmp_path, capsys):
    log = tmp_path / "run.log"
    log.write_text(text)
    assert main(["replay", str(log)]) == 2
    assert "is not a log of `ParameterServerStrategy(record=...)`" in capsys.readouterr().err


def test_interrupted_line_is_omitted(replaying):
    strategy = replaying({"start": 0, "worker": 1, "version": 0, "step": "add"}, text='{"app')
    total, _ = strategy.step(add)(strategy.put(np.float32(0)), np.float32(1))
    assert float(total) == 1
