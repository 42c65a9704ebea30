"""Rows GA of `rows.txt`: gathers on the host and in replica functions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist


def _per_replica(strategy, *values):
    """Returns a `PerReplica` with one array of float32 or int32 per replica."""
    return strategy.distribute_values_from_function(lambda c: jnp.asarray(values[c.replica_id_in_sync_group]))


def _each(strategy, fn):
    return strategy.distribute_values_from_function(lambda c: fn(c.replica_id_in_sync_group))


@pytest.mark.parametrize("axis, shape", [(0, (2, 2, 2)), (1, (1, 4, 2)), (2, (1, 2, 4))])
def test_ga3_even_values_are_concatenated_along_any_dimension(axis, shape, two):
    arrays = np.arange(8).reshape(2, 1, 2, 2)
    value = _per_replica(two, *arrays)
    for gathered in (two.gather(value, axis=axis), two.run(lambda x: jdist.all_gather(x, axis), (value,))):
        assert gathered.shape == shape
        np.testing.assert_array_equal(gathered, np.concatenate(arrays, axis=axis))


def test_ga4_uneven_values_are_concatenated_along_the_dimension_that_differs(strategy):
    n = strategy.num_replicas_in_sync
    tall = strategy.gather(_each(strategy, lambda i: jnp.full((i + 1, 1), i)), axis=0)
    wide = strategy.gather(_each(strategy, lambda i: jnp.full((1, i + 1), i)), axis=1)
    numbers = np.repeat(np.arange(n), np.arange(n) + 1)
    assert len(numbers) == n * (n + 1) // 2
    np.testing.assert_array_equal(tall, numbers[:, None])
    np.testing.assert_array_equal(wide, numbers[None])


def test_ga5_rows_of_different_lengths_are_concatenated_in_order(two):
    assert two.gather(_per_replica(two, [1, 2, 3], [4]), axis=0).tolist() == [1, 2, 3, 4]


def test_ga6_matrices_are_concatenated_along_their_second_dimension(two):
    value = two.run(lambda: jnp.int32([[1, 2], [3, 4]]) * (jdist.replica_id() + 1))
    expected = [[1, 2, 2, 4], [3, 4, 6, 8]]
    assert two.gather(value, axis=1).tolist() == expected
    assert two.run(lambda x: jdist.all_gather(x, 1), (value,)).tolist() == expected


def _wide(strategy):
    return _each(strategy, lambda i: np.ones((1, i + 1), np.float32))


MISMATCH = r"value has the shapes \[1, 1\], \[1, 2\] on the replicas.*Concatenate along the dimension that differs"


def test_ga7_values_that_differ_along_another_dimension_are_errors(two):
    with pytest.raises(ValueError, match=MISMATCH):
        two.gather(_wide(two), axis=0)


def test_ga8_values_of_different_ranks_are_errors(two):
    message = r"replica 1 has float32\[1,1\] for value, and not the float32\[1\] of replica 0.*same structure, ranks"
    with pytest.raises(ValueError, match=message):
        two.gather(_per_replica(two, [1.0], [[1.0]]), axis=0)


def test_ga10_row_slices_are_errors(strategy):
    slices = lambda: jdist.RowSlices(jnp.ones((1, 2)) * jdist.replica_id(), jnp.int32([0]), num_rows=3)
    message = r"does not support RowSlices\. Pass the table \(`value\.dense\(\)`\).*`value\.rows`, `value\.indices`"
    with pytest.raises(TypeError, match="`gather` " + message):
        strategy.gather(strategy.run(slices), axis=0)
    with pytest.raises(TypeError, match="`all_gather` " + message):
        strategy.run(lambda: jdist.all_gather(slices(), 0))


def test_ga11_gather_in_a_replica_function_is_an_error(strategy):
    with pytest.raises(
        RuntimeError,
        match=r"`strategy\.gather` cannot be called inside a replica function.*use `jdist\.all_gather` there",
    ):
        strategy.run(lambda: strategy.gather(jnp.zeros(2) + jdist.replica_id(), axis=0))


def test_ga12_host_value_is_unchanged_and_a_tree_is_gathered_leaf_by_leaf(two):
    host = np.int32([1, 2])
    assert two.gather(host, axis=0) is host
    assert two.gather([1, 2], axis=0) == [1, 2]
    gathered = two.gather({"a": _per_replica(two, [1, 2, 3], [4]), "b": [_per_replica(two, [5], [6]), host]}, axis=0)
    chex.assert_trees_all_equal(gathered, {"a": np.int32([1, 2, 3, 4]), "b": [np.int32([5, 6]), host]})


def test_ga13_ga15_uneven_rows_are_padded_to_be_gathered_in_a_replica_function(two):
    rows, weights = _per_replica(two, [1, 2, 3], [4]).padded()
    gather = lambda x, w: jdist.all_gather({"a": x, "b": 2 * x, "weights": w}, 0)
    for gathered in two.local_results(two.run(gather, (rows, weights))):
        is_example = np.asarray(gathered["weights"]) > 0
        assert np.asarray(gathered["a"])[is_example].tolist() == [1, 2, 3, 4]
        assert np.asarray(gathered["b"])[is_example].tolist() == [2, 4, 6, 8]


def test_ga13_uneven_rows_in_a_replica_function_are_errors_with_the_fix(two):
    message = r"PerReplica\(int32\[3\] \| int32\[1\]\): .*different shapes.*`value, weights = value\.padded\(\)`"
    with pytest.raises(ValueError, match=message):
        two.run(lambda x: jdist.all_gather(x, 0), (_per_replica(two, [1, 2, 3], [4]),))


def test_ga14_leaves_of_a_list_are_gathered_separately(two):
    first, second = _per_replica(two, [[1], [2]], [[3], [4]]), _per_replica(two, [[5, 6]], [[7, 8]])
    gathered = two.run(lambda *pair: jdist.all_gather(list(pair), 1), (first, second))
    chex.assert_trees_all_equal(gathered, [np.int32([[1, 3], [2, 4]]), np.int32([[5, 6, 7, 8]])])
    uneven = two.gather([_per_replica(two, [[1]], [[2, 3]]), _per_replica(two, [[4, 5]], [[6]])], axis=1)
    chex.assert_trees_all_equal(uneven, [np.int32([[1, 2, 3]]), np.int32([[4, 5, 6]])])


def test_ga16_gradient_through_all_gather_sums_over_the_losses_of_all_replicas(strategy):
    n = strategy.num_replicas_in_sync

    def gradient(c):
        return jax.grad(lambda x: (jdist.all_gather(x, 1) * c).sum())(jnp.float32([[3], [5]]))

    grads = strategy.run(gradient, (_each(strategy, lambda i: jnp.float32([i + 1])),))
    total = n * (n + 1) / 2
    for grad in strategy.local_results(grads):
        assert grad.tolist() == [[total], [total]]


def test_ga17_gradient_through_all_gather_is_the_gradient_of_the_local_part(two):
    gradient = lambda x: jax.grad(lambda x: (jdist.all_gather(x[None], 0) * jnp.float32([3, 5])).sum())(x)
    grads = two.run(gradient, (_per_replica(two, 1.0, 2.0),))
    assert [float(x) for x in grads.values] == [6.0, 10.0]


def test_ga18_all_gather_of_one_replica_is_the_identity():
    x = {"a": jnp.arange(6).reshape(2, 3), "b": jnp.ones((1, 2))}
    for axis in (0, 1):
        chex.assert_trees_all_equal(jdist.all_gather(x, axis), x)


def test_ga19_ga20_failed_gather_does_not_affect_later_sums(two):
    with pytest.raises(ValueError, match=MISMATCH):
        two.gather(_wide(two), axis=0)
    for strategy in (two, jdist.MirroredStrategy(["cpu:0", "cpu:1"])):
        assert float(strategy.run(lambda: jdist.all_reduce("sum", jdist.replica_id() + 1))) == 3.0
        assert strategy.gather(_wide(strategy), axis=1).tolist() == [[1.0, 1.0, 1.0]]
