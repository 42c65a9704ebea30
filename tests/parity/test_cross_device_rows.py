"""Rows CD of `rows.txt`: all-reduce algorithms and their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import AllReduce, CommunicationOptions, HierarchicalAllReduce, ReductionToOneDevice, RowSlices

from laws import each_row

OPS = {
    "all_reduce": AllReduce(),
    "scattered": AllReduce(bytes_to_scatter=0),
    "one_device": ReductionToOneDevice(),
    "process": HierarchicalAllReduce(),
    "single": HierarchicalAllReduce(group_size=1),
}


def _per_replica(strategy, *values):
    """Returns a `PerReplica` with one array of float32 or int32 per replica."""
    return strategy.distribute_values_from_function(lambda c: jnp.asarray(values[c.replica_id_in_sync_group]))


@each_row("replicas", [1, 2, 4])
@each_row("ops", OPS.values(), ids=OPS)
def test_cd1_mean_and_sum_are_placed_on_every_device(ops, replicas):
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], cross_device_ops=ops)
    numbers = _per_replica(strategy, *map(float, range(replicas)))
    inside = strategy.run(lambda x: [jdist.all_reduce(op, x) for op in ("mean", "sum")], (numbers,))
    outside = [strategy.reduce(op, numbers, axis=None) for op in ("mean", "sum")]
    expected = [(replicas - 1) / 2, replicas * (replicas - 1) / 2]
    for result in (inside, outside):
        assert result == expected
        assert jax.device_put(result, jax.local_devices()[7]) == expected
        for copies, one in zip(map(strategy.local_results, result), expected, strict=True):
            assert [float(x) for x in copies] == [one] * replicas
            assert [next(iter(x.devices())) for x in copies] == list(strategy.mesh.devices.flat)


def test_cd3_number_is_placed_on_every_device(strategy):
    n = strategy.num_replicas_in_sync
    placed = strategy.put(jdist.Mirrored(1.0))
    assert isinstance(placed, jdist.Mirrored)
    assert [float(x) for x in placed.values] == [1.0] * n
    handed = strategy.run(lambda: jdist.broadcast(1.0 + jdist.replica_id()))
    assert [float(x) for x in strategy.local_results(handed)] == [1.0] * n


def _slices(strategy):
    """Returns row 1 on replica 0, and rows 1 and 3 on replica 1."""
    rows = _per_replica(strategy, [[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]])
    return RowSlices(rows, _per_replica(strategy, [1], [1, 3]), num_rows=5)


SPARSE = {
    "cd4": ("sum", [[1, 2], [3, 4], [5, 6]], {1: [4, 6], 3: [5, 6]}),
    "cd5": ("mean", [[0.5, 1], [1.5, 2], [2.5, 3]], {1: [2, 3], 3: [2.5, 3]}),
}


@pytest.mark.parametrize("op, rows, table", SPARSE.values(), ids=SPARSE)
def test_cd4_cd5_reduction_of_row_slices_concatenates_the_rows(op, rows, table, two):
    result = two.reduce(op, _slices(two), axis=None)
    assert isinstance(result, RowSlices)
    assert result.rows.tolist() == rows
    assert result.indices.tolist() == [1, 1, 3]
    assert result.num_rows == 5
    assert result.dense().tolist() == [table.get(i, [0, 0]) for i in range(5)]


@each_row("ops", OPS.values(), ids=OPS)
@each_row("num_rows", [5, 500], ids=["small_table", "large_table"])
@each_row("op, table", [(op, table) for op, _, table in SPARSE.values()], ids=SPARSE)
def test_cd4_cd5_reduction_of_row_slices_in_a_replica_function_equals_the_reduction_of_tables(op, table, num_rows, ops):
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    rows = _per_replica(strategy, np.float32([[1, 2], [0, 0]]), np.float32([[3, 4], [5, 6]]))
    reduce = lambda rows: jdist.all_reduce(op, RowSlices(rows, jnp.int32([1, 3]), num_rows)).dense()
    result = strategy.run(reduce, (rows,))
    assert result.tolist() == [table.get(i, [0, 0]) for i in range(num_rows)]


def test_cd6_mean_of_mirrored_value_is_a_plain_array_on_every_device(two):
    result = two.reduce("mean", two.put(jdist.Mirrored(1.0)), axis=None)
    assert isinstance(result, jax.Array)
    assert [float(x) for x in two.local_results(result)] == [1.0, 1.0]


def test_cd8_list_of_a_host_number_is_an_error_and_an_empty_list_is_reduced_to_itself(two):
    with pytest.raises(ValueError, match=r"value\[0\] is 5, a host value, held by none of the 2 replicas"):
        two.reduce("sum", [5], axis=None)
    assert two.reduce("sum", [], axis=None) == []


def test_cd9_negative_sizes_are_errors():
    with pytest.raises(ValueError, match=r"`bytes_to_scatter` must be >= 0, got -1\. It is a number of bytes"):
        AllReduce(-1)
    with pytest.raises(ValueError, match=r"2 replicas cannot form groups of -1: `group_size` must be a divisor of 2"):
        jdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=HierarchicalAllReduce(-1))


@pytest.mark.parametrize("ops", [AllReduce(), HierarchicalAllReduce()], ids=str)
def test_cd10_algorithms_for_accelerators_work_on_cpu(ops):
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    assert float(strategy.run(lambda: jdist.all_reduce("sum", jnp.cos(0.0 * jdist.replica_id())))) == 2.0


def test_cd12_invalid_options_are_errors():
    with pytest.raises(ValueError, match=r"`bytes_per_pack` must be >= 0, got -1\. .*None selects a default"):
        CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(
        TypeError, match=r"`cross_device_ops` must be a CrossDeviceOps, .*`jdist\.AllReduce\(\)`, got 'X'"
    ):
        jdist.MirroredStrategy(["cpu:0"], cross_device_ops="X")
    message = r"`communication_options` must be a CommunicationOptions, .*`jdist\.CommunicationOptions\(\)`, got 'NCCL'"
    with pytest.raises(TypeError, match=message):
        jdist.MirroredStrategy(["cpu:0"], communication_options="NCCL")
