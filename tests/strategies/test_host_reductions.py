"""`reduce`, `gather` and `local_results` of the host program, compared with numpy."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, each_row, replica_devices, rows

few = hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)
NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
CACHED = {name: make() for name, make in STRATEGIES.items()}
SLOW = ("mirrored_1", "mirrored_2", "mirrored_8")  # each like another strategy of the table
every_strategy = pytest.mark.parametrize(
    "strategy",
    [pytest.param(CACHED[name], id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CACHED],
)


@pytest.fixture
def two():
    return CACHED["mirrored_2"]


@st.composite
def reductions(draw):
    """Draws an operation, the shape of one replica's value, the dimensions to reduce, a dtype and a seed."""
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape))) if shape else []
    dims = [dim - len(shape) if draw(st.booleans()) else dim for dim in dims]
    axis = draw(st.sampled_from([tuple(dims), dims, dims[0]])) if dims else draw(st.sampled_from([None, ()]))
    dtype = draw(st.sampled_from(["float32", "int32", "bfloat16", "int8"]))
    return draw(st.sampled_from(list(NUMPY))), tuple(shape), axis, dtype, draw(st.integers(0, 99))


def _numpy_axes(axis):
    dims = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    return (0, *(dim + 1 if dim >= 0 else dim for dim in dims))


@every_strategy
@few
@hypothesis.given(reductions())
def test_reduce_equals_numpy_over_replicas_and_dimensions(strategy, case):
    op, shape, axis, dtype, seed = case
    all_rows = np.random.default_rng(seed).integers(-9, 9, size=(strategy.num_replicas_in_sync, *shape))
    value = strategy.put({"x": jdist.PerReplica(all_rows.astype(jnp.dtype(dtype))), "none": None})
    actual = strategy.reduce(op, value, axis=axis)["x"]
    tolerance = {"bfloat16": 1e-2}.get(dtype, 1e-6)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), NUMPY[op](all_rows, axis=_numpy_axes(axis)), rtol=tolerance
    )
    assert jnp.issubdtype(actual.dtype, jnp.floating) == (op == "mean" or dtype in ("float32", "bfloat16"))
    assert actual.sharding.device_set == set(strategy.mesh.devices.flat)
    assert_in_step(actual)


@every_strategy
@few
@hypothesis.given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_gather_concatenates_the_rows_in_order(strategy, shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    all_rows = np.arange(strategy.num_replicas_in_sync * np.prod(shape)).reshape(-1, *shape)
    actual = strategy.gather(strategy.put({"x": jdist.PerReplica(all_rows)}), axis=axis)["x"]
    np.testing.assert_array_equal(actual, np.concatenate(all_rows, axis=axis))
    assert_in_step(actual)


def test_negative_axis_counts_the_dimensions_of_uneven_rows_from_the_last(two):
    value = two.distribute_values_from_function(lambda c: np.ones((2, 1 + c.replica_id_in_sync_group)))
    assert two.reduce("sum", value, axis=-1).tolist() == [3, 3]
    assert two.gather(value, axis=-1).shape == (2, 3)


@every_strategy
def test_reduce_of_replicated_array_counts_it_once_per_replica(strategy):
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    n = strategy.num_replicas_in_sync
    actual = {op: strategy.reduce(op, strategy.put(x), axis=0) for op in NUMPY}
    expected = {"sum": n * x.sum(0), "mean": x.mean(0), "max": x.max(0), "min": x.min(0)}
    chex.assert_trees_all_close(actual, expected, rtol=1e-6)


@every_strategy
def test_gather_of_replicated_array_contains_it_once_per_replica(strategy):
    actual = strategy.gather(strategy.put(np.arange(3)), axis=0)
    np.testing.assert_array_equal(actual, np.tile(np.arange(3), strategy.num_replicas_in_sync))


@every_strategy
def test_host_rows_in_a_wrapper_are_accepted(strategy):
    all_rows = np.arange(strategy.num_replicas_in_sync * 2.0, dtype=np.float32).reshape(-1, 2)
    value = jdist.PerReplica(all_rows)
    np.testing.assert_allclose(strategy.reduce("sum", value, axis=None), all_rows.sum(0), rtol=1e-6)
    np.testing.assert_array_equal(strategy.gather(value, axis=0), all_rows.ravel())
    np.testing.assert_array_equal(np.stack(strategy.local_results(value)), all_rows)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_loop_of_unblocked_reductions_has_the_right_results(replicas):
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    x = strategy.put(jdist.PerReplica(np.ones((replicas, 64, 64), np.float32)))
    sums = [strategy.reduce("sum", x, axis=None) for _ in range(100)]
    joined = [strategy.gather(x, axis=1) for _ in range(100)]
    np.testing.assert_array_equal(np.stack(sums), np.full((100, 64, 64), replicas))
    np.testing.assert_array_equal(np.stack(joined), np.ones((100, 64, 64 * replicas)))


@every_strategy
def test_reduce_takes_a_reduce_op(strategy):
    x = rows(strategy, 3)
    chex.assert_trees_all_equal(strategy.reduce(jdist.ReduceOp.MAX, x, axis=None), np.asarray(x.tree).max(0))


@every_strategy
def test_reduce_of_results_of_run_is_equal_for_plain_and_wrapped_values(strategy):
    results = strategy.run(lambda x: {"own": x, "all": jdist.all_reduce("mean", x)}, (rows(strategy, 3),))
    actual = strategy.reduce("mean", results, axis=None)
    chex.assert_trees_all_close(actual["own"], actual["all"], rtol=1e-6)


@every_strategy
@pytest.mark.parametrize("axis", [None, 0, (0, 1)])
def test_reduce_of_host_value_treats_it_as_replicated(axis, strategy):
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for op in ("mean", "max", "min"):
        actual = strategy.reduce(op, {"x": x}, axis=axis)["x"]
        np.testing.assert_allclose(np.asarray(actual), x if axis is None else NUMPY[op](x, axis=axis))


@every_strategy
def test_gather_returns_a_host_value_unchanged(strategy):
    x = np.arange(3)
    assert strategy.gather({"x": x}, axis=0)["x"] is x


@every_strategy
def test_local_results_are_the_values_of_each_replica(strategy):
    x = rows(strategy, 2)
    value = {"own": x, "all": strategy.put(np.arange(3)), "host": 7}
    actual = strategy.local_results(value)
    assert len(actual) == strategy.num_replicas_in_sync
    for one, row, devices in zip(actual, np.asarray(x.tree), replica_devices(strategy), strict=True):
        chex.assert_trees_all_equal(one, {"own": row, "all": np.arange(3), "host": 7})
        assert one["own"].devices() == one["all"].devices() == devices


@every_strategy
def test_local_results_of_a_host_value_are_one_value(strategy):
    assert strategy.local_results({"host": 7}) == ({"host": 7},)


@pytest.mark.parametrize("name", ["one_device", "mirrored_1"])
def test_sum_of_host_value_over_one_replica_is_the_value(name):
    assert CACHED[name].reduce("sum", 3.0, axis=None) == 3.0


@pytest.mark.parametrize("axis", [np.int64(0), (0,), [0]], ids=str)
def test_reduce_over_a_dimension_takes_any_integer(axis):
    strategy = STRATEGIES["mirrored_2"]()
    value = rows(strategy, 3)
    np.testing.assert_allclose(strategy.reduce("mean", value, axis=axis), np.mean(value.tree), rtol=1e-6)


MIRRORED = {name: CACHED[name] for name in ("mirrored_1", "mirrored_2", "mirrored_3", "mirrored_8")}
every_mirrored = pytest.mark.parametrize("strategy", MIRRORED.values(), ids=MIRRORED)


def _uneven(strategy, counts, *trailing, dtype="int32", seed=0):
    """Returns integers, `counts[i]` rows on replica i: the list of the parts, and the `PerReplica` value."""
    rng = np.random.default_rng(seed)
    counts = (counts * strategy.num_replicas_in_sync)[: strategy.num_replicas_in_sync]
    parts = [rng.integers(-9, 9, size=(count, *trailing)).astype(jnp.dtype(dtype)) for count in counts]
    return parts, strategy.distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])


COUNTS = {
    "uneven": ([3, 1, 4], "float32"),
    "some_empty": ([0, 2, 0], "int8"),
    "two_rows_on_one": ([1, 1, 2], "bfloat16"),
    "last_empty": ([2, 0], "int32"),
    "none": ([0], "int8"),
}


@every_mirrored
@pytest.mark.parametrize("counts, dtype", COUNTS.values(), ids=COUNTS)
def test_reduce_over_uneven_rows_equals_numpy_on_all_rows(counts, dtype, strategy):
    parts, value = _uneven(strategy, counts, 2, dtype=dtype)
    all_rows = np.concatenate(parts).astype(np.float64)
    cases = [("sum", 0), ("max", 0), ("min", 0), ("mean", 0), ("mean", (0, 1))]
    for op, axis in cases if len(all_rows) else cases[:1]:
        actual = strategy.reduce(op, value, axis=axis)
        np.testing.assert_allclose(np.asarray(actual, np.float64), NUMPY[op](all_rows, axis=axis), rtol=1e-2)
        assert jnp.issubdtype(actual.dtype, jnp.floating) == (op == "mean" or dtype in ("float32", "bfloat16"))
        assert_in_step(actual)


@every_mirrored
@pytest.mark.parametrize("counts, dtype", COUNTS.values(), ids=COUNTS)
def test_gather_of_uneven_rows_concatenates_them_in_order(counts, dtype, strategy):
    parts, value = _uneven(strategy, counts, 2, dtype=dtype)
    actual = strategy.gather(value, axis=0)
    np.testing.assert_array_equal(np.asarray(actual), np.concatenate(parts))
    assert actual.dtype == dtype
    assert_in_step(actual)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "uint8", "float16"])
def test_gather_of_uneven_rows_takes_numbers_and_booleans(dtype, two):
    parts, value = _uneven(two, [1, 2], 2, dtype=dtype)
    actual = two.gather(value, axis=0)
    np.testing.assert_array_equal(np.asarray(actual), np.concatenate(parts))
    assert actual.dtype == dtype


@few
@hypothesis.given(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.sampled_from(list(NUMPY)), st.integers(0, 9))
def test_reduce_and_gather_of_any_rows_equal_numpy_on_all_rows(counts, op, seed):
    strategy = CACHED["mirrored_3"]
    parts, value = _uneven(strategy, counts, 2, seed=seed)
    all_rows = np.concatenate(parts)
    np.testing.assert_array_equal(strategy.gather(value, axis=0), all_rows)
    if len(all_rows) or op == "sum":
        np.testing.assert_allclose(strategy.reduce(op, value, axis=0), NUMPY[op](all_rows, axis=0), rtol=1e-5)
    else:
        with pytest.raises(
            ValueError, match=rf"Cannot compute the {op.upper()} of value: it is empty on every replica"
        ):
            strategy.reduce(op, value, axis=0)


@every_mirrored
def test_reduce_over_an_uneven_trailing_dimension_keeps_the_rows(strategy):
    n = strategy.num_replicas_in_sync
    parts = [np.random.default_rng(i).integers(-9, 9, size=(2, 1 + i % 3)) for i in range(n)]
    value = strategy.distribute_values_from_function(lambda c: {"x": parts[c.replica_id_in_sync_group]})
    all_rows = np.concatenate(parts, axis=1)
    for op, reduction in NUMPY.items():
        np.testing.assert_allclose(strategy.reduce(op, value, axis=1)["x"], reduction(all_rows, axis=1), rtol=1e-6)
        np.testing.assert_allclose(strategy.reduce(op, value, axis=(1, 0))["x"], reduction(all_rows), rtol=1e-6)
    np.testing.assert_array_equal(strategy.gather(value, axis=1)["x"], all_rows)


@every_mirrored
def test_tree_of_uneven_leaves_is_reduced_leaf_by_leaf(strategy):
    n = strategy.num_replicas_in_sync
    make = lambda i: {"a": np.arange(i % 3 + 1) + 10 * i, "b": (np.full((2, 2), i, np.float32), None), "c": []}
    parts = [make(i) for i in range(n)]
    value = {
        "own": strategy.distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group]),
        "host": np.ones(2),
    }
    joined = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    chex.assert_trees_all_equal(strategy.gather(value, axis=0), {"own": joined, "host": np.ones(2)})
    chex.assert_trees_all_close(
        strategy.reduce("mean", value, axis=0),
        {"own": jax.tree.map(lambda x: x.mean(0).astype(np.float32), joined), "host": np.float32(1)},
        rtol=1e-6,
    )
    actual = strategy.local_results(value)
    assert len(actual) == n
    for one, part, device in zip(actual, parts, strategy.mesh.devices.flat, strict=True):
        chex.assert_trees_all_equal(one, {"own": part, "host": np.ones(2)})
        assert {device} == set().union(*(leaf.devices() for leaf in jax.tree.leaves(one["own"])))


def test_maximum_of_uneven_negative_rows_ignores_the_padding(two):
    value = two.distribute_values_from_function(lambda c: -1 - np.arange(1 + 2 * c.replica_id_in_sync_group))
    assert [int(two.reduce(op, value, axis=0)) for op in ("max", "min", "sum")] == [-1, -3, -7]
    assert float(two.reduce("mean", value, axis=0)) == -7 / 4


def test_mean_of_uneven_rows_counts_elements_and_not_replicas(two):
    value = two.distribute_values_from_function(
        lambda c: np.float32([1, 1, 1, 5][3 * c.replica_id_in_sync_group :][:3])
    )
    assert float(two.reduce("mean", value, axis=0)) == 2


def _wrapped(strategy, x):
    """Returns `x` `[replica, 2]` in each wrapper, with the row that each replica then holds."""
    return {
        "per_replica": (jdist.PerReplica(x), x),
        "sync_on_read": (jdist.SyncOnRead(x, "mean"), x),
        "sharded": (jdist.Sharded(x.ravel()), x),
        "mirrored": (jdist.Mirrored(x[0], "sum"), np.tile(x[0], (len(x), 1))),
        "plain": (x[0], np.tile(x[0], (len(x), 1))),
    }


@every_strategy
@pytest.mark.parametrize("kind", ["per_replica", "sync_on_read", "sharded", "mirrored", "plain"])
def test_wrappers_are_reduced_by_the_values_of_each_replica(kind, strategy):
    n = strategy.num_replicas_in_sync
    value, all_rows = _wrapped(strategy, np.random.default_rng(1).integers(-9, 9, (n, 2)).astype(np.float32))[kind]
    value = strategy.put({"x": value, "none": None})
    for op, reduction in NUMPY.items():
        np.testing.assert_allclose(strategy.reduce(op, value, axis=None)["x"], reduction(all_rows, axis=0), rtol=1e-6)
        np.testing.assert_allclose(strategy.reduce(op, value, axis=0)["x"], reduction(all_rows), rtol=1e-6)
    joined = strategy.gather(value, axis=0)
    np.testing.assert_array_equal(joined["x"], all_rows.ravel())
    assert_in_step(joined)
    actual = strategy.local_results(value)
    for one, row, devices in zip(actual, all_rows, replica_devices(strategy), strict=True):
        chex.assert_trees_all_equal(one, {"x": row, "none": None})
        assert one["x"].devices() == devices


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_keeps_the_dtype_of_floats(op, dtype, two):
    parts = np.asarray([[1, 2, 4], [8, 16, 32]], jnp.dtype(dtype))
    even = two.reduce(op, jdist.PerReplica(parts), axis=None)
    assert even.dtype == dtype
    np.testing.assert_allclose(np.asarray(even, complex), NUMPY[op](parts.astype(complex), axis=0))
    uneven = two.distribute_values_from_function(
        lambda c: parts[c.replica_id_in_sync_group, c.replica_id_in_sync_group :]
    )
    actual = two.reduce(op, uneven, axis=0)
    assert actual.dtype == dtype
    all_rows = np.concatenate([parts[0], parts[1, 1:]]).astype(complex)
    np.testing.assert_allclose(np.asarray(actual, complex), NUMPY[op](all_rows), rtol=1e-3)


@pytest.mark.parametrize("dtype, wide", [("int8", "int32"), ("uint8", "uint32"), ("int32", "int32")])
@pytest.mark.parametrize("more", [0, 1], ids=["even", "uneven"])
def test_sum_and_mean_of_small_integers_do_not_wrap(more, dtype, wide, two):
    value = two.distribute_values_from_function(lambda c: np.full(2 + more * c.replica_id_in_sync_group, 100, dtype))
    actual = {op: two.reduce(op, value, axis=0) for op in NUMPY}
    expected = {"sum": (100 * (4 + more), wide), "mean": (100, "float32"), "max": (100, dtype), "min": (100, dtype)}
    assert {op: (float(x), str(x.dtype)) for op, x in actual.items()} == expected


def test_gather_of_keys_concatenates_the_keys_in_order(strategy):
    keys = jax.random.split(jax.random.key(4), 2 * strategy.num_replicas_in_sync)
    value = strategy.put(jdist.PerReplica(keys.reshape(-1, 2)))
    np.testing.assert_array_equal(jax.random.key_data(strategy.gather(value, axis=0)), jax.random.key_data(keys))


def _slices(i):
    """Returns the rows of replica i, and their indices in a table of 5 rows."""
    rng = np.random.default_rng(i)
    return rng.integers(-9, 9, size=(2, 3)).astype(np.float32), rng.integers(0, 5, size=2).astype(np.int32)


@every_strategy
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_of_row_slices_equals_numpy_on_the_dense_tables(op, strategy):
    n = strategy.num_replicas_in_sync
    rows, indices = (np.stack(parts) for parts in zip(*map(_slices, range(n)), strict=True))
    own = strategy.put(jdist.RowSlices(jdist.PerReplica(rows), jdist.PerReplica(indices), 5))
    actual = strategy.reduce(op, {"x": own, "y": jdist.PerReplica(rows)}, axis=None)
    tables = [jdist.RowSlices(*_slices(i), 5).dense() for i in range(n)]
    np.testing.assert_allclose(actual["x"].dense(), NUMPY[op](np.stack(tables), axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual["y"], NUMPY[op](rows, axis=0), rtol=1e-5, atol=1e-6)
    assert_in_step(actual)


@every_mirrored
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_of_uneven_row_slices_equals_numpy_on_the_dense_tables(op, strategy):
    n = strategy.num_replicas_in_sync
    parts = [tuple(x[: i % 3] for x in _slices(i)) for i in range(n)]
    rows, indices = (
        strategy.distribute_values_from_function(lambda c, k=k: parts[c.replica_id_in_sync_group][k]) for k in (0, 1)
    )
    actual = strategy.reduce(op, jdist.RowSlices(rows, indices, 5), axis=None)
    tables = [jdist.RowSlices(*part, 5).dense() for part in parts]
    np.testing.assert_allclose(actual.dense(), NUMPY[op](np.stack(tables), axis=0), rtol=1e-5, atol=1e-6)


@every_strategy
def test_reduce_of_row_slices_equals_all_reduce_in_the_replica_function(strategy):
    def make(x):
        own = jdist.RowSlices(x, jdist.replica_id()[None] % 4, 4)
        return own, jdist.all_reduce("sum", own).dense()

    own, agreed = strategy.run(make, (rows(strategy, 1, 3),))
    np.testing.assert_allclose(strategy.reduce("sum", own, axis=None).dense(), agreed, rtol=1e-5, atol=1e-6)


@every_mirrored
def test_reduce_of_row_slices_in_a_wrapper_equals_row_slices_of_wrappers(strategy):
    n = strategy.num_replicas_in_sync
    parts = [jdist.RowSlices(*(x[: 1 + i % 2] for x in _slices(i)), 5) for i in range(n)]
    value = strategy.distribute_values_from_function(lambda c: {"x": parts[c.replica_id_in_sync_group]})
    actual = strategy.reduce("sum", value, axis=None)["x"]
    np.testing.assert_allclose(actual.dense(), np.sum([part.dense() for part in parts], axis=0), rtol=1e-6)


def test_mean_of_host_row_slices_treats_them_as_replicated(two):
    actual = two.reduce("mean", {"x": jdist.RowSlices(*_slices(0), 5)}, axis=None)["x"]
    np.testing.assert_array_equal(actual.dense(), jdist.RowSlices(*_slices(0), 5).dense())


def test_reduce_of_replicated_row_slices_counts_them_once_per_replica(two):
    same = two.put(jdist.RowSlices(*_slices(0), 5))
    table = jdist.RowSlices(*_slices(0), 5).dense()
    np.testing.assert_allclose(two.reduce("sum", same, axis=None).dense(), 2 * table)
    np.testing.assert_allclose(two.reduce("mean", same, axis=None).dense(), table)


@every_strategy
@pytest.mark.parametrize("wrapper", [jdist.PerReplica, jdist.Mirrored, jdist.Sharded], ids=lambda kind: kind.__name__)
def test_wrapper_without_leaves_is_accepted(wrapper, strategy):
    value = {"own": rows(strategy, 2), "empty": wrapper({"a": None})}
    assert strategy.reduce("sum", value, axis=0)["empty"] == {"a": None}
    assert strategy.gather(value, axis=0)["empty"] == {"a": None}
    actual = strategy.local_results(value)
    assert [one["empty"] for one in actual] == [{"a": None}] * strategy.num_replicas_in_sync


def test_reductions_over_groups_have_the_order_of_the_replicas():
    ops = jdist.HierarchicalAllReduce(group_size=2)
    strategy = jdist.MirroredStrategy(["cpu:3", "cpu:1", "cpu:0", "cpu:2"], cross_device_ops=ops)
    parts, value = _uneven(strategy, [2, 0, 1, 3], 2)
    all_rows = np.concatenate(parts)
    np.testing.assert_array_equal(strategy.gather(value, axis=0), all_rows)
    for op, reduction in NUMPY.items():
        np.testing.assert_allclose(strategy.reduce(op, value, axis=0), reduction(all_rows, axis=0), rtol=1e-6)
    for kind, (wrapper, held_rows) in _wrapped(strategy, np.arange(8.0, dtype=np.float32).reshape(4, 2)).items():
        np.testing.assert_array_equal(strategy.gather(strategy.put(wrapper), axis=0), held_rows.ravel(), err_msg=kind)
        np.testing.assert_array_equal(np.stack(strategy.local_results(strategy.put(wrapper))), held_rows, err_msg=kind)


def test_local_results_repeat_a_mirrored_value_that_is_not_placed(two):
    own = two.put(jdist.PerReplica(np.arange(2)))
    first, second = two.local_results({"a": jdist.Mirrored(np.ones(2)), "b": own})
    assert (first["a"].tolist(), int(first["b"])) == (second["a"].tolist(), int(second["b"]) - 1) == ([1.0, 1.0], 0)


def test_reduce_of_a_sharded_value_without_columns_is_empty(two):
    value = two.put(jdist.Sharded(np.ones((4, 0), np.float32)))
    assert two.reduce("sum", value, axis=0).shape == (0,)


def test_mean_of_a_host_integer_is_a_float(two):
    assert two.reduce("mean", {"a": 3, "b": np.int8([1, 2])}, axis=None)["b"].dtype == np.float32
    assert isinstance(two.reduce("mean", 3, axis=None), np.float32)


@every_strategy
def test_maximum_over_rows_is_nan_if_an_element_is_nan(strategy):
    values = np.float32([[np.nan, 1, 2, 3]] * strategy.num_replicas_in_sync)
    for place in (strategy.put, lambda value: value):
        for op in ("max", "min"):
            assert np.isnan(strategy.reduce(op, place(jdist.PerReplica(values)), axis=0))


def test_maximum_of_a_large_host_value_is_nan_if_an_element_is_nan(two):
    values = np.zeros((256, 512), np.float32)  # XLA drops NaN in the maximum of large arrays
    values[7, 5] = np.nan
    for op in ("max", "min"):
        assert np.argwhere(np.isnan(two.reduce(op, values, axis=0))).tolist() == [[5]]
        assert np.argwhere(np.isnan(two.reduce(op, values, axis=1))).tolist() == [[7]]


def test_maximum_of_uneven_rows_is_nan_if_an_element_is_nan(two):
    value = two.distribute_values_from_function(
        lambda c: np.float32([np.nan] + [1.0] * c.replica_id_in_sync_group)[::-1]
    )
    assert all(np.isnan(two.reduce(op, value, axis=0)) for op in ("max", "min"))


def test_read_of_host_integers_that_would_be_truncated_raises():
    for aggregation in ("sum", "mean", "only_first_replica"):
        with pytest.raises(ValueError, match=r"^value holds 1099511627776, which is out of the range of int32"):
            jdist.SyncOnRead(np.array([2**40, 1]), aggregation).read()


def _on_both(make):
    """Returns the value `make(i)` of each replica i of two."""
    return CACHED["mirrored_2"].distribute_values_from_function(lambda c: make(c.replica_id_in_sync_group))


def _row_slices(rows, indices):
    return CACHED["mirrored_2"].put(jdist.RowSlices(rows, indices, 5))


ROWS, OTHER, SCALAR = rows(CACHED["mirrored_2"], 2, 3), rows(CACHED["mirrored_3"], 2), _on_both(lambda i: np.int32(i))
UNEVEN, SLICES = _on_both(lambda i: np.ones((1 + i, 2), np.int32)), _row_slices(*_slices(0))
NO_DIMENSION = r"value\['x'\] is float32\[2,3\]: it does not have dimension {}\. Its dimensions are 0 to 1, or -2 to -1"
HOST_VALUE = r"value\['x'\].*{}.* host value, held by none of the 2 replicas.*`value \* strategy.num_replicas_in_sync`"
NO_AXIS = r"`axis` must be a dimension of one replica's value .*, a sequence of dimensions, or None, got "
NO_INDICES = r"value\['x'\] is RowSlices .* each replica must have one index per row\. Place both: `strategy\.put"
NO_ROW_SLICES = r"`gather` does not support RowSlices.*`value\.dense\(\)`.*`value\.rows`"
OTHER_DEVICES = r"value\['x'\] .*this strategy (has 2|uses cpu:0, cpu:1)"
TRUNCATED = r"^value\['x'\] holds 1099511627776, which is out of the range of int32"
# The method, the value of the leaf "x" of a dict, the arguments of the method, the type of the error and its message.
REFUSED = [
    ("reduce", 3.0, ("sum", None), ValueError, HOST_VALUE.format(r"3\.0")),
    ("reduce", np.ones((2, 3), np.float32), ("sum", None), ValueError, HOST_VALUE.format(r"float32\[2,3\]")),
    ("reduce", jdist.RowSlices(*_slices(0), 5), ("sum", None), ValueError, HOST_VALUE.format("")),
    *(
        ("reduce", x, ("sum", axis), ValueError, NO_DIMENSION.format(axis[-1] if isinstance(axis, tuple) else axis))
        for axis in (2, -3, (0, 2))
        for x in (ROWS, CACHED["mirrored_2"].put(np.ones((2, 3), np.float32)))
    ),
    *(("gather", ROWS, (axis,), ValueError, NO_DIMENSION.format(axis)) for axis in (2, -3)),
    ("gather", SCALAR, (0,), ValueError, r"is int32\[\]: it does not have dimension 0\. It is a scalar"),
    (
        "reduce",
        ROWS,
        ("mean", (0, -2)),
        ValueError,
        r"`axis` names a dimension of value\['x'\] .*twice: \(0, -2\)\. Name",
    ),
    *(("reduce", ROWS, ("mean", axis), TypeError, NO_AXIS) for axis in ("ab", "0", 0.5, True, ("0",), np.array([0]))),
    ("reduce", OTHER, ("sum", None), ValueError, OTHER_DEVICES),
    ("gather", OTHER, (0,), ValueError, OTHER_DEVICES),
    ("local_results", OTHER, (), ValueError, "is on cpu:5, cpu:1, cpu:2, and this strategy uses cpu:0, cpu:1"),
    (
        "reduce",
        UNEVEN,
        ("sum", None),
        ValueError,
        r"value\['x'\] has the shapes \[1, 2\], \[2, 2\] on the replicas, which also differ in dimensions other than "
        r"the reduced ones, \[\].*`axis=0`",
    ),
    (
        "reduce",
        UNEVEN,
        ("max", 1),
        ValueError,
        r"differ in dimensions other than the reduced ones, \[1\].*`strategy\.gather`",
    ),
    ("reduce", UNEVEN, ("sum", 2), ValueError, r"value\['x'\] is int.*: it does not have dimension 2"),
    (
        "gather",
        UNEVEN,
        (1,),
        ValueError,
        r"has the shapes \[1, 2\], \[2, 2\].*concatenated along dimension 1 must have the same sizes in all others",
    ),
    *(
        (
            "reduce",
            x,
            (op, (0, 1)),
            ValueError,
            rf"Cannot compute the {op.upper()} of value.*: it is empty on every replica",
        )
        for op in ("mean", "max", "min")
        for x in (_on_both(lambda i: np.ones((0, 1 + i))), _on_both(lambda i: np.ones((0, 1))))
    ),
    (
        "reduce",
        _on_both(jax.random.key),
        ("mean", 0),
        TypeError,
        r"is a random key \(key<fry>.*Reduce the numbers drawn from it",
    ),
    (
        "reduce",
        _on_both(lambda i: np.ones(2, bool)),
        ("max", None),
        TypeError,
        r"is boolean .* MAX of booleans.*`x\.astype",
    ),
    (
        "reduce",
        _on_both(lambda i: np.ones(i + 1, bool)),
        ("sum", 0),
        TypeError,
        "boolean .* SUM of booleans is ambiguous",
    ),
    (
        "reduce",
        _on_both(lambda i: np.ones(i + 1, np.complex64)),
        ("max", 0),
        TypeError,
        r"is complex .* MAX is not defined .*\. Reduce `abs\(x\)`",
    ),
    ("reduce", _on_both(lambda i: np.ones(2, np.complex64)), ("min", 0), TypeError, r"complex64\[.*MIN is not defined"),
    ("reduce", SLICES, ("max", None), TypeError, "is RowSlices, which can only be reduced by SUM or MEAN"),
    ("reduce", SLICES, ("sum", 0), TypeError, r"is RowSlices.*in the replica function: `value\.dense\(\)`"),
    ("gather", SLICES, (0,), TypeError, NO_ROW_SLICES),
    (
        "reduce",
        _row_slices(np.ones((1, 2), bool), np.int32([2])),
        ("sum", None),
        TypeError,
        r"value\['x'\] is boolean .*`x\.astype\(jnp\.int32\)`",
    ),
    ("reduce", _row_slices(np.ones((1, 2)), np.float32([2])), ("sum", None), TypeError, "indices must be integers"),
    *(
        ("reduce", jdist.RowSlices(rows(CACHED["mirrored_2"], 1, 2), indices, 4), ("sum", None), ValueError, NO_INDICES)
        for indices in (_on_both(lambda i: np.zeros(2, np.int32)), np.array([2]))
    ),
    ("reduce", jdist.PerReplica(np.array([[2**40]] * 2)), ("max", None), ValueError, TRUNCATED),
    ("reduce", np.array([2**40]), ("max", 0), ValueError, TRUNCATED),
    ("gather", jdist.PerReplica(np.array([[2**40]] * 2)), (0,), ValueError, TRUNCATED),
]


@each_row("method, value, arguments, error, message", REFUSED, ids=[f"{row[0]}{row[2]}: {row[4]}" for row in REFUSED])
def test_call_that_is_refused_raises_with_the_name_of_the_leaf(method, value, arguments, error, message, two):
    value = {"x": value}
    call = {
        "reduce": lambda: two.reduce(arguments[0], value, axis=arguments[1]),
        "gather": lambda: two.gather(value, axis=arguments[0]),
        "local_results": lambda: two.local_results(value),
    }[method]
    with pytest.raises(error, match=message) as raised:
        call()
    assert "['x']" in str(raised.value) or message in (NO_AXIS, NO_ROW_SLICES)


@each_row("method, axis, instead", [("reduce", {"op": "sum"}, "all_reduce"), ("gather", {}, "all_gather")])
def test_host_reduction_in_a_replica_function_raises(method, axis, instead, two):
    message = rf"`strategy\.{method}` cannot be called inside a replica function: use `jdist\.{instead}` there"
    with pytest.raises(RuntimeError, match=message):
        two.run(lambda x: getattr(two, method)(value=x, axis=0, **axis), (np.ones(2),))


def test_sum_of_empty_values_is_zero(two):
    assert float(two.reduce("sum", _on_both(lambda i: np.ones((0, 1 + i), np.float32)), axis=(0, 1))) == 0
