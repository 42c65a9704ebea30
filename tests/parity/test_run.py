"""`Strategy.run` and values from a function: the rows RU of `rows.txt`."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jdist

from laws import each_row


def _per_replica(*values):
    return jdist.PerReplica(np.asarray(values))


def _floats(value):
    return [float(x) for x in value.values]


def test_ru1_run_passes_per_replica_values_and_replicated_ones(two):
    result = two.run(lambda a, b, k: a * b + k, (_per_replica(1.0, 2.0), 10.0), {"k": 1.0})
    assert _floats(result) == [11.0, 21.0]


def test_ru2_replicated_result_is_one_plain_value(strategy):
    assert strategy.run(lambda: 3).item() == 3
    assert strategy.run(lambda: None) is None
    constant = strategy.run(lambda: jnp.float32(1.5))
    assert [x.item() for x in strategy.local_results(constant)] == [1.5] * strategy.num_replicas_in_sync


def test_ru3_result_of_a_tree_is_a_tree_of_per_replica_values(strategy):
    n = strategy.num_replicas_in_sync
    nest = lambda x: {"a": x, "b": (x + 1, None), "c": {}}
    result = strategy.run(nest, (jdist.PerReplica(np.arange(n)),))
    expected = {"a": jdist.PerReplica(np.arange(n)), "b": (jdist.PerReplica(np.arange(1, n + 1)), None), "c": {}}
    chex.assert_trees_all_equal(result, expected)


def test_ru6_values_from_function_are_made_for_each_replica(two):
    made = two.distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    assert [int(x) for x in made.values] == [0, 1]
    times = lambda context: tuple(x * context.replica_id_in_sync_group for x in (1.0, 2.0, 3.0))
    chex.assert_trees_all_equal(
        two.distribute_values_from_function(times).tree, tuple(np.float32([0, x]) for x in (1, 2, 3))
    )


MADE = {
    "numpy": (lambda i: np.full(2, i, np.float32), lambda x: x),
    "sparse": (
        lambda i: sparse.BCOO((np.float32([i, i]), np.int32([[0], [2]])), shape=(3,)),
        lambda x: x.todense()[jnp.array([0, 2])],
    ),
    "row_slices": (
        lambda i: jdist.RowSlices(np.float32([i, i]), np.int32([0, 2]), num_rows=3),
        lambda x: x.dense()[jnp.array([0, 2])],
    ),
}


@pytest.mark.parametrize("make, numbers", MADE.values(), ids=MADE)
def test_ru7_values_from_function_may_be_arrays_of_any_type(make, numbers, strategy):
    made = strategy.distribute_values_from_function(lambda context: make(context.replica_id_in_sync_group))
    assert isinstance(made, jdist.PerReplica)
    result = strategy.local_results(strategy.run(numbers, (made,)))
    for number, row in enumerate(result):
        np.testing.assert_array_equal(row, np.full(2, number, np.float32))


def test_ru7_values_from_function_may_be_none(strategy):
    nothing = strategy.distribute_values_from_function(lambda context: None)
    assert isinstance(nothing, jdist.PerReplica)
    assert strategy.run(lambda x: x, (nothing,)) is None


def test_ru8_run_takes_values_from_function(strategy):
    made = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    squares = strategy.run(jnp.square, (made,))
    assert [int(x) for x in squares.values] == [i**2 for i in range(strategy.num_replicas_in_sync)]


def test_ru9_values_from_function_may_come_from_an_iterator(two):
    numbers = iter(range(2))
    made = two.distribute_values_from_function(lambda context: next(numbers))
    assert [int(x) for x in made.values] == [0, 1]


@each_row("fn, got", [(3, "int"), (None, "NoneType"), ("f", "str")])
def test_ru13_run_of_an_object_that_is_not_a_function_is_an_error(fn, got, strategy):
    with pytest.raises(TypeError, match=f"`fn` must be a function, got {got}"):
        strategy.run(fn)


def test_ru13_run_accepts_its_arguments_as_a_list(two):
    assert _floats(two.run(lambda a, b: a + b, [_per_replica(1.0, 2.0), 10.0])) == [11.0, 12.0]


def test_ru15_result_of_a_host_value_is_the_same_on_each_replica(strategy):
    result = strategy.local_results(strategy.run(lambda x: x**2, (2.0,)))
    assert [float(x) for x in result] == [4.0] * strategy.num_replicas_in_sync


def test_ru16_arithmetic_of_per_replica_on_the_host_is_an_error(two):
    message = r"is not defined for PerReplica\(\[1\., 2\.\], dtype=float32\), whose values are .*`strategy\.run\(fn, \(value,\)\)`"
    for add in (lambda x: x + jnp.float32(1), lambda x: jnp.float32(1) + x, jnp.asarray, np.asarray):
        with pytest.raises(TypeError, match=message):
            add(two.run(lambda x: x, (jdist.PerReplica(np.float32([1, 2])),)))
