"""`ParameterServerStrategy` on threads of one process: without staleness it is one replica, and no update is ever lost."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 6)).astype(np.float32)
PARAMS = {"a": RNG.normal(size=(6, 4)).astype(np.float32), "b": np.zeros(4, np.float32), "c": np.float32(1)}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam_clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "lamb": optax.lamb(1e-2),
    "schedule": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.01, 20)),
    "lookahead_of_norm": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.01, 0.9, nesterov=True)),
    "skipped": optax.apply_if_finite(optax.adam(1e-2), 3),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 3),
    "loss_scale": jdist.sync.dynamic_loss_scale(optax.adam(1e-2), initial=8.0),
    "delay_compensated": optax.chain(jdist.sync.delay_compensation(), optax.sgd(0.1), jdist.sync.scale_by_staleness()),
}


def two_rows(shape, dtype):
    return [min(2, shape[0]), *(1 for _ in shape[1:])]


def make_step(strategy, optimizer):
    optimizer = optax.chain(jdist.sync.mean(), optax.GradientTransformation(optimizer.init, optimizer.update))

    def make(key):
        params = jax.tree.map(jnp.asarray, PARAMS)
        return {
            "params": params,
            "opt": optimizer.init(params),
            "step": jnp.int32(0),
            "key": key,
            "total": jdist.SyncOnRead(jnp.zeros(2), "sum"),
        }

    @strategy.step
    def step(state, x):
        key, noise_key = jax.random.split(state["key"])

        def loss_fn(params):
            noise = 0.01 * jax.random.normal(jdist.replica_key(noise_key), (4,))
            return jnp.mean((x @ params["a"] + params["b"] * params["c"] + noise - 1) ** 2)

        loss, grads = jdist.value_and_grad(loss_fn)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
            "step": state["step"] + 1,
            "key": key,
            "total": state["total"] + jnp.stack([loss, 1.0]),
        }
        return new, jdist.all_reduce("mean", loss)

    return strategy.init(make, jax.random.key(0)), step


def train(strategy, optimizer):
    state, step = make_step(strategy, optimizer)
    losses = []
    for batch in strategy.distribute_dataset(X, batch_size=8):
        state, loss = step(state, batch)
        losses.append(loss)
    return jdist.read_values(state), [float(loss) for loss in losses]


def assert_close(tree, other, rtol=2e-5, atol=1e-6):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(other), strict=True):
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("partitioner", [two_rows, pytest.param(None, marks=pytest.mark.slow)], ids=["split", "whole"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_ps16_without_staleness_it_equals_one_device(name, partitioner):
    expected = train(jdist.OneDeviceStrategy("cpu:0"), OPTIMIZERS[name])
    strategy = jdist.ParameterServerStrategy(workers=2, servers=2, max_staleness=0, variable_partitioner=partitioner)
    results = train(strategy, OPTIMIZERS[name])
    assert_close(results, expected)
    assert strategy.staleness_counts() == {0: 30}


@pytest.mark.parametrize("bound", [None, 1])
def test_every_batch_is_one_update_and_staleness_is_bounded(bound):
    strategy = jdist.ParameterServerStrategy(workers=4, servers=2, max_staleness=bound)
    state, losses = train(strategy, optax.sgd(0.05))
    counts = strategy.staleness_counts()
    assert int(state["step"]) == sum(counts.values()) == len(losses) == 30
    assert bound is None or max(counts) <= bound  # without a bound, any staleness is possible
    np.testing.assert_allclose(state["total"], [sum(losses), 30], rtol=1e-5)
    assert losses[-1] < losses[0]


def replayed(tmp_path, monkeypatch, num_workers, *events):
    """Returns a strategy that runs calls of the step `add` in a given order: call 2 starts at 2, and is applied at -2."""
    log = tmp_path / "run.log"
    lines = [{"format": 2, "workers": num_workers, "arguments": [], "folder": "."}]
    busy, version = {}, 0
    for event in events:
        if event > 0:
            busy[event] = next(worker for worker in range(num_workers) if worker not in busy.values())
            lines.append({"start": event - 1, "worker": busy[event], "version": version, "step": "add"})
        else:
            del busy[-event]
            version += 1
            lines.append({"apply": -event - 1})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("JDIST_REPLAY", str(log))
    return jdist.ParameterServerStrategy(workers=num_workers, servers=1, record=log)


def test_slow_worker_does_not_stop_the_others_and_its_staleness_is_counted(tmp_path, monkeypatch):
    strategy = replayed(tmp_path, monkeypatch, 2, 1, 2, -2, 3, -3, 4, -4, -1)

    @strategy.step
    def add(state, x):
        total, count = state
        return (total + jdist.all_reduce("mean", x * (total + 1)), count + 1), None

    state = strategy.put((np.float32(0), np.int32(0)))
    for x in (1, 2, 3, 4):
        state, _ = add(state, np.float32(x))
    assert [float(leaf) for leaf in state] == [2 + 3 * 3 + 4 * 12 + 1, 4]  # call 1 has read 0
    assert strategy.staleness_counts() == {0: 3, 3: 1}
    assert [worker[:3] for worker in strategy.worker_progress()] == [(1, 0, 3), (3, 2, 0)]


def test_staleness_divides_updates(tmp_path, monkeypatch):
    strategy = replayed(tmp_path, monkeypatch, 2, 1, 2, -2, 3, -3, 4, -4, -1)
    tx = jdist.sync.scale_by_staleness()

    @strategy.step
    def add(total, x):
        return total + tx.update(jdist.all_reduce("mean", x), ())[0], None

    total = strategy.put(np.float32(0))
    for x in (6, 10, 10, 10):
        total, _ = add(total, np.float32(x))
    assert float(total) == 10 + 10 + 10 + 6 / 3


def test_delay_compensation_uses_the_parameters_that_the_worker_read(tmp_path, monkeypatch):
    strategy = replayed(tmp_path, monkeypatch, 2, 1, 2, -2, -1)
    tx = jdist.sync.delay_compensation(strength=0.5)

    @strategy.step
    def add(w, x):
        return w + tx.update(jdist.all_reduce("mean", x), (), w)[0], None

    w = strategy.put(np.float32(1))
    for x in (2, 4):
        w, _ = add(w, np.float32(x))
    assert float(w) == 1 + 4 + (2 + 0.5 * 2 * 2 * 4)


def test_workers_that_run_together_draw_different_numbers():
    strategy = jdist.ParameterServerStrategy(workers=3, servers=1)

    @strategy.step
    def draw(count, key):
        return count + 1, jax.random.uniform(jdist.replica_key(jax.random.fold_in(key, count)))

    count, numbers = strategy.put(np.int32(0)), []
    for _ in range(20):
        count, number = draw(count, jax.random.key(0))
        numbers.append(number)
    assert len({number.tree.item() for number in numbers}) == 20


def test_placement_is_round_robin_row_ps1():
    strategy = jdist.ParameterServerStrategy(workers=1, servers=3)

    @strategy.step
    def step(state, x):
        return [leaf + jdist.all_reduce("mean", x) for leaf in state], None

    state, _ = step(strategy.put([np.zeros(2, np.float32)] * 4), np.float32(1))
    assert [[shard.server for shard in leaf.storage.shards] for leaf in state] == [[0], [1], [2], [0]]


def test_partitioner_with_a_wrong_answer_is_refused_row_pt10():
    strategy = jdist.ParameterServerStrategy(workers=1, variable_partitioner=lambda shape, dtype: [1, 2])

    @strategy.step
    def add(state, x):
        return {"w": state["w"] + jdist.all_reduce("mean", x)}, None

    with pytest.raises(ValueError, match=r"state\['w'\]"):
        add({"w": np.zeros((4, 4), np.float32)}, np.float32(1))


def test_partitioner_divides_rows_over_servers_with_the_optimizer_state():
    strategy = jdist.ParameterServerStrategy(workers=1, servers=2, variable_partitioner=two_rows, max_staleness=0)
    state, step = make_step(strategy, optax.adam(0.1))
    state, _ = step(state, strategy.split(X[:8]))
    shards = lambda leaf: [(shard.server, shard.start, shard.stop) for shard in leaf.storage.shards]
    mean_of_a = state["opt"][1][0].mu["a"]
    assert shards(state["params"]["a"]) == shards(mean_of_a)
    assert sorted(shards(mean_of_a), key=lambda shard: shard[1]) in ([(0, 0, 3), (1, 3, 6)], [(1, 0, 3), (0, 3, 6)])
    assert [x.shape for x in mean_of_a.storage.arrays] == [(3, 4), (3, 4)]


def test_reading_waits_for_the_calls_before():
    strategy = jdist.ParameterServerStrategy(workers=3)

    @strategy.step
    def add(total, x):
        return total + jdist.all_reduce("mean", x), None

    total = strategy.put(np.float32(0))
    for number in range(1, 8):
        total, _ = add(total, np.float32(1))
        if number % 3 == 0:
            assert float(total) == number
    assert total.item() == total.tolist() == np.asarray(total) == int(total) == 7
    assert jnp.asarray(total) + 1 == 8 and bool(total) and total.size == 1 and total.ndim == 0
    assert repr(total) == "ServerArray(float32[])"


@pytest.mark.slow
def test_workers_may_have_devices_of_their_own():
    expected = train(jdist.OneDeviceStrategy("cpu:0"), OPTIMIZERS["adam_clipped"])
    strategy = jdist.ParameterServerStrategy(workers=["cpu:1", "cpu:2"], max_staleness=0, variable_partitioner=two_rows)
    assert [str(device) for device in strategy.worker_devices] == [str(device) for device in jax.devices()[1:3]]
    assert_close(train(strategy, OPTIMIZERS["adam_clipped"]), expected)
    strategy = jdist.ParameterServerStrategy(workers=["cpu:1", "cpu:2"])
    state, losses = train(strategy, OPTIMIZERS["sgd"])
    assert int(state["step"]) == 30 and losses[-1] < losses[0] and strategy.num_workers == 2


def test_two_steps_share_one_state():
    strategy = jdist.ParameterServerStrategy(workers=2, servers=2)

    @strategy.step
    def first(state, x):
        return {**state, "a": state["a"] + jdist.all_reduce("mean", x)}, None

    @strategy.step
    def norm(state):
        both = jnp.sqrt(jnp.sum(state["a"] ** 2) + jnp.sum(state["b"] ** 2))
        return {"a": state["a"] / both, "b": state["b"] / both}, None

    state = strategy.put({"a": np.float32([3, 0]), "b": np.float32([4, 0])})
    state, _ = norm(first(state, np.float32(0))[0])
    np.testing.assert_allclose(state["a"], [0.6, 0])
    np.testing.assert_allclose(state["b"], [0.8, 0])


def test_leaf_of_the_host_program_replaces_the_stored_one():
    strategy = jdist.ParameterServerStrategy(workers=2)

    @strategy.step
    def add(state, x):
        return {"w": state["w"] + jdist.all_reduce("mean", x), "n": state["n"] + 1}, None

    state = {"w": np.float32(0), "n": np.int32(0)}
    for _ in range(3):
        state, _ = add(state, np.float32(1))
    state, _ = add({**state, "w": np.float32(10)}, np.float32(1))
    assert float(state["w"]) == 11 and int(state["n"]) == 4


def test_several_steps_per_call():
    strategy = jdist.ParameterServerStrategy(workers=2)

    def add(total, x):
        return total + jdist.all_reduce("mean", x), x * 2

    step = strategy.step(add, steps_per_call=3)
    total, outputs = step(strategy.put(np.float32(0)), [np.float32(i) for i in range(3)])
    assert float(total) == 3 and outputs.tolist() == [0, 2, 4]


def test_run_reduce_gather_and_local_results_read_the_state_row_ps18():
    strategy = jdist.ParameterServerStrategy(workers=2)

    @strategy.step
    def add(state, x):
        return state + jdist.all_reduce("mean", x), jnp.ones(2) * x

    state, rows = add(strategy.put(np.float32([1, 1])), np.float32(2))
    assert strategy.run(lambda s: (s + 1, s - 1), (state,))[0].tolist() == [4, 4]
    assert strategy.run(lambda s: s + jdist.all_reduce("sum", jdist.replica_id()), kwargs={"s": state}).tolist() == [
        3,
        3,
    ]
    assert strategy.reduce("sum", state, axis=0).tolist() == 6
    assert strategy.gather(state, axis=0).tolist() == [3, 3]
    assert strategy.local_results(state)[0].tolist() == [3, 3]
    assert strategy.describe(state).bytes == 8 and strategy.put(state).tolist() == [3, 3]
    assert rows.tolist() == [2, 2]


def test_sum_over_the_replica_of_a_call_rows_ps19_ps20():
    strategy = jdist.ParameterServerStrategy(workers=2)

    def both(v, x):
        x = x + 0 * jdist.replica_id()
        return jdist.all_reduce("sum", (x + v, x - v)), jdist.all_reduce("sum", jdist.replica_id() + 1)

    (total, difference), numbers = strategy.run(both, (strategy.put(1.0), 3.0))
    replicas = strategy.num_replicas_in_sync
    assert (float(total), float(difference)) == (4 * replicas, 2 * replicas)
    assert int(numbers) == sum(range(1, replicas + 1))
    assert float(strategy.reduce("sum", strategy.run(lambda v: 3.0 + v, (strategy.put(1.0),)), axis=None)) == 4


def test_checkpoint_restores_under_other_strategies_and_back(tmp_path):
    strategy = jdist.ParameterServerStrategy(workers=3, servers=2, variable_partitioner=two_rows)
    state, step = make_step(strategy, optax.adam(0.1))
    for batch in strategy.distribute_dataset(X, batch_size=24):
        state, _ = step(state, batch)
    with jdist.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(10, state)
    expected = jdist.read_values(state)
    for other in (jdist.MirroredStrategy(["cpu:0", "cpu:1"]), jdist.ShardedStrategy()):
        with jdist.Checkpointer(tmp_path) as checkpointer:
            restored = checkpointer.restore(other, like=state).state
        assert_close(jdist.read_values(restored), expected, rtol=0, atol=0)
        folder = tmp_path / type(other).__name__
        with jdist.Checkpointer(folder) as checkpointer:
            checkpointer.save(10, restored)
        with jdist.Checkpointer(folder) as checkpointer:
            back = checkpointer.restore(strategy, like=restored).state
        back, _ = step(back, strategy.split(X[:24]))
        assert int(back["step"]) == 11


def test_worker_that_fails_is_named_and_the_other_updates_remain():
    strategy = jdist.ParameterServerStrategy(workers=2)

    def check(x):
        if x == 2:
            raise ValueError("bad row")
        return np.float32(x)

    @strategy.step
    def add(total, x):
        x = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), x)
        return total + jdist.all_reduce("mean", x), None

    total = strategy.put(np.float32(0))
    with pytest.raises(
        RuntimeError, match=r"Worker \d failed in call 2 of a step, `add`(.|\n)*bad row(.|\n)*not applied"
    ):
        for x in (1, 2, 3):
            total, _ = add(total, np.float32(x))
        strategy.join()
    assert float(total) in (1, 4)  # the third call, if it started before the error was seen
    total, _ = add(total, np.float32(10))
    assert float(total) in (11, 14)


def test_value_that_the_model_carries_per_replica_is_refused():
    strategy = jdist.ParameterServerStrategy(workers=2)

    @strategy.step
    def step(state, x):
        return {"carry": jnp.tanh(state["carry"] @ x)}, None

    state = strategy.init(lambda: {"carry": jdist.PerReplica(jnp.ones((2, 2)))})
    with pytest.raises(ValueError, match=r"state\['carry'\] is stored per replica(.|\n)*overwrite each other"):
        step(state, np.ones((2, 2), np.float32))


def test_step_without_reduction_is_refused_as_under_other_strategies():
    strategy = jdist.ParameterServerStrategy(workers=2)
    step = strategy.step(lambda w, x: (w - x.mean(), None))
    with pytest.raises(jdist.NotMirroredError):
        step(strategy.put(np.float32(0)), strategy.split(X[:8]))


@pytest.mark.parametrize(
    "policy",
    [
        jdist.sync.local_sgd(optax.sgd(0.1), every=2),
        jdist.sync.diloco(optax.sgd(0.1), every=2),
        jdist.sync.exact(),
        jdist.sync.every(optax.sgd(0.1), 2),
    ],
    ids=["local_sgd", "diloco", "exact", "every"],
)
def test_policies_without_meaning_are_refused_by_name(policy, request):
    strategy = jdist.ParameterServerStrategy(workers=2)
    name = request.node.callspec.id
    state = strategy.init(lambda: (w := jnp.zeros(3), policy.init(w)))

    @strategy.step
    def step(state, x):
        updates, opt_state = policy.update(state[0] - x, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), None

    with pytest.raises(ValueError, match=rf"jdist.sync.{name}` has no meaning under `ParameterServerStrategy`"):
        step(state, np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"workers": 0}, ValueError, "`workers` must be an integer >= 1"),
        ({"servers": 0}, ValueError, "`servers` must be an integer >= 1"),
        ({"max_staleness": -1}, ValueError, "`max_staleness` must be an integer >= 0"),
        ({"workers": 1.5}, TypeError, "`workers`"),
        ({"engine": "spark"}, ValueError, '`engine` must be "local" or "ray", got \'spark\''),
        ({"non_finite": True}, ValueError, '`non_finite` must be "keep", "skip" or "stop", got True'),
        ({"snapshots": "folder"}, TypeError, "`snapshots` must be a `jdist.Checkpointer"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        jdist.ParameterServerStrategy(**arguments)


def test_step_that_keeps_its_state_is_refused():
    with pytest.raises(ValueError, match="`donate=False` is impossible"):
        jdist.ParameterServerStrategy().step(lambda s: (s, None), donate=False)


def test_negative_strength_is_refused():
    with pytest.raises(ValueError, match="`strength` of `jdist.sync.delay_compensation` must be at least 0"):
        jdist.sync.delay_compensation(strength=-1)
