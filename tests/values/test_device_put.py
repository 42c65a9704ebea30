"""Placement of trees on a mesh: `put`, `distribute_values_from_function` and `split`."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, each_row, replica_devices, rows


def test_put_replicates_plain_leaves(strategy):
    tree = {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "n": 3, "key": jax.random.key(1), "none": None}
    placed = strategy.put(tree)
    assert_in_step(placed)
    for leaf in jax.tree.leaves(placed):
        assert leaf.sharding.device_set == set(strategy.mesh.devices.flat)
        assert leaf.sharding.is_fully_replicated or leaf.sharding.memory_kind == "pinned_host"
        assert not jax.typeof(leaf).weak_type
    chex.assert_trees_all_equal(
        [placed["a"], placed["n"], jax.random.key_data(placed["key"]), placed["none"]],
        [tree["a"], np.int32(3), jax.random.key_data(tree["key"]), None],
    )


@each_row(
    "number, expected_dtype",
    [(2**31, "int32"), (-(2**31) - 1, "int32"), (np.int64(2**40), "int32"), (np.uint64(2**32), "uint32")],
)
def test_integer_that_jax_would_truncate_is_refused(number, expected_dtype, two):
    message = (
        rf"value\['a'\].* holds {number}, which is out of the range of "
        rf"{expected_dtype}.*`jax.config.update\(\"jax_enable_x64\", True\)`"
    )
    with pytest.raises(ValueError, match=message):
        two.put({"a": number})
    with pytest.raises(ValueError, match=message):
        two.put({"a": jdist.Mirrored(np.array([number, number]))})
    with pytest.raises(ValueError, match=message.replace("value", r"value\[0\]")):
        two.distribute_values_from_function(lambda _: {"a": np.array([number, number])})
    fits = [np.int64(2**31 - 1), np.int64(-(2**31)), np.uint64(2**32 - 1), np.zeros(0, np.int64)]
    chex.assert_trees_all_equal(two.put(fits), fits)


def test_put_of_wrapped_leaves_has_the_sharding_of_each_wrapper(strategy):
    n = strategy.num_replicas_in_sync
    x = np.arange(n * 4).reshape(2 * n, 2)
    placed = strategy.put(
        {
            "own": jdist.PerReplica(x.reshape(n, 2, 2)),
            "read": jdist.SyncOnRead(x.reshape(n, 2, 2), "sum"),
            "split": jdist.Sharded(x),
            "all": jdist.Mirrored(x),
            "plain": x,
        }
    )
    parts = {name: leaf.tree if name != "plain" else leaf for name, leaf in placed.items()}
    shapes = {name: leaf.sharding.shard_shape(leaf.shape) for name, leaf in parts.items()}
    expected_dtype = (2, 2) if isinstance(strategy, jdist.CentralStorageStrategy) else (2 * n, 2)
    assert shapes == {
        "own": (1, 2, 2),
        "read": (1, 2, 2),
        "split": (2, 2),
        "all": expected_dtype,
        "plain": expected_dtype,
    }


def test_put_of_a_deleted_array_is_refused_by_name(two):
    spent = two.put({"w": np.float32([1, 2])})
    spent["w"].delete()
    with pytest.raises(ValueError, match=r"^value\['w'\] \(float32\[2\]\) was deleted: it was donated to a step"):
        two.put({"new": np.zeros(3, np.float32), **spent})


def test_put_of_placed_values_is_the_identity(strategy):
    n = strategy.num_replicas_in_sync
    once = strategy.put(
        {
            "own": rows(strategy, 2),
            "all": np.arange(3),
            "m": jdist.Mirrored(np.arange(3), "sum"),
            "s": jdist.Sharded(np.arange(n)),
            "r": jdist.SyncOnRead(np.ones(n), "mean"),
        }
    )
    again = strategy.put(once)
    assert jax.tree.structure(again) == jax.tree.structure(once)
    chex.assert_trees_all_equal(again, once)
    assert [x.sharding for x in jax.tree.leaves(again)] == [x.sharding for x in jax.tree.leaves(once)]


ROWS = np.ones((3, 2), np.float32)
HAS_2 = "this strategy has 2"
NO_SHARDS = "cannot be split into 2 equal shards. Pad it to a multiple, or do not shard it"
PUT_REFUSED = {
    "other_number": (jdist.PerReplica(ROWS), f" is a PerReplica of float32[3,2], for 3 replicas; {HAS_2}. "),
    "no_rows": (jdist.PerReplica(np.float32(1)), f" is a PerReplica of float32[], for no replicas; {HAS_2}"),
    "partial_values": (
        jdist.SyncOnRead(np.float32(1), "sum"),
        f" is a SyncOnRead of float32[], for no replicas; {HAS_2}",
    ),
    "odd_parts": (jdist.Sharded(ROWS), " is Sharded, of float32[3,2], ", NO_SHARDS),
    "no_parts": (jdist.Sharded(np.float32(1)), " is Sharded, of float32[], ", NO_SHARDS),
    "named_leaf": (jdist.Sharded({"a": [np.ones(1, np.int32)]}), "['a'][0] is Sharded, of int32[1]"),
}


@each_row("value, texts", ((value, texts) for value, *texts in PUT_REFUSED.values()), ids=PUT_REFUSED)
def test_wrapper_that_does_not_fit_the_replicas_is_refused_by_every_function(value, texts, two):
    message = r"\['x'\]" + ".*".join(map(re.escape, texts))
    with pytest.raises(ValueError, match="value" + message) as refused:
        two.put({"x": value})
    assert "PerReplica" not in message or "read the values with `.val" in str(refused.value)
    with pytest.raises(ValueError, match=message):
        two.run(lambda value: value, ({"x": value},))
    with pytest.raises(ValueError, match=message):
        two.reduce("mean", {"x": value}, axis=None)


def test_wrapper_of_another_strategy_is_refused_by_its_devices(two):
    other = jdist.MirroredStrategy(["cpu:1", "cpu:2"])
    for value in (jdist.Mirrored(np.ones(2)), jdist.Sharded(np.ones(2)), jdist.SyncOnRead(np.ones(2), "sum")):
        with pytest.raises(ValueError, match=r"(?i)x(\.tree)? is on .*cpu.*1, .*2, and this strategy uses .*0, .*1\."):
            two.run(lambda x: x, (other.put(value),))


def test_values_from_function_are_one_per_replica(strategy):
    n = strategy.num_replicas_in_sync
    made = strategy.distribute_values_from_function(
        lambda c: {"id": c.replica_id_in_sync_group, "x": np.full(2, c.num_replicas_in_sync, np.float32), "none": None}
    )
    assert isinstance(made, jdist.PerReplica)
    chex.assert_trees_all_equal(
        made.tree, {"id": np.arange(n, dtype=np.int32), "x": np.full((n, 2), n, np.float32), "none": None}
    )
    for value, devices in zip(made.values, replica_devices(strategy), strict=True):
        assert value["x"].devices() == devices


def test_values_from_function_may_be_keys(strategy):
    made = strategy.distribute_values_from_function(lambda c: jax.random.key(c.replica_id_in_sync_group))
    for number, key in enumerate(made.values):
        np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(number)))


def test_values_from_function_may_be_empty_trees(strategy):
    made = strategy.distribute_values_from_function(lambda c: {"none": None, "list": []})
    assert (made.tree, made.shapes) == ({"none": None, "list": []}, None)


def test_keys_of_different_shapes_are_refused(two):
    with pytest.raises(ValueError, match=r"Random keys cannot be padded to one shape: pass the same number of keys"):
        two.distribute_values_from_function(
            lambda c: jax.random.split(jax.random.key(0), 1 + c.replica_id_in_sync_group)
        )


# What replica `i` returns, and what the error names.
UNLIKE = {
    "rank": (lambda i: {"a": np.ones([1] * (i + 1), np.float32)}, "float32[1,1] for value['a']", "the float32[1] of"),
    "dtype": (lambda i: {"a": [np.int32(1), np.float32(1)][i]}, "float32[] for value['a']", "the int32[] of"),
    "more_leaves": (lambda i: {"a": 1, "b": 2} if i else {"a": 1}, "the structure", "'b'", "the", "'a'"),
    "other_leaf": (lambda i: {"b": 1} if i else {"a": 1}, "'b'", "the", "'a'"),
    "other_container": (lambda i: (1,) if i else [1], "(*,)", "the", "[*]"),
    "none_for_a_leaf": (lambda i: {"a": 1, "b": None} if i else {"a": 1}, "None"),
}


@each_row("make, texts", ((make, texts) for make, *texts in UNLIKE.values()), ids=UNLIKE)
def test_values_from_function_that_differ_in_structure_or_dtype_are_refused(make, texts, two):
    says = ".*".join(
        map(re.escape, ("replica 1 has", *texts, "replica 0. Return values of the same structure, ranks and dtypes"))
    )
    with pytest.raises(ValueError, match=says):
        two.distribute_values_from_function(lambda c: make(c.replica_id_in_sync_group))


GROUPED = {size: jdist.HierarchicalAllReduce(size) for size in (1, 2, 4, 8)}


@pytest.mark.parametrize("ops", GROUPED.values(), ids=GROUPED)
def test_values_on_a_mesh_of_groups_are_placed_like_on_a_mesh_of_replicas(ops):
    grouped, flat = jdist.MirroredStrategy(cross_device_ops=ops), STRATEGIES["mirrored_8"]()
    tree = {
        "own": jdist.PerReplica(np.arange(8)),
        "split": jdist.Sharded(np.arange(16)),
        "all": jdist.Mirrored(np.arange(2)),
        "read": jdist.SyncOnRead(np.arange(8), "sum"),
    }
    for name, value in grouped.put(tree).items():
        expected = flat.put(tree)[name]
        chex.assert_trees_all_equal(value.values, expected.values)
        chex.assert_trees_all_equal(value.read(), expected.read())
        assert [leaf.devices() for leaf in value.values] == [leaf.devices() for leaf in expected.values]


@pytest.mark.parametrize(
    "aggregation, rows, new",
    [
        ("sum", [1.0, 2, 6], [4.5, 4.5]),
        ("mean", [1.0, 2, 6], [3, 3]),
        ("only_first_replica", [1.0, 2, 6], [1, 1]),
        ("sum", [1, 2, 6, 4], [7, 6]),
        ("sum", [1.0, 2], [1, 2]),
    ],
)
def test_partial_values_of_another_number_of_replicas_are_split_again(aggregation, rows, new, two):
    other = jdist.MirroredStrategy([f"cpu:{i}" for i in range(len(rows))])
    dtype = np.float32 if isinstance(rows[0], float) else np.int32
    result = two.put(other.put(jdist.SyncOnRead(np.array(rows, dtype), aggregation)))
    assert [float(x) for x in result.values] == new


def test_partial_values_on_the_devices_of_another_strategy_are_split_again(two):
    other = jdist.MirroredStrategy(["cpu:2", "cpu:3", "cpu:4"])
    state = {"seen": other.put(jdist.SyncOnRead(np.float32([1, 2, 6]), "sum")), "w": other.put(np.float32(7))}
    result = two.put(state)
    assert [float(x) for x in result["seen"].values] == [4.5, 4.5]
    step = two.step(lambda state: ({**state, "seen": state["seen"] + 1}, None))
    state, _ = step(result)
    assert float(state["seen"].read()) == 11


@pytest.mark.parametrize("make", [np.ones, jnp.ones], ids=["host", "device"])
def test_a_value_that_the_user_wraps_is_not_taken_for_rows_of_replicas(strategy, make):
    message = (
        r"value\['stats'\] is a SyncOnRead of float\d+\[64\]\. The first dimension of a SyncOnRead counts replicas, 64 here, and "
        r"this strategy has \d\. To start with a value of shape \[64\] .*`strategy\.init\(lambda: jdist\.SyncOnRead\("
    )
    with pytest.raises(ValueError, match=message):
        strategy.put({"stats": jdist.SyncOnRead(make(64), "mean")})
    state = strategy.init(lambda: jdist.SyncOnRead(jnp.ones(64), "mean"))
    assert state.read().shape == (64,)


def test_partial_values_of_another_number_of_replicas_are_refused_as_argument(two):
    with pytest.raises(
        ValueError, match=r"is a SyncOnRead of int32\[3\], for 3 replicas; this strategy has 2\. A SyncOnRead"
    ):
        two.run(lambda x: x, (jdist.SyncOnRead(np.ones(3, np.int32), "sum"),))


# --- one global batch


def test_split_batch_equals_the_batch_of_a_data_set(strategy):
    x, y = np.arange(24 * 2, dtype=np.float32).reshape(24, 2), np.arange(24)
    (expected,) = strategy.distribute_dataset({"x": x, "y": y}, 24)
    split = strategy.split({"x": x, "y": y})
    assert jax.tree.structure(split) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(split), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert (mine.dtype, mine.sharding) == (theirs.dtype, theirs.sharding)


def test_split_batch_trains_like_the_global_batch_on_one_device(strategy):
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    step = lambda w, x: (w - jdist.all_reduce("mean", (x * (x @ w)[:, None]).mean(0)), None)
    w = np.ones(3, np.float32)
    new, _ = strategy.step(step)(strategy.put(w), strategy.split(jnp.asarray(x)))
    np.testing.assert_allclose(new, step(w, x)[0], rtol=1e-5)


def test_virtual_replicas_receive_their_shards_of_a_split_batch():
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], virtual_replicas=4)
    assert strategy.split(np.arange(8)).tree.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def _deleted():
    gone = jnp.arange(4.0)
    gone.delete()
    return gone


# The batch, and what the error names.
WRONG_BATCHES = {
    "empty": (np.zeros((0, 3)), "batch is float64[0,3]: it has no examples"),
    "rest": (np.zeros((7, 3)), "batch is float64[7,3]: its 7 examples cannot be split over 2 replicas (1 left over)"),
    "scalar": ({"x": np.zeros((4, 3)), "rate": 0.1}, "batch['rate'] is 0.1: it has no examples", "another argument"),
    "lengths": ((np.zeros(4), np.zeros(6)), "batch[1] is float64[6]: it has 6 examples, and batch[0] has 4"),
    "wide": ({"id": np.array([1, 2**40])}, "batch['id'] holds 1099511627776, which is out of the range of int32"),
    "deleted": ({"x": _deleted()}, "batch['x'] (float32[4]) was deleted"),
}
WRONG_TYPES = {
    "split": (jdist.PerReplica(np.zeros((2, 2))), "`split` takes one global batch", "which is already split"),
    "text": (np.array(["a", "b"]), "batch is <U1[2]"),
    "masked": ({"x": np.ma.array([1.0, 2.0], mask=[0, 1])}, "batch['x'] is a masked array", "x.filled(0)"),
}


@each_row("name", [*WRONG_BATCHES, *WRONG_TYPES])
def test_batch_that_cannot_be_split_is_refused_with_its_numbers(name, two):
    batch, *texts = {**WRONG_BATCHES, **WRONG_TYPES}[name]
    with pytest.raises(TypeError if name in WRONG_TYPES else ValueError, match=".*".join(map(re.escape, texts))):
        two.split(batch)


def test_split_batch_may_have_leaves_without_elements(two):
    x, y = two.split((np.zeros((4, 0, 3), np.float32), np.arange(4)))
    assert (x.tree.shape, y.tree.tolist()) == ((2, 2, 0, 3), [[0, 1], [2, 3]])


def test_put_of_a_masked_array_is_refused_because_its_mask_would_be_dropped(two):
    with pytest.raises(TypeError, match=r"value\['x'\] is a masked array, which JAX does not support\. Fill it"):
        two.put({"x": np.ma.array([1.0, 2.0], mask=[0, 1])})


def test_batch_that_does_not_divide_over_the_devices_of_a_replica_is_refused():
    with pytest.raises(ValueError, match=r"its 6 examples cannot be split over 4 devices \(2 left over\)"):
        STRATEGIES["sharded_4"]().split(np.zeros(6))
