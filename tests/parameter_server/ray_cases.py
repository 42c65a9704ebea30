"""The programs of `test_ray.py`, which run in one process beside a Ray cluster: a line with a name, a line with the result."""

import functools
import gc
import json
import logging
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

import jdist
from jdist.coordinator import ClusterCoordinator, get_current_worker_index

import test_fit
import test_strategy
import test_tables

messages = []


def make_strategy(**options):
    return jdist.ParameterServerStrategy(**{"workers": 2, "servers": 2, "engine": "ray", **options})


@functools.cache
def shared_strategy(**options):
    """Returns the strategy of all programs with these options that do not kill its processes: Ray starts them in seconds."""
    return make_strategy(**options)


def kill(strategy, *numbers):
    """Kills processes of a strategy with SIGKILL: its workers have the first numbers, then come its servers."""
    actors = [*strategy._cluster.workers, *strategy._cluster.servers]
    processes = ray.get([actors[number].process.remote() for number in numbers])
    pids = [worker.pid for worker in strategy.worker_progress()]
    assert all(process.pid == pids[n] for n, process in zip(numbers, processes, strict=True) if n < len(pids)), pids
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)


def equals_one_device(name):
    optimizer = test_strategy.OPTIMIZERS[name]
    expected = test_strategy.train(jdist.OneDeviceStrategy("cpu:0"), optimizer)
    strategy = shared_strategy(max_staleness=0, variable_partitioner=test_strategy.two_rows)
    counts = strategy.staleness_counts()
    test_strategy.assert_close(test_strategy.train(strategy, optimizer), expected)
    return {staleness: number - counts.get(staleness, 0) for staleness, number in strategy.staleness_counts().items()}


def tables():
    expected = test_tables.train(jdist.OneDeviceStrategy("cpu:0"), optax.adagrad(0.1))
    strategy = make_strategy(max_staleness=0, workers=1, servers=3, variable_partitioner=test_tables.three_shards)
    results = test_tables.train(strategy, optax.adagrad(0.1))
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    ((parts, _),) = strategy._engine.executor._programs.values()
    return len(parts.tables)


def fit_and_checkpoints(folder):
    strategy = shared_strategy()
    result = test_fit.fit(strategy, epochs=6, validation_data=(test_fit.X, test_fit.Y), resume=folder + "/fit")
    assert result.steps == int(result.state.step) == 54
    accuracy = test_fit.make_trainer(strategy).evaluate(result.state, (test_fit.X, test_fit.Y), batch_size=24)[
        "accuracy"
    ]
    state, step = test_strategy.make_step(strategy, optax.adam(0.1))
    for batch in strategy.distribute_dataset(test_strategy.X, batch_size=24):
        state, loss = step(state, batch)
    folder += "/loop"
    with jdist.Checkpointer(folder) as checkpointer:
        checkpointer.save(10, {"state": state, "loss": loss})
    mirrored = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with jdist.Checkpointer(folder) as checkpointer:
        restored = checkpointer.restore(mirrored, like={"state": state, "loss": loss}).state
    test_strategy.assert_close(jdist.read_values(restored["state"]), jdist.read_values(state), rtol=0, atol=0)
    with jdist.Checkpointer(folder + "_of_mirrored") as checkpointer:
        checkpointer.save(10, restored["state"])
        back = checkpointer.restore(strategy, like=state).state
    back, _ = step(back, strategy.split(test_strategy.X[:24]))
    return accuracy, int(back["step"]), float(restored["loss"]) == float(loss)


def values_and_states():
    """Random keys, small dtypes, outputs of all kinds, several states; leaves that do not exist any more."""
    strategy = make_strategy(servers=1)

    @strategy.step
    def step(state, x):
        key, noise = jax.random.split(state["key"])
        new = {"key": key, "w": state["w"] + jdist.all_reduce("mean", x.astype(jnp.bfloat16)), "n": state["n"] + 1}
        return new, {"key": noise, "rows": x * 2, "number": jnp.float32(3)}

    expected = jax.random.key(7)
    make = lambda: {"key": jax.random.key(7), "w": jnp.zeros(3, jnp.bfloat16), "n": jnp.int32(0)}
    first, second = strategy.init(make), strategy.init(make)
    for number in range(4):
        first, outputs = step(first, np.ones(3))
        expected, noise = jax.random.split(expected)
        assert (jax.random.key_data(outputs["key"].read()) == jax.random.key_data(noise)).all(), number
    second, _ = step({**second, "n": 10}, np.ones(3))
    assert outputs["rows"].tolist() == [2, 2, 2] and float(outputs["number"]) == 3, outputs
    strategy.join()
    stored = len(strategy._engine.executor._leaves)
    del first
    second, _ = step(second, np.ones(3))
    left = len(strategy._engine.executor._leaves)
    return second["w"].tolist(), int(second["n"]), str(second["w"].dtype), stored, left


def not_finite(treatment):
    strategy = make_strategy(non_finite=treatment, workers=1, servers=1)

    @strategy.step
    def add(total, x):
        return total + jdist.all_reduce("mean", x), x

    total = strategy.put(np.float32(0))
    messages.clear()
    try:
        for x in (1, np.nan, 2, np.inf, 3):
            total, output = add(total, np.float32(x))
        strategy.join()
    except FloatingPointError as error:
        return str(error)
    return float(total), float(output), strategy.worker_progress()[0].skipped, messages


def lost_server_without_snapshots():
    strategy = make_strategy(workers=1, servers=1)
    total, add = (
        strategy.put(np.zeros(2, np.float32)),
        strategy.step(lambda w, x: (w + jdist.all_reduce("mean", x), None)),
    )
    total, _ = add(total, np.float32(1))
    float(total[0] if isinstance(total, np.ndarray) else np.asarray(total)[0])
    kill(strategy, 1)
    try:
        np.asarray(total)
    except RuntimeError as error:
        return str(error)


def make_counted_step(strategy, num_batches):
    """Returns the state and the step of a regression with a known answer, which counts the updates of each batch."""
    optimizer = optax.chain(jdist.sync.mean(), optax.adam(0.03))
    answer = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)

    def make():
        w = jnp.zeros((8, 4))
        return {"w": w, "opt": optimizer.init(w), "counts": jnp.zeros(num_batches, jnp.int32)}

    @strategy.step
    def step(state, batch):
        x, number = batch
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ (w - answer)) ** 2))(state["w"])
        updates, opt_state = optimizer.update(grads, state["opt"], state["w"])
        one = jdist.all_reduce("sum", jnp.zeros(num_batches, jnp.int32).at[number[0]].set(1))
        new = {"w": optax.apply_updates(state["w"], updates), "opt": opt_state, "counts": state["counts"] + one}
        return new, jdist.all_reduce("mean", loss)

    x = np.random.default_rng(1).normal(size=(num_batches * 4, 8)).astype(np.float32)
    data = x, np.arange(num_batches * 4, dtype=np.int32) // 4
    return make, step, strategy.distribute_dataset(data, batch_size=4)


def chaos(num_kills):
    """Kills random workers and servers."""
    folder, chance = tempfile.mkdtemp(), random.Random(num_kills)
    num_batches = 400
    between = num_batches // num_kills
    kills = {between * number + chance.randrange(between): chance.randrange(4) for number in range(num_kills)}
    with jdist.Checkpointer(folder, every=35) as checkpointer:
        strategy = make_strategy(snapshots=checkpointer, variable_partitioner=test_strategy.two_rows)
        make, step, batches = make_counted_step(strategy, num_batches)
        state = strategy.init(make)
        for number, batch in enumerate(batches):
            if number in kills:
                strategy.join()  # the actor that was killed before is replaced
                kill(strategy, kills[number])
            state, loss = step(state, batch)
        counts = np.asarray(state["counts"])
        calls = sum(strategy.staleness_counts().values())
        killed = sorted({"worker" if number < 2 else "server" for number in kills.values()})
        return counts.min().item(), counts.max().item(), calls == num_batches, float(loss) < 1e-3, killed


PROGRAM = """
import itertools, os, signal, sys
sys.path[:0] = {path}
import jdist, numpy as np
import ray_cases

with jdist.Checkpointer(sys.argv[1], every=20) as checkpointer:
    strategy = ray_cases.make_strategy(snapshots=checkpointer, workers=1, servers=1)
    make, step, batches = ray_cases.make_counted_step(strategy, 100)
    state, start = strategy.init(make), 0
    if checkpointer.latest is not None:
        restored = checkpointer.restore(strategy, like=state)
        state, start = restored.state, restored.step
    for number, batch in enumerate(itertools.islice(batches, start, None), start):
        if number == int(sys.argv[2]):
            checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        state, loss = step(state, batch)
    counts = np.asarray(state["counts"])
    print(start, counts.min(), counts.max())
"""


def killed_host_program(folder):
    program = pathlib.Path(folder) / "train.py"
    program.write_text(PROGRAM.format(path=[path for path in sys.path if "/tests" in path]))
    run = lambda kill_at: subprocess.run(
        [sys.executable, str(program), folder + "/snapshots", str(kill_at)], capture_output=True, text=True, check=False
    )
    killed, complete = run(55), run(-1)
    return killed.returncode, complete.stdout or complete.stderr


RECORDED = """
import sys
sys.path[:0] = {path}
import jax, jax.numpy as jnp, numpy as np, optax, jdist
import ray_cases

strategy = ray_cases.make_strategy(record="run.log")
optimizer = optax.chain(jdist.sync.mean(), optax.adam(0.1))
make = lambda key: (w := jax.random.normal(key, (64, 64)), optimizer.init(w))
state = strategy.init(make, jax.random.key(0))

@strategy.step
def step(state, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w @ w) ** 2))(state[0])
    updates, opt_state = optimizer.update(grads, state[1], state[0])
    return (optax.apply_updates(state[0], updates), opt_state), None

data = np.random.default_rng(0).normal(size=(400, 64)).astype(np.float32)
for number, batch in enumerate(strategy.distribute_dataset(data, batch_size=8)):
    if number == 20 and strategy._cluster is not None:
        ray_cases.kill(strategy, 0)
    state, _ = step(state, batch)
np.save(sys.argv[1], np.asarray(state[0]))
print(strategy.staleness_counts())
"""


def replay(folder):
    (pathlib.Path(folder) / "train.py").write_text(
        RECORDED.format(path=[path for path in sys.path if "/tests" in path])
    )
    run = lambda *command: subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    first = run(sys.executable, "train.py", "w.npy")
    weights = pathlib.Path(folder, "w.npy").read_bytes()
    pathlib.Path(folder, "w.npy").unlink()
    second = run(sys.executable, "-m", "jdist", "replay", "run.log")
    events = pathlib.Path(folder, "run.log").read_text()
    return (
        first.returncode or first.stderr,
        second.returncode or second.stderr,
        pathlib.Path(folder, "w.npy").read_bytes() == weights,
        second.stdout.splitlines()[-1] == first.stdout.splitlines()[-1],  # Ray prints there that a process has ended
        '"lost"' in events,
    )


def scheduled_functions():
    coordinator = ClusterCoordinator(shared_strategy())
    results = [coordinator.schedule(jax.jit(lambda x: {"square": x**2}), (np.float32(i),)) for i in range(4)]
    squares = [float(result["square"]) for result in coordinator.fetch(results)]
    counts = coordinator.per_worker_values(lambda: np.zeros((), int))

    def count(own):
        own += 1
        return get_current_worker_index()

    workers = coordinator.fetch([coordinator.schedule(count, (counts,)) for _ in range(10)])
    total = int(sum(counts.values))
    batches = iter(coordinator.create_per_worker_dataset([1, 2, 3]))
    read = sorted(coordinator.fetch([coordinator.schedule(next, (batches,)) for _ in range(2)]))
    for _ in range(7):
        coordinator.schedule(next, (batches,))
    return squares, total, sorted(set(workers)), read in ([1, 1], [1, 2]), error_of(coordinator.join)


def error_of(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", ())]


def fail():
    raise KeyError("bad row")


def wait(seconds, value):
    import time

    time.sleep(seconds)
    return value


def functions_that_cannot_run():
    strategy = shared_strategy(servers=1, workers=1)
    coordinator = ClusterCoordinator(strategy)
    errors = []
    for fn in (fail, lambda: strategy.num_workers):
        coordinator.schedule(fn)
        errors.append(error_of(coordinator.join))
    step = strategy.step(lambda w, x: (w + jdist.all_reduce("mean", x), None))
    total, _ = step(strategy.put(np.float32(0)), np.float32(1))
    coordinator.schedule(print, (total,))
    return [*errors, error_of(coordinator.join)]


def lost_workers_ft3_ft4_ft12():
    """All workers are killed, one of them twice; while an error is reported, and while a leaf is read."""
    strategy = make_strategy(servers=1)
    coordinator = ClusterCoordinator(strategy)
    results = [coordinator.schedule(wait, (0.2, number)) for number in range(12)]
    results[0].get()
    kill(strategy, 0, 1)
    results[5].get()
    kill(strategy, 0)
    values = coordinator.fetch(results)
    step = strategy.step(lambda w, x: (w + jdist.all_reduce("mean", x), None))
    total, _ = step(strategy.put(np.float32(0)), np.float32(1))
    assert float(total) == 1
    kill(strategy, 0)
    read_while_down = float(total)
    coordinator.schedule(fail)
    kill(strategy, 1)
    return values, read_while_down, error_of(coordinator.join)[:2]


def bad_input():
    strategy = shared_strategy(servers=1, workers=1)

    def step(w, x):
        jax.debug.print("{}", x)
        return w + jdist.all_reduce("mean", x), None

    too_many = error_of(lambda: make_strategy(workers=100))
    callback = error_of(strategy.step(step), np.float32(0), np.float32(1))
    devices = error_of(lambda: make_strategy(workers=["cpu:0"]))
    return too_many, callback, devices


class Messages(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


def main():
    os.dup2(2, 1)  # Ray and the workers print there
    with os.fdopen(int(sys.argv[1]), "w") as results:
        logging.getLogger("jdist").addHandler(Messages())
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            try:
                result = ["returned", globals()[name](*arguments)]
            except BaseException:
                result = ["raised", traceback.format_exc()]
            gc.collect()  # ends the actors
            results.write(json.dumps(result) + "\n")
            results.flush()


if __name__ == "__main__":
    main()
