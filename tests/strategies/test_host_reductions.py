"""What the replicas hold, asked from the host program, with numpy as the judge."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, homes, rows

few = hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)
NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
CACHED = {name: make() for name, make in STRATEGIES.items()}
every_strategy = pytest.mark.parametrize("strategy", CACHED.values(), ids=CACHED)


@pytest.fixture
def two():
    return CACHED["mirrored_2"]


@st.composite
def reductions(draw):
    """An operation, the shape of one replica's value, the dimensions to reduce, and a seed."""
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape))) if shape else []
    dims = [dim - len(shape) if draw(st.booleans()) else dim for dim in dims]
    axis = draw(st.sampled_from([tuple(dims), dims, dims[0]])) if dims else draw(st.sampled_from([None, ()]))
    dtype = draw(st.sampled_from(["float32", "int32", "bfloat16", "int8"]))
    return draw(st.sampled_from(list(NUMPY))), tuple(shape), axis, dtype, draw(st.integers(0, 99))


def _over(axis):
    dims = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    return (0, *(dim + 1 if dim >= 0 else dim for dim in dims))


@every_strategy
@few
@hypothesis.given(reductions())
def test_reduce_is_the_reduction_over_replicas_and_dimensions(strategy, case):
    op, shape, axis, dtype, seed = case
    whole = np.random.default_rng(seed).integers(-9, 9, size=(strategy.num_replicas_in_sync, *shape))
    value = strategy.put({"x": jdist.PerReplica(whole.astype(jnp.dtype(dtype))), "none": None})
    found = strategy.reduce(op, value, axis=axis)["x"]
    tolerance = {"bfloat16": 1e-2}.get(dtype, 1e-6)
    np.testing.assert_allclose(np.asarray(found, np.float64), NUMPY[op](whole, axis=_over(axis)), rtol=tolerance)
    assert jnp.issubdtype(found.dtype, jnp.floating) == (op == "mean" or dtype in ("float32", "bfloat16"))
    assert found.sharding.device_set == set(strategy.mesh.devices.flat)
    assert_in_step(found)


@every_strategy
@few
@hypothesis.given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_gather_is_the_rows_joined_in_order(strategy, shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    whole = np.arange(strategy.num_replicas_in_sync * np.prod(shape)).reshape(-1, *shape)
    found = strategy.gather(strategy.put({"x": jdist.PerReplica(whole)}), axis=axis)["x"]
    np.testing.assert_array_equal(found, np.concatenate(whole, axis=axis))
    assert_in_step(found)


def test_negative_axis_counts_the_dimensions_of_uneven_rows_from_the_last(two):
    value = two.distribute_values_from_function(lambda c: np.ones((2, 1 + c.replica_id_in_sync_group)))
    assert two.reduce("sum", value, axis=-1).tolist() == [3, 3]
    assert two.gather(value, axis=-1).shape == (2, 3)


@every_strategy
def test_reduce_of_mirrored_array_counts_it_once_a_replica(strategy):
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    n = strategy.num_replicas_in_sync
    found = {op: strategy.reduce(op, strategy.put(x), axis=0) for op in NUMPY}
    expected = {"sum": n * x.sum(0), "mean": x.mean(0), "max": x.max(0), "min": x.min(0)}
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


@every_strategy
def test_gather_of_mirrored_array_has_it_once_a_replica(strategy):
    found = strategy.gather(strategy.put(np.arange(3)), axis=0)
    np.testing.assert_array_equal(found, np.tile(np.arange(3), strategy.num_replicas_in_sync))


@every_strategy
def test_question_about_host_rows_in_a_wrapper_is_answered(strategy):
    whole = np.arange(strategy.num_replicas_in_sync * 2.0, dtype=np.float32).reshape(-1, 2)
    value = jdist.PerReplica(whole)
    np.testing.assert_allclose(strategy.reduce("sum", value, axis=None), whole.sum(0), rtol=1e-6)
    np.testing.assert_array_equal(strategy.gather(value, axis=0), whole.ravel())
    np.testing.assert_array_equal(np.stack(strategy.local_results(value)), whole)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_loop_of_unblocked_questions_is_answered(replicas):
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    x = strategy.put(jdist.PerReplica(np.ones((replicas, 64, 64), np.float32)))
    sums = [strategy.reduce("sum", x, axis=None) for _ in range(100)]
    joined = [strategy.gather(x, axis=1) for _ in range(100)]
    np.testing.assert_array_equal(np.stack(sums), np.full((100, 64, 64), replicas))
    np.testing.assert_array_equal(np.stack(joined), np.ones((100, 64, 64 * replicas)))


@every_strategy
def test_reduce_takes_the_operation_itself(strategy):
    x = rows(strategy, 3)
    chex.assert_trees_all_equal(strategy.reduce(jdist.ReduceOp.MAX, x, axis=None), np.asarray(x.tree).max(0))


@every_strategy
def test_reduce_of_what_run_returned_is_the_same_for_plain_and_wrapped(strategy):
    results = strategy.run(lambda x: {"own": x, "all": jdist.all_reduce("mean", x)}, (rows(strategy, 3),))
    found = strategy.reduce("mean", results, axis=None)
    chex.assert_trees_all_close(found["own"], found["all"], rtol=1e-6)


@every_strategy
@pytest.mark.parametrize("axis", [None, 0, (0, 1)])
def test_reduce_of_host_value_is_as_if_every_replica_held_it(axis, strategy):
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for op in ("mean", "max", "min"):
        found = strategy.reduce(op, {"x": x}, axis=axis)["x"]
        np.testing.assert_allclose(np.asarray(found), x if axis is None else NUMPY[op](x, axis=axis))


@every_strategy
def test_gather_of_host_value_is_the_value(strategy):
    x = np.arange(3)
    assert strategy.gather({"x": x}, axis=0)["x"] is x


@every_strategy
def test_local_results_are_what_each_replica_holds(strategy):
    x = rows(strategy, 2)
    value = {"own": x, "all": strategy.put(np.arange(3)), "host": 7}
    found = strategy.local_results(value)
    assert len(found) == strategy.num_replicas_in_sync
    for one, row, home in zip(found, np.asarray(x.tree), homes(strategy), strict=True):
        chex.assert_trees_all_equal(one, {"own": row, "all": np.arange(3), "host": 7})
        assert one["own"].devices() == one["all"].devices() == home


@every_strategy
def test_local_results_of_host_value_is_one(strategy):
    assert strategy.local_results({"host": 7}) == ({"host": 7},)


HOST_SUMS = {"number": (3.0, r"3\.0"), "array": (np.ones((2, 3), np.float32), r"float32\[2,3\]")}


@pytest.mark.parametrize("value, said", HOST_SUMS.values(), ids=HOST_SUMS)
def test_sum_of_host_value_is_refused_by_name(value, said, two):
    says = (
        rf"value\['x'\].*{said}.* host value, held by none of the 2 replicas.*`value \* strategy.num_replicas_in_sync`"
    )
    with pytest.raises(ValueError, match=says):
        two.reduce("sum", {"x": value}, axis=None)


@pytest.mark.parametrize("name", ["one_device", "mirrored_1"])
def test_sum_of_host_value_over_one_replica_is_the_value(name):
    assert CACHED[name].reduce("sum", 3.0, axis=None) == 3.0


WITHOUT_MEANING = {
    "booleans": (
        "max",
        np.array([True, False]),
        r"value\['x'\] is boolean \(bool\[.*\]\), and MAX of booleans.*`x\.astype",
    ),
    "keys": (
        "mean",
        jax.random.split(jax.random.key(0)),
        r"value\['x'\] is a random key \(key<fry>.*Reduce the numbers drawn",
    ),
}


@pytest.mark.parametrize("op, whole, says", WITHOUT_MEANING.values(), ids=WITHOUT_MEANING)
def test_reduce_of_leaf_without_that_reduction_is_refused_by_name(op, whole, says, two):
    with pytest.raises(TypeError, match=says):
        two.reduce(op, two.put({"x": jdist.PerReplica(whole)}), axis=None)


@pytest.mark.parametrize("axis", [2, -3, (0, 2)])
@pytest.mark.parametrize(
    "place", [lambda s: rows(s, 2, 3), lambda s: s.put(np.ones((2, 3), np.float32))], ids=["own", "all"]
)
def test_reduce_over_no_dimension_is_refused_by_name(axis, place, two):
    missing = axis[-1] if isinstance(axis, tuple) else axis
    says = rf"value\['x'\] is float32\[2,3\]: it does not have dimension {missing}\. Its dimensions are 0 to 1, or -2 to -1"
    with pytest.raises(ValueError, match=says):
        two.reduce("sum", {"x": place(two)}, axis=axis)


@pytest.mark.parametrize("axis", [2, -3])
def test_gather_along_no_dimension_is_refused_by_name(axis, two):
    says = (
        rf"value\['x'\] is float32\[2,3\]: it does not have dimension {axis}\. Its dimensions are 0 to 1, or -2 to -1"
    )
    with pytest.raises(ValueError, match=says):
        two.gather({"x": rows(two, 2, 3)}, axis=axis)


def test_gather_of_scalars_is_refused(two):
    with pytest.raises(ValueError, match=r"value is int32\[\]: it does not have dimension 0\. It is a scalar"):
        two.gather(two.run(jdist.replica_id), axis=0)


@pytest.mark.parametrize(
    "ask", [lambda s, x: s.reduce("sum", x, axis=None), lambda s, x: s.gather(x, axis=0)], ids=["reduce", "gather"]
)
def test_question_about_value_of_another_strategy_is_refused_by_name(ask, two):
    with pytest.raises(ValueError, match=r"value\['x'\].*this strategy (has 2|on cpu:0, cpu:1)"):
        ask(two, {"x": rows(CACHED["mirrored_3"], 2)})


INSTEAD = {
    "reduce": (lambda s, x: s.reduce("sum", x, axis=None), r"`jdist\.all_reduce`"),
    "gather": (lambda s, x: s.gather(x, axis=0), r"`jdist\.all_gather`"),
}


@pytest.mark.parametrize("word", INSTEAD)
def test_question_of_the_host_asked_in_a_replica_function_is_refused(word, two):
    ask, instead = INSTEAD[word]
    says = rf"`strategy\.{word}` cannot be called inside a replica function: use {instead} there"
    with pytest.raises(RuntimeError, match=says):
        two.run(lambda x: ask(two, x), (np.ones(2),))


@pytest.mark.parametrize("axis", [np.int64(0), (0,), [0]], ids=str)
def test_reduce_over_a_dimension_takes_any_whole_number(axis):
    strategy = STRATEGIES["mirrored_2"]()
    value = rows(strategy, 3)
    np.testing.assert_allclose(strategy.reduce("mean", value, axis=axis), np.mean(value.tree), rtol=1e-6)


def test_reduce_over_a_dimension_named_twice_is_refused():
    strategy = STRATEGIES["mirrored_2"]()
    with pytest.raises(ValueError, match=r"`axis` names a dimension of value \(float32\[3\]\) twice: \(0, -1\)\. Name"):
        strategy.reduce("mean", rows(strategy, 3), axis=(0, -1))


@pytest.mark.parametrize("axis", ["ab", "0", 0.5, True, ("0",), np.array([0])], ids=repr)
def test_reduce_over_what_is_no_number_is_refused(axis):
    strategy = STRATEGIES["mirrored_2"]()
    with pytest.raises(
        TypeError,
        match=r"`axis` must be a dimension of one replica's value .*, a sequence of dimensions, or None, got ",
    ):
        strategy.reduce("mean", rows(strategy, 3), axis=axis)


def test_local_results_of_a_value_of_another_strategy_are_refused():
    value = rows(STRATEGIES["mirrored_3"](), 2)
    with pytest.raises(ValueError, match=r"is on cpu:5, cpu:1, cpu:2, and this strategy uses cpu:0, cpu:1"):
        STRATEGIES["mirrored_2"]().local_results({"x": value})


JUDGES = {name: CACHED[name] for name in ("mirrored_1", "mirrored_2", "mirrored_3", "mirrored_8")}
judged = pytest.mark.parametrize("strategy", JUDGES.values(), ids=JUDGES)


def _uneven(strategy, counts, *trailing, dtype="int32", seed=0):
    """Whole numbers, `counts[i]` rows on replica i: the parts, and the value."""
    rng = np.random.default_rng(seed)
    counts = (counts * strategy.num_replicas_in_sync)[: strategy.num_replicas_in_sync]
    parts = [rng.integers(-9, 9, size=(count, *trailing)).astype(jnp.dtype(dtype)) for count in counts]
    return parts, strategy.distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])


COUNTS = {
    "uneven": ([3, 1, 4], "float32"),
    "some_empty": ([0, 2, 0], "int8"),
    "one_each_but_one": ([1, 1, 2], "bfloat16"),
    "last_empty": ([2, 0], "int32"),
    "none": ([0], "int8"),
}


@judged
@pytest.mark.parametrize("counts, dtype", COUNTS.values(), ids=COUNTS)
def test_reduce_over_uneven_rows_is_that_of_all_rows_together(counts, dtype, strategy):
    parts, value = _uneven(strategy, counts, 2, dtype=dtype)
    whole = np.concatenate(parts).astype(np.float64)
    asked = [("sum", 0), ("max", 0), ("min", 0), ("mean", 0), ("mean", (0, 1))]
    for op, axis in asked if len(whole) else asked[:1]:
        found = strategy.reduce(op, value, axis=axis)
        np.testing.assert_allclose(np.asarray(found, np.float64), NUMPY[op](whole, axis=axis), rtol=1e-2)
        assert jnp.issubdtype(found.dtype, jnp.floating) == (op == "mean" or dtype in ("float32", "bfloat16"))
        assert_in_step(found)


@judged
@pytest.mark.parametrize("counts, dtype", COUNTS.values(), ids=COUNTS)
def test_gather_of_uneven_rows_is_the_rows_joined_in_order(counts, dtype, strategy):
    parts, value = _uneven(strategy, counts, 2, dtype=dtype)
    found = strategy.gather(value, axis=0)
    np.testing.assert_array_equal(np.asarray(found), np.concatenate(parts))
    assert found.dtype == dtype
    assert_in_step(found)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "uint8", "float16"])
def test_gather_of_uneven_rows_takes_any_numbers_and_booleans(dtype, two):
    parts, value = _uneven(two, [1, 2], 2, dtype=dtype)
    found = two.gather(value, axis=0)
    np.testing.assert_array_equal(np.asarray(found), np.concatenate(parts))
    assert found.dtype == dtype


@few
@hypothesis.given(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.sampled_from(list(NUMPY)), st.integers(0, 9))
def test_reduce_and_gather_of_any_rows_are_those_of_all_together(counts, op, seed):
    strategy = CACHED["mirrored_3"]
    parts, value = _uneven(strategy, counts, 2, seed=seed)
    whole = np.concatenate(parts)
    np.testing.assert_array_equal(strategy.gather(value, axis=0), whole)
    if len(whole) or op == "sum":
        np.testing.assert_allclose(strategy.reduce(op, value, axis=0), NUMPY[op](whole, axis=0), rtol=1e-5)
    else:
        with pytest.raises(
            ValueError, match=rf"Cannot compute the {op.upper()} of value: it has no elements on any replica"
        ):
            strategy.reduce(op, value, axis=0)


@judged
def test_reduce_over_a_trailing_dimension_that_is_uneven_keeps_the_rows(strategy):
    n = strategy.num_replicas_in_sync
    parts = [np.random.default_rng(i).integers(-9, 9, size=(2, 1 + i % 3)) for i in range(n)]
    value = strategy.distribute_values_from_function(lambda c: {"x": parts[c.replica_id_in_sync_group]})
    whole = np.concatenate(parts, axis=1)
    for op, reduction in NUMPY.items():
        np.testing.assert_allclose(strategy.reduce(op, value, axis=1)["x"], reduction(whole, axis=1), rtol=1e-6)
        np.testing.assert_allclose(strategy.reduce(op, value, axis=(1, 0))["x"], reduction(whole), rtol=1e-6)
    np.testing.assert_array_equal(strategy.gather(value, axis=1)["x"], whole)


@judged
def test_questions_about_a_nest_of_uneven_leaves_are_answered_leaf_by_leaf(strategy):
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
    found = strategy.local_results(value)
    assert len(found) == n
    for one, part, device in zip(found, parts, strategy.mesh.devices.flat, strict=True):
        chex.assert_trees_all_equal(one, {"own": part, "host": np.ones(2)})
        assert {device} == set().union(*(leaf.devices() for leaf in jax.tree.leaves(one["own"])))


def test_greatest_of_uneven_negative_rows_is_not_what_fills_them_up(two):
    value = two.distribute_values_from_function(lambda c: -1 - np.arange(1 + 2 * c.replica_id_in_sync_group))
    assert [int(two.reduce(op, value, axis=0)) for op in ("max", "min", "sum")] == [-1, -3, -7]
    assert float(two.reduce("mean", value, axis=0)) == -7 / 4


def test_mean_of_uneven_rows_counts_elements_and_not_replicas(two):
    value = two.distribute_values_from_function(
        lambda c: np.float32([1, 1, 1, 5][3 * c.replica_id_in_sync_group :][:3])
    )
    assert float(two.reduce("mean", value, axis=0)) == 2


UNEVEN_REFUSED = {
    "reduce_over_nothing": (
        lambda s, x: s.reduce("sum", x, axis=None),
        r"value\['x'\] has the shapes \[1, 2\], \[2, 2\] on the replicas, which also differ in dimensions other than "
        r"the reduced ones, \[\].*`axis=0`",
    ),
    "reduce_over_another": (
        lambda s, x: s.reduce("max", x, axis=1),
        r"differ in dimensions other than the reduced ones, \[1\].*`strategy\.gather`",
    ),
    "reduce_over_none_there": (
        lambda s, x: s.reduce("sum", x, axis=2),
        r"value\['x'\] is int.*: it does not have dimension 2",
    ),
    "gather_along_another": (
        lambda s, x: s.gather(x, axis=1),
        r"value\['x'\] has the shapes \[1, 2\], \[2, 2\].*concatenated along dimension 1 must have the same sizes in "
        r"all others",
    ),
}


@pytest.mark.parametrize("ask, says", UNEVEN_REFUSED.values(), ids=UNEVEN_REFUSED)
def test_question_that_uneven_rows_do_not_fit_is_refused_with_their_shapes(ask, says, two):
    _, value = _uneven(two, [1, 2], 2)
    with pytest.raises(ValueError, match=says):
        ask(two, {"x": value})


@pytest.mark.parametrize("op", ["mean", "max", "min"])
@pytest.mark.parametrize("counts", [[0, 0], [0]], ids=["uneven_in_another", "even"])
def test_reduce_of_nothing_is_refused(op, counts, two):
    width = lambda i: 1 + i if len(counts) == 2 else 1
    value = two.distribute_values_from_function(lambda c: np.ones((0, width(c.replica_id_in_sync_group)), np.float32))
    with pytest.raises(
        ValueError, match=rf"Cannot compute the {op.upper()} of value: it has no elements on any replica"
    ):
        two.reduce(op, value, axis=(0, 1))
    assert float(two.reduce("sum", value, axis=(0, 1))) == 0


def _wrapped(strategy, x):
    """`x` `[replica, 2]` in each wrapper that can hold it, with the rows that each replica then holds."""
    return {
        "per_replica": (jdist.PerReplica(x), x),
        "sync_on_read": (jdist.SyncOnRead(x, "mean"), x),
        "sharded": (jdist.Sharded(x.ravel()), x),
        "mirrored": (jdist.Mirrored(x[0], "sum"), np.tile(x[0], (len(x), 1))),
        "plain": (x[0], np.tile(x[0], (len(x), 1))),
    }


@every_strategy
@pytest.mark.parametrize("kind", ["per_replica", "sync_on_read", "sharded", "mirrored", "plain"])
def test_questions_about_a_wrapper_are_about_what_each_replica_holds(kind, strategy):
    n = strategy.num_replicas_in_sync
    value, whole = _wrapped(strategy, np.random.default_rng(1).integers(-9, 9, (n, 2)).astype(np.float32))[kind]
    value = strategy.put({"x": value, "none": None})
    for op, reduction in NUMPY.items():
        np.testing.assert_allclose(strategy.reduce(op, value, axis=None)["x"], reduction(whole, axis=0), rtol=1e-6)
        np.testing.assert_allclose(strategy.reduce(op, value, axis=0)["x"], reduction(whole), rtol=1e-6)
    joined = strategy.gather(value, axis=0)
    np.testing.assert_array_equal(joined["x"], whole.ravel())
    assert_in_step(joined)
    found = strategy.local_results(value)
    for one, row, home in zip(found, whole, homes(strategy), strict=True):
        chex.assert_trees_all_equal(one, {"x": row, "none": None})
        assert one["x"].devices() == home


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_of_numbers_of_a_kind_is_of_that_kind(op, dtype, two):
    parts = np.asarray([[1, 2, 4], [8, 16, 32]], jnp.dtype(dtype))
    even = two.reduce(op, jdist.PerReplica(parts), axis=None)
    assert even.dtype == dtype
    np.testing.assert_allclose(np.asarray(even, complex), NUMPY[op](parts.astype(complex), axis=0))
    uneven = two.distribute_values_from_function(
        lambda c: parts[c.replica_id_in_sync_group, c.replica_id_in_sync_group :]
    )
    found = two.reduce(op, uneven, axis=0)
    assert found.dtype == dtype
    whole = np.concatenate([parts[0], parts[1, 1:]]).astype(complex)
    np.testing.assert_allclose(np.asarray(found, complex), NUMPY[op](whole), rtol=1e-3)


@pytest.mark.parametrize("dtype, wide", [("int8", "int32"), ("uint8", "uint32"), ("int32", "int32")])
@pytest.mark.parametrize("more", [0, 1], ids=["even", "uneven"])
def test_sum_and_mean_of_small_integers_do_not_wrap(more, dtype, wide, two):
    value = two.distribute_values_from_function(lambda c: np.full(2 + more * c.replica_id_in_sync_group, 100, dtype))
    found = {op: two.reduce(op, value, axis=0) for op in NUMPY}
    expected = {"sum": (100 * (4 + more), wide), "mean": (100, "float32"), "max": (100, dtype), "min": (100, dtype)}
    assert {op: (float(x), str(x.dtype)) for op, x in found.items()} == expected


NO_SUCH = {
    "keys": (lambda i: jax.random.key(i), "mean", r"value\['x'\] is a random key .*Reduce the numbers drawn from it"),
    "booleans": (
        lambda i: np.ones(i + 1, bool),
        "sum",
        r"value\['x'\] is boolean \(bool\[.*\]\), and SUM of booleans is ambiguous",
    ),
    "complex_max": (
        lambda i: np.ones(i + 1, np.complex64),
        "max",
        r"value\['x'\] is complex .* MAX is not defined .*\. Reduce `abs\(x\)`",
    ),
    "complex_min": (lambda i: np.ones(2, np.complex64), "min", r"value\['x'\] is complex \(complex64\[.*MIN is not defined"),
}


@pytest.mark.parametrize("make, op, says", NO_SUCH.values(), ids=NO_SUCH)
def test_reduce_without_meaning_of_what_the_replicas_hold_is_refused_by_name(make, op, says, two):
    value = {"x": two.distribute_values_from_function(lambda c: make(c.replica_id_in_sync_group))}
    with pytest.raises(TypeError, match=says):
        two.reduce(op, value, axis=0)


def test_gather_of_keys_is_the_keys_in_order(strategy):
    keys = jax.random.split(jax.random.key(4), 2 * strategy.num_replicas_in_sync)
    value = strategy.put(jdist.PerReplica(keys.reshape(-1, 2)))
    np.testing.assert_array_equal(jax.random.key_data(strategy.gather(value, axis=0)), jax.random.key_data(keys))


def _slices(i):
    """Rows that replica i has of a table of 5, and where."""
    rng = np.random.default_rng(i)
    return rng.integers(-9, 9, size=(2, 3)).astype(np.float32), rng.integers(0, 5, size=2).astype(np.int32)


@every_strategy
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_of_slices_is_that_of_the_tables_that_they_stand_for(op, strategy):
    n = strategy.num_replicas_in_sync
    rows, indices = (np.stack(parts) for parts in zip(*map(_slices, range(n)), strict=True))
    own = strategy.put(jdist.RowSlices(jdist.PerReplica(rows), jdist.PerReplica(indices), 5))
    found = strategy.reduce(op, {"x": own, "y": jdist.PerReplica(rows)}, axis=None)
    tables = [jdist.RowSlices(*_slices(i), 5).dense() for i in range(n)]
    np.testing.assert_allclose(found["x"].dense(), NUMPY[op](np.stack(tables), axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["y"], NUMPY[op](rows, axis=0), rtol=1e-5, atol=1e-6)
    assert_in_step(found)


@judged
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_of_uneven_slices_is_that_of_the_tables_that_they_stand_for(op, strategy):
    n = strategy.num_replicas_in_sync
    parts = [tuple(x[: i % 3] for x in _slices(i)) for i in range(n)]
    rows, indices = (
        strategy.distribute_values_from_function(lambda c, k=k: parts[c.replica_id_in_sync_group][k]) for k in (0, 1)
    )
    found = strategy.reduce(op, jdist.RowSlices(rows, indices, 5), axis=None)
    tables = [jdist.RowSlices(*part, 5).dense() for part in parts]
    np.testing.assert_allclose(found.dense(), NUMPY[op](np.stack(tables), axis=0), rtol=1e-5, atol=1e-6)


@every_strategy
def test_reduce_of_slices_that_run_returned_is_what_the_replicas_would_agree_on(strategy):
    def make(x):
        own = jdist.RowSlices(x, jdist.replica_id()[None] % 4, 4)
        return own, jdist.all_reduce("sum", own).dense()

    own, agreed = strategy.run(make, (rows(strategy, 1, 3),))
    np.testing.assert_allclose(strategy.reduce("sum", own, axis=None).dense(), agreed, rtol=1e-5, atol=1e-6)


@judged
def test_reduce_of_slices_in_a_wrapper_is_that_of_slices_of_wrappers(strategy):
    n = strategy.num_replicas_in_sync
    parts = [jdist.RowSlices(*(x[: 1 + i % 2] for x in _slices(i)), 5) for i in range(n)]
    value = strategy.distribute_values_from_function(lambda c: {"x": parts[c.replica_id_in_sync_group]})
    found = strategy.reduce("sum", value, axis=None)["x"]
    np.testing.assert_allclose(found.dense(), np.sum([part.dense() for part in parts], axis=0), rtol=1e-6)


def test_mean_of_slices_of_the_host_is_as_if_every_replica_held_them(two):
    found = two.reduce("mean", {"x": jdist.RowSlices(*_slices(0), 5)}, axis=None)["x"]
    np.testing.assert_array_equal(found.dense(), jdist.RowSlices(*_slices(0), 5).dense())


def test_sum_of_slices_of_the_host_is_refused_by_name(two):
    with pytest.raises(ValueError, match=r"value\['x'\].*a host value, held by none of the 2 replicas"):
        two.reduce("sum", {"x": jdist.RowSlices(*_slices(0), 5)}, axis=None)


def test_reduce_of_slices_that_all_hold_counts_them_once_a_replica(two):
    same = two.put(jdist.RowSlices(*_slices(0), 5))
    table = jdist.RowSlices(*_slices(0), 5).dense()
    np.testing.assert_allclose(two.reduce("sum", same, axis=None).dense(), 2 * table)
    np.testing.assert_allclose(two.reduce("mean", same, axis=None).dense(), table)


SLICES_REFUSED = {
    "max": (
        lambda s, x: s.reduce("max", x, axis=None),
        r"value\['x'\] is RowSlices, of which there is a SUM and a MEAN",
    ),
    "axis": (
        lambda s, x: s.reduce("sum", x, axis=0),
        r"value\['x'\] is RowSlices.*`value\.dense\(\)`, in the replica function",
    ),
    "gather": (
        lambda s, x: s.gather(x, axis=0),
        r"`gather` does not support RowSlices.*`value\.dense\(\)`.*`value\.rows`",
    ),
}


@pytest.mark.parametrize("ask, says", SLICES_REFUSED.values(), ids=SLICES_REFUSED)
def test_question_that_slices_have_no_answer_to_is_refused(ask, says, two):
    with pytest.raises(TypeError, match=says):
        ask(two, {"x": two.put(jdist.RowSlices(*_slices(0), 5))})


def test_sum_of_slices_of_booleans_is_refused_by_name(two):
    value = {"x": two.put(jdist.RowSlices(np.ones((1, 2), bool), np.int32([2]), 4))}
    with pytest.raises(TypeError, match=r"value\['x'\] is boolean .*`x\.astype\(jnp\.int32\)`"):
        two.reduce("sum", value, axis=None)


@every_strategy
@pytest.mark.parametrize("wrapper", [jdist.PerReplica, jdist.Mirrored, jdist.Sharded], ids=lambda kind: kind.__name__)
def test_questions_about_a_wrapper_of_no_leaves_are_answered(wrapper, strategy):
    value = {"own": rows(strategy, 2), "empty": wrapper({"a": None})}
    assert strategy.reduce("sum", value, axis=0)["empty"] == {"a": None}
    assert strategy.gather(value, axis=0)["empty"] == {"a": None}
    found = strategy.local_results(value)
    assert [one["empty"] for one in found] == [{"a": None}] * strategy.num_replicas_in_sync


def test_questions_over_groups_of_replicas_are_answered_in_the_order_of_the_replicas():
    ops = jdist.HierarchicalAllReduce(group_size=2)
    strategy = jdist.MirroredStrategy(["cpu:3", "cpu:1", "cpu:0", "cpu:2"], cross_device_ops=ops)
    parts, value = _uneven(strategy, [2, 0, 1, 3], 2)
    whole = np.concatenate(parts)
    np.testing.assert_array_equal(strategy.gather(value, axis=0), whole)
    for op, reduction in NUMPY.items():
        np.testing.assert_allclose(strategy.reduce(op, value, axis=0), reduction(whole, axis=0), rtol=1e-6)
    for kind, (wrapper, held) in _wrapped(strategy, np.arange(8.0, dtype=np.float32).reshape(4, 2)).items():
        np.testing.assert_array_equal(strategy.gather(strategy.put(wrapper), axis=0), held.ravel(), err_msg=kind)
        np.testing.assert_array_equal(np.stack(strategy.local_results(strategy.put(wrapper))), held, err_msg=kind)


UNFIT = {
    "fewer_indices": lambda two, rows: jdist.RowSlices(rows, two.put(jdist.PerReplica(np.zeros((2, 2), np.int32))), 4),
    "host_indices": lambda two, rows: jdist.RowSlices(rows, np.array([2]), 4),
}


@pytest.mark.parametrize("make", UNFIT.values(), ids=UNFIT)
def test_reduce_of_row_slices_without_an_index_a_row_is_refused(make, two):
    rows = two.put(jdist.PerReplica(np.ones((2, 1, 2), np.float32)))
    with pytest.raises(
        ValueError, match=r"value is RowSlices .* there is one index a row\. Place both: `strategy\.put"
    ):
        two.reduce("sum", make(two, rows), axis=None)


def test_reduce_of_row_slices_with_indices_that_are_no_integers_is_refused(two):
    slices = two.put(jdist.RowSlices(np.ones((1, 2), np.float32), np.float32([2]), 4))
    with pytest.raises(TypeError, match=r"indices of float32\[1\]: rows are counted in integers"):
        two.reduce("sum", slices, axis=None)


def test_local_results_with_a_mirrored_value_that_is_not_placed_repeats_it(two):
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
def test_greatest_over_rows_is_nan_where_an_element_is(strategy):
    values = np.float32([[np.nan, 1, 2, 3]] * strategy.num_replicas_in_sync)
    for place in (strategy.put, lambda value: value):
        for op in ("max", "min"):
            assert np.isnan(strategy.reduce(op, place(jdist.PerReplica(values)), axis=0))


def test_greatest_of_uneven_rows_is_nan_where_an_element_is(two):
    value = two.distribute_values_from_function(
        lambda c: np.float32([np.nan] + [1.0] * c.replica_id_in_sync_group)[::-1]
    )
    assert all(np.isnan(two.reduce(op, value, axis=0)) for op in ("max", "min"))


CUT = {
    "rows": lambda s, x: s.reduce("max", [jdist.PerReplica(np.stack([x, x]))], axis=None),
    "gathered": lambda s, x: s.gather([jdist.PerReplica(np.stack([x, x]))], axis=0),
    "host": lambda s, x: s.reduce("max", [x], axis=0),
}


@pytest.mark.parametrize("ask", CUT.values(), ids=CUT)
def test_host_number_that_would_be_cut_to_32_bits_is_refused_by_its_name(ask, two):
    with pytest.raises(ValueError, match=r"^value\[0\] holds 1099511627776, which is out of the range of int32"):
        ask(two, np.array([2**40]))


def test_read_of_host_numbers_that_would_be_cut_is_refused():
    for aggregation in ("sum", "mean", "only_first_replica"):
        with pytest.raises(ValueError, match=r"^value holds 1099511627776, which is out of the range of int32"):
            jdist.SyncOnRead(np.array([2**40, 1]), aggregation).read()
