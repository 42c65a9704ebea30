"""`Mirrored`: the same value on every replica, and what the host program writes to it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, homes, rows

TREE = {"a": np.float32([1, 2]), "b": (np.int32(3), None)}


def test_values_are_one_copy_a_replica_on_its_own_device(strategy):
    parts = strategy.put(jdist.Mirrored(TREE)).values
    assert len(parts) == strategy.num_replicas_in_sync
    for part, home in zip(parts, homes(strategy), strict=True):
        chex.assert_trees_all_equal(part, TREE)
        assert home == set().union(*(leaf.devices() for leaf in jax.tree.leaves(part)))


def test_values_of_what_lies_nowhere_are_the_value():
    assert jdist.Mirrored(TREE).values == (TREE,)
    assert jdist.Mirrored({}).values == ({},)


def test_read_is_the_array_itself(two):
    value = two.put(jdist.Mirrored(TREE, "sum"))
    assert value.read() is value.tree


def test_map_is_the_function_of_every_copy_where_it_lies(strategy):
    value = strategy.put(jdist.Mirrored(TREE, "mean", trainable=False))
    mapped = value.map(lambda tree: {"sum": tree["a"].sum(), "n": tree["b"][0] + 1})
    assert (mapped.aggregation, mapped.trainable) == (jdist.VariableAggregation.MEAN, False)
    chex.assert_trees_all_equal(mapped.read(), {"sum": np.float32(3), "n": np.int32(4)})
    assert_in_step(mapped.tree)
    assert mapped.tree["n"].sharding.device_set == set(strategy.mesh.devices.flat)
    assert float(jdist.Mirrored(np.float32(2)).map(jnp.square).read()) == 4


@pytest.mark.parametrize("aggregation", ["none", "sum", "Mean", "ONLY_FIRST_REPLICA", *jdist.VariableAggregation])
def test_assign_of_one_value_is_that_value_whatever_the_aggregation(aggregation, two):
    value = two.put(jdist.Mirrored(np.float32([1, 2]), aggregation))
    found = value.assign(np.float32([3, 5]))
    np.testing.assert_array_equal(found.read(), [3, 5])
    np.testing.assert_array_equal(found.assign_add(np.float32([1, 1])).read(), [4, 6])
    np.testing.assert_array_equal(found.assign_sub(two.put(np.float32([1, 1]))).read(), [2, 4])
    np.testing.assert_array_equal(value.assign(two.put(jdist.Mirrored(np.float32([7, 7])))).read(), [7, 7])
    assert_in_step(found.tree)


AGGREGATIONS = {"sum": np.sum, "mean": np.mean, "only_first_replica": lambda x, axis: x[0]}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_assign_of_one_value_a_replica_is_aggregated(name, strategy):
    value = strategy.put(jdist.Mirrored({"x": np.ones(3, np.float32)}, name))
    new = jdist.PerReplica({"x": rows(strategy, 3).tree})
    expected = AGGREGATIONS[name](np.asarray(new.tree["x"]), axis=0)
    found = {
        "assign": (value.assign(new), expected),
        "assign_add": (value.assign_add(new), 1 + expected),
        "assign_sub": (value.assign_sub(new), 1 - expected),
    }
    for assigned, right in found.values():
        np.testing.assert_allclose(assigned.read()["x"], right, rtol=1e-5, atol=1e-6)
        assert assigned.read()["x"].sharding.is_equivalent_to(value.read()["x"].sharding, 1)
        assert_in_step(assigned.tree)


DTYPES = {
    "int32": np.int32([3, -1]),
    "uint8": np.uint8([3, 1]),
    "bfloat16": np.array([1.5, -2], jnp.bfloat16),
    "complex64": np.complex64([1 + 2j, -1]),
}


@pytest.mark.parametrize("x", DTYPES.values(), ids=DTYPES)
def test_assign_of_one_value_a_replica_keeps_the_dtype(x):
    strategy, n = STRATEGIES["mirrored_3"](), 3
    value = strategy.put(jdist.Mirrored(x, "sum"))
    found = value.assign(jdist.PerReplica(np.stack([x] * n))).read()
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x * np.array(n, x.dtype))


@pytest.mark.parametrize("leaf", [np.array([False, True]), jax.random.split(jax.random.key(0))], ids=["bools", "keys"])
def test_assign_of_booleans_and_keys_a_replica_may_be_the_first(leaf, two):
    found = two.put(jdist.Mirrored(leaf[1], "only_first_replica")).assign(jdist.PerReplica(leaf)).read()
    assert found.dtype == leaf.dtype
    assert bool(found == leaf[0])


def test_assign_of_partial_values_is_what_they_are_read_as(two):
    partial = two.put(jdist.SyncOnRead(np.float32([1, 3]), "sum"))
    assert float(two.put(jdist.Mirrored(np.float32(0), "mean")).assign(partial).read()) == 4


def test_assign_of_one_value_a_replica_without_aggregation_is_refused(two):
    value = two.put(jdist.Mirrored({"x": np.zeros(3, np.float32)}))
    says = r"`{}`: value\['x'\] is replicated, and received one value per replica.*`Mirrored\(tree, aggregation\)`"
    for word in ("assign", "assign_add", "assign_sub"):
        with pytest.raises(ValueError, match=says.format(word)):
            getattr(value, word)(jdist.PerReplica({"x": np.zeros((2, 3), np.float32)}))


NO_AGGREGATION = {
    "sum_of_bools": (np.True_, "sum", TypeError, r"value\['x'\] is boolean \(bool\[2\]\), and SUM of booleans"),
    "sum_of_keys": (jax.random.key(0), "sum", TypeError, r"value\['x'\] is .*key<fry>\[2\]"),
    "other_shape": (
        np.ones(3, np.float32),
        "sum",
        ValueError,
        r"has the shape \[3\], and the new value has \[2\]",
    ),
}


@pytest.mark.parametrize("leaf, aggregation, error, says", NO_AGGREGATION.values(), ids=NO_AGGREGATION)
def test_assign_of_what_has_no_such_aggregation_is_refused_by_name(leaf, aggregation, error, says, two):
    value = two.put(jdist.Mirrored({"x": leaf}, aggregation))
    row = leaf if np.shape(leaf) == () else leaf[:2]
    with pytest.raises(error, match=says):
        value.assign(jdist.PerReplica({"x": jnp.stack([row, row])}))


@pytest.mark.parametrize("bad", ["avg", "", 3, None], ids=str)
@pytest.mark.parametrize("kind", [jdist.Mirrored, jdist.SyncOnRead])
def test_aggregation_that_there_is_none_of_is_refused(bad, kind):
    says = r"Invalid variable aggregation mode: .*; take one of 'NONE', 'SUM', 'MEAN', 'ONLY_FIRST_REPLICA'\."
    with pytest.raises(ValueError, match=says):
        kind(np.ones(2), bad)


def test_mirrored_enters_a_replica_function_plain_and_proved(strategy):
    value = strategy.put(jdist.Mirrored({"x": np.float32([1, 2])}, "sum"))
    seen = []
    found = strategy.run(lambda value: seen.append(value) or value["x"] * 2, (value,))
    assert isinstance(seen[0]["x"], jax.Array)
    assert isinstance(found, jax.Array)
    np.testing.assert_array_equal(found, [2, 4])


def test_reduce_and_gather_of_mirrored_count_every_replica(strategy):
    n = strategy.num_replicas_in_sync
    value = strategy.put(jdist.Mirrored(np.float32([1, 2])))
    np.testing.assert_array_equal(strategy.reduce("sum", value, axis=None), [n, 2 * n])
    np.testing.assert_array_equal(strategy.reduce("mean", value, axis=None), [1, 2])
    np.testing.assert_array_equal(strategy.gather(value, axis=0), [1, 2] * n)
    chex.assert_trees_all_equal(strategy.local_results(value), value.values)
