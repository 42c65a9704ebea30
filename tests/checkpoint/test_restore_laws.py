"""A state that was saved under one strategy is restored under any other: values, shardings, and a step that runs on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist._src.checkpoint import storage
from jdist._src.checkpoint.checkpointer import Checkpointer

from laws import BACKENDS, STRATEGIES, assert_in_step

TX = optax.adam(1e-2)
OTHERS = {
    "sharded_all_2x2": lambda: jdist.ShardedStrategy(
        "all", mesh=jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model")), model_axis="model"
    ),
    "central_home": lambda: jdist.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:3"),
    "virtual_3_on_2": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=3),
}
TABLE = {**STRATEGIES, **OTHERS}
SAMPLE = [("mirrored_2", "sharded_4"), ("sharded_4", "mirrored_2")]


def some_slow(*fast):
    """Returns the names of the table; all except `fast` are for the slow session."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in TABLE]


def make(key):
    """Returns a state with one leaf of every kind that can be restored on any number of replicas."""
    params = {"w": jnp.sin(jnp.arange(32.0)).reshape(8, 4), "b": jnp.arange(24, dtype=jnp.bfloat16)}
    index = jdist.replica_id()
    return {
        "params": params,
        "opt_state": TX.init(params),
        "key": key,
        "other key": jax.random.key(3, impl="rbg"),
        "flags": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "count": jdist.Mirrored(jnp.int8(7), "sum"),
        "table": jdist.Sharded(jnp.full((24 // jdist.num_replicas(), 2), 1 + index)),
        "total": jdist.SyncOnRead(2.0 + index, "sum"),
        "seen": jdist.SyncOnRead(jnp.uint8(3) + index.astype(jnp.uint8), "sum"),
        "drift": jdist.SyncOnRead(jnp.sin(index + jnp.arange(32.0)).reshape(4, 8), "mean", True),
        "first": jdist.SyncOnRead(jdist.replica_key(key), "only_first_replica"),
    }


def train(state):
    grads = jdist.all_reduce("mean", jax.tree.map(jnp.ones_like, state["params"]))
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    new = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "total": state["total"] + 1}
    return {**state, **new}, None


def bits(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_reads_alike(one, other):
    for name in one:
        for a, b in zip(
            jax.tree.leaves(jdist.read_values(one[name])), jax.tree.leaves(jdist.read_values(other[name])), strict=True
        ):
            assert a.dtype == b.dtype or name == "seen", name
            if name in ("total", "drift"):  # sums and means in another order
                np.testing.assert_allclose(bits(b), bits(a), rtol=1e-6, atol=1e-7, err_msg=name)
            else:
                np.testing.assert_array_equal(bits(b), bits(a), err_msg=name)


@functools.cache
def started(name):
    """Returns a strategy of the table, and a state under it."""
    strategy = TABLE[name]()
    return strategy, strategy.init(make, jax.random.key(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder with a checkpoint of the state of a strategy of the table."""
    folders = {}

    def saved_once(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            with Checkpointer(folders[name]) as checkpointer:
                assert checkpointer.save(3, started(name)[1])
        return folders[name]

    return saved_once


def check_pair(folder, source, target):
    state, (after, like) = started(source)[1], started(target)
    with Checkpointer(folder) as checkpointer:
        new_state = checkpointer.restore(after, like=like).state
        as_saved = checkpointer.restore(after).state
    assert jax.tree.structure(new_state) == jax.tree.structure(like)
    assert_reads_alike(state, new_state)
    for restored in (new_state, as_saved):
        for (path, x), y in zip(jax.tree.leaves_with_path(restored), jax.tree.leaves(after.put(restored)), strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape, path
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim), path
    assert_in_step(new_state)
    return new_state


@pytest.mark.parametrize("source, target", SAMPLE)
def test_state_saved_under_one_strategy_is_restored_under_another(source, target, saved):
    check_pair(saved(source), source, target)


@pytest.mark.slow
@pytest.mark.parametrize("source", TABLE)
def test_state_saved_under_any_strategy_is_restored_under_each_backend(source, saved):
    for target in BACKENDS:  # the next test restores under any strategy
        check_pair(saved(source), source, target)


@pytest.mark.parametrize("target", some_slow("sharded_4"))
def test_step_runs_on_a_restored_state(target, saved):
    new_state = check_pair(saved("mirrored_2"), "mirrored_2", target)
    shardings = [x.sharding for x in jax.tree.leaves(new_state)]
    for _ in range(2):
        new_state, _ = started(target)[0].step(train)(new_state)
    pairs = zip(jax.tree.leaves(new_state), shardings, strict=True)
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x, sharding in pairs)
    assert int(new_state["opt_state"][0].count) == 2


@pytest.mark.parametrize("name", some_slow("sharded_4", "central_2"))
def test_state_is_restored_bit_by_bit_under_the_same_strategy(name, tmp_path):
    strategy, state = started(name)
    rows = np.float32(np.random.default_rng(0).normal(size=strategy.num_replicas_in_sync))
    state = {**state, "per_replica": strategy.put(jdist.PerReplica({"x": rows}))}
    del state["total"], state["seen"]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        new_state = checkpointer.restore(strategy, like=jax.eval_shape(lambda: state)).state
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for (path, x), y in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(new_state), strict=True):
        assert x.dtype == y.dtype and x.sharding.is_equivalent_to(y.sharding, x.ndim), path
        assert bits(x).tobytes() == bits(y).tobytes(), path


def restored(tmp_path, value, like, strategy, back=None):
    with Checkpointer(tmp_path / str(type(like).__name__)) as checkpointer:
        checkpointer.save(0, {"v": strategy.put(value)})
        return checkpointer.restore(back or strategy, like={"v": like}).state["v"]


def rows(*numbers):
    return np.float32(numbers)


def components(value):
    return [np.asarray(x).tolist() for x in value.values]


def test_sv1_sync_on_read_sum_is_restored_as_a_plain_value_and_as_shares(two, tmp_path):
    saved = jdist.SyncOnRead(rows(4, 3), "sum")
    assert restored(tmp_path, saved, np.float32(0), two).item() == 7.0
    assert components(restored(tmp_path, saved, jdist.SyncOnRead(rows(0, 0), "sum"), two)) == [3.5, 3.5]


def test_sv4_sync_on_read_sum_is_restored_as_equal_shares(two, tmp_path):
    saved = jdist.SyncOnRead(rows(1.5, 2), "sum")
    assert components(restored(tmp_path, saved, saved, two)) == [1.75, 1.75]


def test_sv6_mirrored_value_is_restored_as_a_plain_value_and_back(two, tmp_path):
    mirrored = jdist.Mirrored(rows(1, 2), "mean")
    assert restored(tmp_path, mirrored, rows(0, 0), two).tolist() == [1.0, 2.0]
    wrapped = restored(tmp_path / "back", rows(3, 4), mirrored, two)
    assert wrapped.aggregation is jdist.VariableAggregation.MEAN
    assert components(wrapped) == [[3.0, 4.0]] * 2


@pytest.mark.parametrize("values", [[0, 1, 2, 3], [5, 10, 15, 20]])
def test_sv11_sv12_sharded_value_is_restored_on_another_number_of_devices(values, two, tmp_path):
    one, four = STRATEGIES["one_device"](), jdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    saved = jdist.Sharded(rows(*values))
    parts = {strategy: components(restored(tmp_path / str(i), saved, saved, four, strategy))
             for i, strategy in enumerate((one, two, four))}  # fmt: skip
    assert parts[one] == [values] and parts[two] == [values[:2], values[2:]]
    assert parts[four] == [[value] for value in values]
    assert components(restored(tmp_path / "12", saved, saved, one, four)) == [[value] for value in values]


PARTIAL = {"mean": 2.5, "only_first_replica": 2.0}


@pytest.mark.parametrize("aggregation, value", PARTIAL.items())
def test_sync_on_read_is_restored_on_the_same_number_of_replicas_and_aggregated_on_another(
    aggregation, value, two, tmp_path
):
    saved = jdist.SyncOnRead(rows(2, 3), aggregation)
    assert components(restored(tmp_path / "same", saved, saved, two)) == [2.0, 3.0]
    three = STRATEGIES["mirrored_3"]()
    assert components(restored(tmp_path / "other", saved, saved, two, three)) == [value] * 3
    assert restored(tmp_path / "plain", saved, np.float32(0), two, three).item() == value
    as_sum = restored(tmp_path / "sum", saved, jdist.SyncOnRead(rows(0), "sum"), two)
    assert components(as_sum) == [value / 2] * 2


def test_plain_value_is_restored_as_one_value_per_replica(two, tmp_path):
    assert components(restored(tmp_path, np.float32(4), jdist.PerReplica(rows(0, 0, 0)), two)) == [4.0, 4.0]
    assert components(restored(tmp_path, np.float32(4), jdist.SyncOnRead(rows(0), "mean"), two)) == [4.0, 4.0]


def test_per_replica_value_on_another_number_of_replicas_is_refused_with_what_to_do(two, tmp_path):
    saved = jdist.PerReplica(rows(2, 3))
    with pytest.raises(
        ValueError, match=r"state/v has one value for each of 2 replicas, .* on 3 replicas\. .*virtual_rep"
    ):
        restored(tmp_path, saved, saved, two, STRATEGIES["mirrored_3"]())
    with pytest.raises(ValueError, match="state/v has one value for each .* cannot be restored as plain on 2"):
        restored(tmp_path / "plain", saved, np.float32(0), two)
    virtual_strategy = jdist.MirroredStrategy(["cpu:5"], virtual_replicas=2)
    assert components(restored(tmp_path / "there", saved, saved, two, virtual_strategy)) == [2.0, 3.0]


def test_sync_on_read_without_aggregation_is_restored_on_the_same_number_of_replicas_only(two, tmp_path):
    saved = jdist.SyncOnRead(rows(2, 3), "none")
    assert components(restored(tmp_path / "same", saved, saved, two)) == [2.0, 3.0]
    with pytest.raises(ValueError, match=r"state/v has one value for each of 2 replicas, .* on 3 replicas\."):
        restored(tmp_path / "other", saved, saved, two, STRATEGIES["mirrored_3"]())


def test_sharded_value_that_cannot_be_split_evenly_is_refused(two, tmp_path):
    saved = jdist.Sharded(rows(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"state/v.* cannot be split into 3 equal shards"):
        restored(tmp_path, saved, saved, two, STRATEGIES["mirrored_3"]())


def test_sum_of_small_integers_is_restored_if_it_fits(two, tmp_path):
    small = jdist.SyncOnRead(np.uint8([200, 100]), "sum")
    with pytest.raises(TypeError, match=r"state/v is uint8 and cannot hold (u?)int32\[\] without loss"):
        restored(tmp_path, small, small, two)
    assert components(restored(tmp_path / "fits", jdist.SyncOnRead(np.uint8([1, 2]), "sum"), small, two)) == [2, 1]


def test_mean_of_integers_on_another_number_of_replicas_is_refused(two, tmp_path):
    saved = jdist.SyncOnRead(np.int32([1, 2]), "mean")
    assert components(restored(tmp_path, saved, saved, two)) == [1, 2]
    with pytest.raises(TypeError, match=r"state/v is int32 and cannot hold float32\[\] without loss"):
        restored(tmp_path / "other", saved, saved, two, STRATEGIES["mirrored_3"]())


def test_sharded_state_is_never_on_one_device_entirely(tmp_path, monkeypatch):
    strategy, state = started("sharded_4")
    read_arrays, seen = storage.read_arrays, {}

    def watched(*args):
        arrays = read_arrays(*args)
        seen.update({x.shape: x.addressable_shards[0].data.shape for x in arrays.values()})
        return arrays

    monkeypatch.setattr(storage, "read_arrays", watched)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        checkpointer.restore(strategy, like=state)
        checkpointer.save(1, started("mirrored_3")[1])
        checkpointer.restore(strategy, like=state)
    assert seen[(8, 4)] == (2, 4) and seen[(1, 4, 8)] == (1, 4, 2) and seen[(3, 4, 8)] == (3, 4, 2)
