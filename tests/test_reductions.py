"""What the replicas hold, asked from the host program, with numpy as the judge."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, rows

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
    axis = draw(st.sampled_from([tuple(dims), dims, dims[0]])) if dims else draw(st.sampled_from([None, ()]))
    dtype = draw(st.sampled_from(["float32", "int32", "bfloat16", "int8"]))
    return draw(st.sampled_from(list(NUMPY))), tuple(shape), axis, dtype, draw(st.integers(0, 99))


def _over(axis):
    dims = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    return (0, *(dim + 1 for dim in dims))


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
    axis = data.draw(st.integers(0, len(shape) - 1))
    whole = np.arange(strategy.num_replicas_in_sync * np.prod(shape)).reshape(-1, *shape)
    found = strategy.gather(strategy.put({"x": jdist.PerReplica(whole)}), axis=axis)["x"]
    np.testing.assert_array_equal(found, np.concatenate(whole, axis=axis))
    assert_in_step(found)


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
    for one, row, device in zip(found, np.asarray(x.tree), strategy.mesh.devices.flat, strict=True):
        chex.assert_trees_all_equal(one, {"own": row, "all": np.arange(3), "host": 7})
        assert one["own"].devices() == one["all"].devices() == {device}


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
        r"value\['x'\] is a random key \(key<fry>.*Reduce what is drawn",
    ),
}


@pytest.mark.parametrize("op, whole, says", WITHOUT_MEANING.values(), ids=WITHOUT_MEANING)
def test_reduce_of_leaf_without_that_reduction_is_refused_by_name(op, whole, says, two):
    with pytest.raises(TypeError, match=says):
        two.reduce(op, two.put({"x": jdist.PerReplica(whole)}), axis=None)


@pytest.mark.parametrize("axis", [2, -1, (0, 2)])
@pytest.mark.parametrize(
    "place", [lambda s: rows(s, 2, 3), lambda s: s.put(np.ones((2, 3), np.float32))], ids=["own", "all"]
)
def test_reduce_over_no_dimension_is_refused_by_name(axis, place, two):
    missing = axis[-1] if isinstance(axis, tuple) else axis
    says = rf"value\['x'\] is float32\[2,3\]: it has no dimension {missing}\. Take `axis` from 0 up"
    with pytest.raises(ValueError, match=says):
        two.reduce("sum", {"x": place(two)}, axis=axis)


@pytest.mark.parametrize("axis", [2, -1])
def test_gather_along_no_dimension_is_refused_by_name(axis, two):
    says = rf"value\['x'\] is float32\[2,3\]: it has no dimension {axis}\. Take `axis` from 0 up"
    with pytest.raises(ValueError, match=says):
        two.gather({"x": rows(two, 2, 3)}, axis=axis)


def test_gather_of_scalars_is_refused(two):
    with pytest.raises(ValueError, match=r"value is int32\[\]: it has no dimension 0"):
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
    says = rf"`strategy\.{word}` is called by the host program, not in a replica function: use {instead} there"
    with pytest.raises(RuntimeError, match=says):
        two.run(lambda x: ask(two, x), (np.ones(2),))


@pytest.mark.parametrize("axis", [np.int64(0), (0,), [0]], ids=str)
def test_reduce_over_a_dimension_takes_any_whole_number(axis):
    strategy = STRATEGIES["mirrored_2"]()
    value = rows(strategy, 3)
    np.testing.assert_allclose(strategy.reduce("mean", value, axis=axis), np.mean(value.tree), rtol=1e-6)


def test_reduce_over_a_dimension_named_twice_is_refused():
    strategy = STRATEGIES["mirrored_2"]()
    with pytest.raises(ValueError, match=r"`axis` names a dimension twice: \(0, 0\)\. Name each once"):
        strategy.reduce("mean", rows(strategy, 3), axis=(0, 0))


@pytest.mark.parametrize("axis", ["ab", 0.5], ids=str)
def test_reduce_over_what_is_no_number_is_refused(axis):
    strategy = STRATEGIES["mirrored_2"]()
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        strategy.reduce("mean", rows(strategy, 3), axis=axis)


def test_local_results_of_a_value_of_another_strategy_are_refused():
    value = rows(STRATEGIES["mirrored_3"](), 2)
    with pytest.raises(ValueError, match=r"lies on cpu:5, cpu:1, cpu:2, and this strategy on cpu:0, cpu:1"):
        STRATEGIES["mirrored_2"]().local_results({"x": value})
