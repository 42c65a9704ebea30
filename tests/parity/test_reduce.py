"""Rows RD of `rows.txt`: reductions on the host over the values of all replicas."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import each_row


def _per_replica(strategy, *values):
    """Returns a `PerReplica` with one array of float32 or int32 per replica."""
    return strategy.distribute_values_from_function(lambda c: jnp.asarray(values[c.replica_id_in_sync_group]))


def _uneven(strategy):
    return _per_replica(strategy, [1.0, 2.0, 3.0], [4.0])


def test_rd1_sum_of_two_numbers(two):
    assert float(two.reduce("sum", _per_replica(two, 1.0, 2.0), axis=None)) == 3.0


def test_rd4_mean_and_sum_over_the_rows_of_all_replicas(strategy):
    value = strategy.run(lambda: jnp.float32([1, 2]) + 0 * jdist.replica_id())
    assert isinstance(value, jdist.PerReplica)
    assert float(strategy.reduce("mean", value, axis=0)) == 1.5
    assert float(strategy.reduce("sum", value, axis=0)) == 3 * strategy.num_replicas_in_sync


def test_rd5_sum_of_uneven_rows_adds_all_of_them(two):
    assert float(two.reduce("sum", _uneven(two), axis=0)) == 10.0


def test_rd6_mean_of_uneven_rows_is_over_elements(two):
    assert float(two.reduce("mean", _uneven(two), axis=0)) == 2.5


def test_rd7_replica_without_rows_does_not_count(two):
    value = _per_replica(two, [1.0, 2.0, 3.0], [])
    assert float(two.reduce("mean", value, axis=0)) == 2.0
    assert float(two.reduce("sum", value, axis=0)) == 6.0


@each_row("op", ["sum", "mean"])
def test_rd8_uneven_rows_element_by_element_are_errors(op, two):
    message = r"value has the shapes \[3\], \[1\] on the replicas.*as in `axis=0`, or concatenate .*`strategy\.gather`"
    with pytest.raises(ValueError, match=message):
        two.reduce(op, _uneven(two), axis=None)


def _matrices(strategy):
    return strategy.run(lambda: jnp.int32([[1, 2], [3, 4]]) * (jdist.replica_id() + 1))


def test_rd10_sum_over_the_first_dimension_keeps_the_second(two):
    assert two.reduce("sum", _matrices(two), axis=0).tolist() == [12, 18]


def test_rd13_reduction_over_two_dimensions_is_a_scalar(two):
    assert float(two.reduce("sum", _matrices(two), axis=(0, 1))) == 30.0
    assert float(two.reduce("mean", _matrices(two), axis=(0, 1))) == 3.75


def test_rd15_mean_of_a_scalar_over_a_dimension_is_an_error(strategy):
    message = r"value is float32\[\]: it does not have dimension 0\. It is a scalar"
    with pytest.raises(ValueError, match=message):
        strategy.reduce("mean", strategy.run(lambda: jdist.replica_id() * 1.0), axis=0)


REDUCTIONS = {"sum": 3.0, "SUM": 3.0, "mean": 1.5, "MEAN": 1.5}


@pytest.mark.parametrize("op, expected", REDUCTIONS.items(), ids=REDUCTIONS)
def test_rd18_reduction_accepts_its_name_in_any_case(op, expected, two):
    assert float(two.reduce(op, _per_replica(two, 1.0, 2.0), axis=None)) == expected


def test_rd19_unknown_reduction_is_an_error(strategy):
    with pytest.raises(ValueError, match=r"'MEDIAN' is not a reduction; take one of 'SUM', 'MEAN', 'MAX', 'MIN'"):
        strategy.reduce("MEDIAN", strategy.run(jdist.replica_id), axis=None)


def test_rd21_axis_is_a_required_argument(two):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'axis'"):
        two.reduce("sum", _per_replica(two, 1.0, 2.0))


HOST_VALUES = {
    "rd22_number": (1.0, r"value is 1\.0, a host value"),
    "rd22_numpy_array": (np.float32([1]), r"value is float32\[1\], a host value"),
    "rd22_array_on_one_device": (lambda: jnp.float32(1), r"value is float32\[\], a host value"),
    "rd24_integer": (0, r"value is 0, a host value"),
}


@each_row("value, message", HOST_VALUES.values(), ids=HOST_VALUES)
def test_rd22_rd24_sum_of_host_value_is_an_error(value, message, two):
    value = value() if callable(value) else value
    with pytest.raises(ValueError, match=rf"{message}, held by none of the 2 replicas.*`value \* strategy"):
        two.reduce("sum", value, axis=None)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_rd22_none_is_an_empty_tree(op, two):
    assert two.reduce(op, None, axis=None) is None
    assert two.reduce(op, {"a": None, "b": _per_replica(two, 2.0, 2.0)}, axis=None)["a"] is None


def test_rd23_mean_of_host_value_is_the_value(strategy):
    assert float(strategy.reduce("mean", 1.0, axis=None)) == 1.0
    assert float(strategy.reduce("mean", jnp.float32(1.0), axis=None)) == 1.0


def test_rd25_tree_is_reduced_leaf_by_leaf(two):
    value = _per_replica(two, 1.0, 2.0)
    assert two.reduce("sum", {"a": value, "b": value}, axis=None) == {"a": 3.0, "b": 3.0}


def test_rd26_replicated_value_equals_its_mean_and_counts_once_per_replica_in_a_sum(strategy):
    for value in (strategy.put(jdist.Mirrored(np.float32([1, 2]))), strategy.put(np.float32([1, 2]))):
        mean, total = (strategy.reduce(op, value, axis=None) for op in ("mean", "sum"))
        n = strategy.num_replicas_in_sync
        assert mean.tolist() == [1.0, 2.0]
        assert total.tolist() == [1.0 * n, 2.0 * n]


def test_rd27_sum_of_booleans_is_an_error_with_the_fix(strategy):
    value = strategy.run(lambda: jdist.replica_id() == 0)
    with pytest.raises(TypeError, match=r"value is boolean.*SUM of booleans.*`x\.astype\(jnp\.int32\)`: SUM counts"):
        strategy.reduce("sum", value, axis=None)


def test_rd27_sum_of_strings_is_an_error(two):
    with pytest.raises(TypeError, match="not a number or an array of numbers, and cannot be reduced by SUM"):
        two.reduce("sum", jdist.PerReplica(np.array(["a", "b"])), axis=None)


def test_rd28_host_reduction_in_a_replica_function_is_an_error(strategy):
    with pytest.raises(
        RuntimeError,
        match=r"`strategy\.reduce` cannot be called inside a replica function.*use `jdist\.all_reduce` there",
    ):
        strategy.run(lambda: strategy.reduce("sum", jdist.replica_id(), axis=None))


def test_rd29_sum_on_one_device_is_the_value_of_its_replica():
    one = jdist.OneDeviceStrategy("cpu:0")
    assert float(one.reduce("sum", _per_replica(one, 5.0), axis=None)) == 5.0
    assert float(one.reduce("sum", _per_replica(one, [5.0, 6.0]), axis=0)) == 11.0


def test_rd30_default_strategy_sums_over_the_dimension():
    assert float(jdist.get_strategy().reduce("sum", jnp.float32([1, 2]), axis=0)) == 3.0


def test_rd31_sum_under_central_storage():
    central = jdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=jdist.ReductionToOneDevice())
    value = _per_replica(central, 1.0, 2.0)
    assert float(central.reduce("sum", value, axis=None)) == 3.0
    assert float(central.run(lambda x: jdist.all_reduce("sum", x), (value,))) == 3.0


def test_rd32_sum_is_placed_on_every_device_without_a_destination(two):
    total = two.reduce("sum", _per_replica(two, 1.0, 2.0), axis=None)
    copies = two.local_results(total)
    assert [float(x) for x in copies] == [3.0, 3.0]
    assert [next(iter(x.devices())) for x in copies] == list(two.mesh.devices.flat)


def test_rd33_list_is_reduced_in_its_order(two):
    means = two.reduce(
        "mean", [_per_replica(two, 1.0, 2.0), _per_replica(two, 2.0, 1.0), _per_replica(two, 4.0, 6.0)], axis=None
    )
    assert means == [1.5, 1.5, 5.0]
    assert all(x.sharding.device_set == set(two.mesh.devices.flat) for x in means)


def test_rd34_replicated_value_counts_once_per_replica_alone_and_in_a_list(two):
    value = two.put(1.0)
    assert float(two.reduce("sum", value, axis=None)) == 2.0
    assert two.reduce("sum", [value, value], axis=None) == [2.0, 2.0]


def test_rd35_reductions_of_uneven_rows_are_over_elements(two):
    value = {"mean": two.reduce("mean", _uneven(two), axis=0), "sum": two.reduce("sum", _uneven(two), axis=0)}
    assert value == {"mean": 2.5, "sum": 10.0}
