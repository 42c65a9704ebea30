"""Rows PT of `rows.txt` on sharded tables: `jdist.Sharded`, and arrays under `jdist.ShardedStrategy`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES

TABLE = np.float32([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12], [13, 14], [15, 16]])


@pytest.fixture(params=["mirrored", "sharded"])
def sharded_table(request, two):
    """Returns a table of rows [1, 2] to [15, 16] sharded over several devices, and its strategy."""
    if request.param == "mirrored":
        return two, two.put(jdist.Sharded(TABLE)).read()
    strategy = STRATEGIES["sharded_4"]()
    strategy = jdist.ShardedStrategy("all", mesh=strategy.mesh)
    table = strategy.init(lambda: {"table": jnp.asarray(TABLE)})["table"]
    return strategy, table


def test_pt11_assignment_of_the_global_value_sets_the_shard_of_each_replica(two):
    table = two.put(jdist.Sharded(np.float32([[0, 0], [1, 1], [2, 2], [3, 3]])))
    parts = lambda value: [np.asarray(part).tolist() for part in value.values]
    new = np.float32([[4, 4], [5, 5], [6, 6], [7, 7]])
    assert parts(table.assign(new)) == [[[4, 4], [5, 5]], [[6, 6], [7, 7]]]
    assert parts(table.assign_add(new)) == [[[4, 4], [6, 6]], [[8, 8], [10, 10]]]
    assert parts(table.assign_sub(new)) == [[[-4, -4], [-4, -4]], [[-4, -4], [-4, -4]]]
    assert table.assign(new).read().tolist() == new.tolist()


SLICES = {
    "tail": np.s_[5:],
    "stride": np.s_[::3],
    "backwards": np.s_[7:1:-2],
    "far_backwards": np.s_[6::-6],
    "element": np.s_[2, 1],
    "column": np.s_[:, 0],
    "empty": np.s_[0:0],
}


@pytest.mark.parametrize("index", SLICES.values(), ids=SLICES)
def test_pt12_pt13_slice_of_a_sharded_table_equals_the_slice_of_the_global_array(index, sharded_table):
    _, table = sharded_table
    assert len(table.sharding.device_set) > 1 and not table.sharding.is_fully_replicated
    np.testing.assert_array_equal(table[index], TABLE[index])


def test_pt14_embedding_lookup_in_a_sharded_table_returns_the_rows(sharded_table):
    strategy, table = sharded_table
    results = strategy.run(lambda table, ids: table[ids], (table, np.int32([0, 3, 4])))
    assert np.asarray(results).tolist() == [[1, 2], [7, 8], [9, 10]]


def test_pt15_sparse_lookup_averages_the_rows_of_each_example_by_their_weights(sharded_table):
    strategy, table = sharded_table

    def mean_rows(table, ids, examples, weights):
        sums = jax.ops.segment_sum(weights[:, None] * table[ids], examples, num_segments=3)
        totals = jax.ops.segment_sum(weights, examples, num_segments=3)
        return sums / jnp.where(totals > 0, totals, 1)[:, None]

    ids, examples = np.int32([0, 3, 4, 1]), np.int32([0, 0, 1, 2])
    lookup = lambda weights: np.asarray(strategy.run(mean_rows, (table, ids, examples, np.float32(weights)))).tolist()
    assert lookup([1, 1, 1, 1]) == [[4, 5], [9, 10], [3, 4]]
    assert lookup([1, 0, 0, 1]) == [[1, 2], [0, 0], [3, 4]]


def test_pt17_rows_added_to_a_sharded_table_are_added_to_their_shards():
    strategy = jdist.ShardedStrategy("all", mesh=STRATEGIES["sharded_4"]().mesh)
    table = strategy.init(lambda: jnp.zeros(8))
    update = jdist.RowSlices(rows=np.float32([1, 2]), indices=np.int32([0, 2]), num_rows=8)
    added, _ = strategy.step(lambda table, update: (update.add_to(table), None))(table, update)
    assert added.tolist() == [1, 0, 2, 0, 0, 0, 0, 0]
    assert added.sharding == table.sharding and not added.sharding.is_fully_replicated


def test_pt17_each_replica_adds_rows_to_its_shard_of_a_table(two):
    table = two.put(jdist.Sharded(np.zeros(4, np.float32)))
    add = two.step(lambda part: (part.at[jdist.replica_id()].add(1.0 + jdist.replica_id()), None))
    assert add(table)[0].read().tolist() == [1, 0, 0, 2]
