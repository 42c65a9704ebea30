"""Rows RD of `rows.txt`: reductions on the host over the values of all replicas."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, each_row


def _per_replica(strategy, *values):
    """Returns a `PerReplica` with one array of float32 or int32 per replica."""
    return strategy.distribute_values_from_function(lambda c: jnp.asarray(values[c.replica_id_in_sync_group]))


NUMBERS, UNEVEN, MATRICES = (1.0, 2.0), ([1.0, 2.0, 3.0], [4.0]), ([[1, 2], [3, 4]], [[2, 4], [6, 8]])
RESULTS = {
    "rd1_rd18_sum": ("sum", NUMBERS, None, 3.0),
    "rd18_sum": ("SUM", NUMBERS, None, 3.0),
    "rd18_mean": ("mean", NUMBERS, None, 1.5),
    "rd18_mean_in_capitals": ("MEAN", NUMBERS, None, 1.5),
    "rd19_max": ("MAX", NUMBERS, None, 2.0),
    "rd5_rd35_sum_of_uneven_rows": ("sum", UNEVEN, 0, 10.0),
    "rd6_rd35_mean_over_elements": ("mean", UNEVEN, 0, 2.5),
    "rd7_mean_without_rows_on_a_replica": ("mean", ([1.0, 2.0, 3.0], []), 0, 2.0),
    "rd7_sum_without_rows_on_a_replica": ("sum", ([1.0, 2.0, 3.0], []), 0, 6.0),
    "rd10_sum_over_the_first_dimension": ("sum", MATRICES, 0, [12, 18]),
    "rd13_sum_over_two_dimensions": ("sum", MATRICES, (0, 1), 30),
    "rd13_mean_over_two_dimensions": ("mean", MATRICES, (0, 1), 3.75),
}


@each_row("op, values, axis, expected", RESULTS.values(), ids=RESULTS)
def test_reduction_of_each_row(op, values, axis, expected, two):
    assert np.asarray(two.reduce(op, _per_replica(two, *values), axis=axis)).tolist() == expected


_boolean = lambda: jdist.replica_id() == 0
_SHAPES = r"value has the shapes \[3\], \[1\] on the replicas.*as in `axis=0`, or concatenate .*`strategy\.gather`"
ERRORS = {
    "rd8_sum": (lambda two: two.reduce("sum", _per_replica(two, *UNEVEN), axis=None), ValueError, _SHAPES),
    "rd8_mean": (lambda two: two.reduce("mean", _per_replica(two, *UNEVEN), axis=None), ValueError, _SHAPES),
    "rd15_scalar": (
        lambda two: two.reduce("mean", two.run(lambda: jdist.replica_id() * 1.0), axis=0),
        ValueError,
        r"value is float32\[\]: it does not have dimension 0\. It is a scalar",
    ),
    "rd19_unknown_name": (
        lambda two: two.reduce("MEDIAN", two.run(jdist.replica_id), axis=None),
        ValueError,
        r"'MEDIAN' is not a reduction; take one of 'SUM', 'MEAN', 'MAX', 'MIN'",
    ),
    "rd21_without_axis": (
        lambda two: two.reduce("sum", _per_replica(two, *NUMBERS)),
        TypeError,
        "argument: 'axis'",
    ),
    "rd27_booleans": (
        lambda two: two.reduce("sum", two.run(_boolean), axis=None),
        TypeError,
        r"value is boolean.*SUM of booleans.*`x\.astype\(jnp\.int32\)`: SUM counts",
    ),
    "rd27_strings": (
        lambda two: two.reduce("sum", jdist.PerReplica(np.array(["a", "b"])), axis=None),
        TypeError,
        "not a number or an array of numbers, and cannot be reduced by SUM",
    ),
    "rd28_in_a_replica_function": (
        lambda two: two.run(lambda: two.reduce("sum", jdist.replica_id(), axis=None)),
        RuntimeError,
        r"`strategy\.reduce` cannot be called inside a replica function.*use `jdist\.all_reduce` there",
    ),
}


@each_row("call, error, message", ERRORS.values(), ids=ERRORS)
def test_call_is_refused(call, error, message, two):
    with pytest.raises(error, match=message):
        call(two)


def test_rd4_mean_and_sum_over_the_rows_of_all_replicas(strategy):
    value = strategy.run(lambda: jnp.float32([1, 2]) + 0 * jdist.replica_id())
    assert isinstance(value, jdist.PerReplica)
    assert float(strategy.reduce("mean", value, axis=0)) == 1.5
    assert float(strategy.reduce("sum", value, axis=0)) == 3 * strategy.num_replicas_in_sync


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


def test_rd29_sum_on_one_device_is_the_value_of_its_replica():
    one = jdist.OneDeviceStrategy("cpu:0")
    assert float(one.reduce("sum", _per_replica(one, 5.0), axis=None)) == 5.0
    assert float(one.reduce("sum", _per_replica(one, [5.0, 6.0]), axis=0)) == 11.0


def test_rd30_default_strategy_sums_over_the_dimension():
    assert float(jdist.get_strategy().reduce("sum", jnp.float32([1, 2]), axis=0)) == 3.0


CENTRAL = {
    "central_storage": STRATEGIES["central_2"],
    "one_device_reduces": lambda: jdist.MirroredStrategy(
        ["cpu:0", "cpu:1"], cross_device_ops=jdist.ReductionToOneDevice()
    ),
}


@pytest.mark.parametrize("make", CENTRAL.values(), ids=CENTRAL)
def test_rd31_sum_under_central_storage(make):
    central = make()
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
