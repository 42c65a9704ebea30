"""`Mirrored`: a replicated value, and writes by the host program."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, each_row, rows

TREE = {"a": np.float32([1, 2]), "b": (np.int32(3), None)}


def test_values_of_a_value_that_is_not_placed_are_the_value():
    assert jdist.Mirrored(TREE).values == (TREE,)
    assert jdist.Mirrored({}).values == ({},)


def test_read_is_the_array_itself(two):
    value = two.put(jdist.Mirrored(TREE, "sum"))
    assert value.read() is value.tree


@pytest.mark.parametrize("aggregation", ["none", "sum", "Mean", "ONLY_FIRST_REPLICA", *jdist.VariableAggregation])
def test_assign_of_one_value_does_not_depend_on_the_aggregation(aggregation, two):
    value = two.put(jdist.Mirrored(np.float32([1, 2]), aggregation))
    result = value.assign(np.float32([3, 5]))
    np.testing.assert_array_equal(result.read(), [3, 5])
    np.testing.assert_array_equal(result.assign_add(np.float32([1, 1])).read(), [4, 6])
    np.testing.assert_array_equal(result.assign_sub(two.put(np.float32([1, 1]))).read(), [2, 4])
    np.testing.assert_array_equal(value.assign(two.put(jdist.Mirrored(np.float32([7, 7])))).read(), [7, 7])
    assert_in_step(result.tree)


AGGREGATIONS = {"sum": np.sum, "mean": np.mean, "only_first_replica": lambda x, axis: x[0]}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_assign_of_one_value_per_replica_is_aggregated(name, strategy):
    value = strategy.put(jdist.Mirrored({"x": np.ones(3, np.float32)}, name))
    new = jdist.PerReplica({"x": rows(strategy, 3).tree})
    expected = AGGREGATIONS[name](np.asarray(new.tree["x"]), axis=0)
    result = {
        "assign": (value.assign(new), expected),
        "assign_add": (value.assign_add(new), 1 + expected),
        "assign_sub": (value.assign_sub(new), 1 - expected),
    }
    for assigned, right in result.values():
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
def test_assign_of_one_value_per_replica_keeps_the_dtype(x):
    strategy, n = STRATEGIES["mirrored_3"](), 3
    value = strategy.put(jdist.Mirrored(x, "sum"))
    result = value.assign(jdist.PerReplica(np.stack([x] * n))).read()
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, x * np.array(n, x.dtype))


@pytest.mark.parametrize("leaf", [np.array([False, True]), jax.random.split(jax.random.key(0))], ids=["bools", "keys"])
def test_assign_of_booleans_and_keys_per_replica_may_be_the_first(leaf, two):
    result = two.put(jdist.Mirrored(leaf[1], "only_first_replica")).assign(jdist.PerReplica(leaf)).read()
    assert result.dtype == leaf.dtype
    assert bool(result == leaf[0])


def test_assign_of_partial_values_is_their_aggregate(two):
    partial = two.put(jdist.SyncOnRead(np.float32([1, 3]), "sum"))
    assert float(two.put(jdist.Mirrored(np.float32(0), "mean")).assign(partial).read()) == 4


def test_assign_of_one_value_per_replica_without_aggregation_is_refused(two):
    value = two.put(jdist.Mirrored({"x": np.zeros(3, np.float32)}))
    message = r"`{}`: value\['x'\] is replicated, and received one value per replica.*`Mirrored\(tree, aggregation\)`"
    for method in ("assign", "assign_add", "assign_sub"):
        with pytest.raises(ValueError, match=message.format(method)):
            getattr(value, method)(jdist.PerReplica({"x": np.zeros((2, 3), np.float32)}))


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


@each_row("leaf, aggregation, error, message", NO_AGGREGATION.values(), ids=NO_AGGREGATION)
def test_assign_of_a_dtype_without_that_aggregation_is_refused_by_name(leaf, aggregation, error, message, two):
    value = two.put(jdist.Mirrored({"x": leaf}, aggregation))
    row = leaf if np.shape(leaf) == () else leaf[:2]
    with pytest.raises(error, match=message):
        value.assign(jdist.PerReplica({"x": jnp.stack([row, row])}))


@each_row("invalid", ["avg", "", 3, None])
@each_row("kind", [jdist.Mirrored, jdist.SyncOnRead])
def test_unknown_aggregation_is_refused(invalid, kind):
    message = r"Invalid variable aggregation mode: .*; take one of 'NONE', 'SUM', 'MEAN', 'ONLY_FIRST_REPLICA'\."
    with pytest.raises(ValueError, match=message):
        kind(np.ones(2), invalid)


def test_mirrored_is_a_plain_replicated_array_in_a_replica_function(strategy):
    value = strategy.put(jdist.Mirrored({"x": np.float32([1, 2])}, "sum"))
    seen = []
    result = strategy.run(lambda value: seen.append(value) or value["x"] * 2, (value,))
    assert isinstance(seen[0]["x"], jax.Array)
    assert isinstance(result, jax.Array)
    np.testing.assert_array_equal(result, [2, 4])


def test_reduce_and_gather_of_mirrored_count_every_replica(strategy):
    n = strategy.num_replicas_in_sync
    value = strategy.put(jdist.Mirrored(np.float32([1, 2])))
    np.testing.assert_array_equal(strategy.reduce("sum", value, axis=None), [n, 2 * n])
    np.testing.assert_array_equal(strategy.reduce("mean", value, axis=None), [1, 2])
    np.testing.assert_array_equal(strategy.gather(value, axis=0), [1, 2] * n)
    chex.assert_trees_all_equal(strategy.local_results(value), value.values)
