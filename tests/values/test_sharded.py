"""`Sharded`: one value, split over the replicas."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import rows, traces_of_a_step


def _table(strategy, columns=2):
    n = strategy.num_replicas_in_sync
    return np.arange(2.0 * n * columns, dtype=np.float32).reshape(2 * n, columns)


def test_read_is_the_full_array(strategy):
    value = strategy.put(jdist.Sharded(_table(strategy)))
    assert value.read() is value.tree
    np.testing.assert_array_equal(value.read(), _table(strategy))


def test_values_of_a_value_that_is_not_placed_are_refused():
    message = r"Sharded\(float32\[4\]\) is not split over devices yet\. Place it first: `strategy\.put\(value\)`"
    with pytest.raises(ValueError, match=message):
        _ = jdist.Sharded(np.ones(4, np.float32)).values


def test_assign_of_shards_of_another_shape_is_refused(two):
    value = two.put(jdist.Sharded(_table(two)))
    with pytest.raises(ValueError, match=r"`assign`: value has the shape \[4, 2\], and the new value has \[2, 2\]"):
        value.assign(rows(two, 1, 2))
    with pytest.raises(ValueError, match=r"`assign_add`: value has the shape \[4, 2\], and the new value has \[2\]"):
        value.assign_add(np.ones(2, np.float32))


def test_sharded_keys_are_split_and_assigned(strategy):
    keys = [jax.random.split(jax.random.key(seed), 2 * strategy.num_replicas_in_sync) for seed in (1, 2)]
    value = strategy.put(jdist.Sharded(keys[0]))
    assert [part.shape for part in value.values] == [(2,)] * strategy.num_replicas_in_sync
    np.testing.assert_array_equal(jax.random.key_data(value.assign(keys[1]).read()), jax.random.key_data(keys[1]))


def test_sharded_is_the_shard_in_a_replica_function_and_stays_split_in_a_step(strategy):
    n, x = strategy.num_replicas_in_sync, _table(strategy)
    seen = []

    def double(table):
        seen.append(table.shape)
        return table * 2, jdist.all_gather(table, 0)

    value = strategy.put(jdist.Sharded(x))
    state_sharding = value.tree.sharding
    table, output = strategy.step(double)(value)
    assert seen == [(2, 2), (2 * n, 2)][: traces_of_a_step(strategy)]
    assert isinstance(table, jdist.Sharded)
    assert table.tree.sharding.is_equivalent_to(state_sharding, 2)
    np.testing.assert_array_equal(table.read(), x * 2)
    np.testing.assert_array_equal(output, x)
    assert len(table.values) == n


def test_init_creates_each_shard_on_its_device(strategy):
    n = strategy.num_replicas_in_sync
    made = strategy.init(lambda: jdist.Sharded(jdist.replica_id() * 10 + jnp.arange(2)))
    np.testing.assert_array_equal(made.read(), [10 * i + j for i in range(n) for j in range(2)])
    assert made.tree.sharding.shard_shape(made.tree.shape) == (2,)


def test_shard_without_a_dimension_is_refused(strategy):
    with pytest.raises(
        ValueError, match=r"value\['x'\] of a Sharded is int32\[\]: the shard of a replica has at least one dimension"
    ):
        strategy.init(lambda: jdist.Sharded({"x": jdist.replica_id()}))


def test_reduce_and_gather_of_sharded_use_the_shards(strategy):
    x = _table(strategy)
    n, value = strategy.num_replicas_in_sync, strategy.put(jdist.Sharded(x))
    np.testing.assert_allclose(strategy.reduce("sum", value, axis=None), x.reshape(n, 2, 2).sum(0))
    np.testing.assert_allclose(strategy.reduce("max", value, axis=0), x.max(0))
    np.testing.assert_array_equal(strategy.gather(value, axis=0), x)
    chex.assert_trees_all_equal(strategy.local_results(value), value.values)


def test_sharded_of_no_rows_is_no_rows_on_every_replica(strategy):
    value = strategy.put(jdist.Sharded(np.ones((0, 3), np.float32)))
    assert [part.shape for part in value.values] == [(0, 3)] * strategy.num_replicas_in_sync
    assert value.assign(np.ones((0, 3), np.float32)).read().shape == (0, 3)
