"""The words between replicas, with numpy as the judge."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdist
from jdist import ReduceOp

from laws import STRATEGIES, rows

NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


@pytest.mark.parametrize("name", ["mean", "MEAN", "Mean", ReduceOp.MEAN])
def test_reduction_is_found_by_its_name_in_any_case(name):
    assert ReduceOp.of(name) is ReduceOp.MEAN


@pytest.mark.parametrize("op", ["avg", "", 3, None], ids=str)
@pytest.mark.parametrize(
    "ask", [jdist.all_reduce, lambda op, x: jdist.OneDeviceStrategy("cpu:0").reduce(op, x, axis=None)]
)
def test_reduction_that_there_is_none_of_is_refused(op, ask):
    with pytest.raises(ValueError, match=r"is not a reduction; take one of 'SUM', 'MEAN', 'MAX', 'MIN'"):
        ask(op, 1.0)


def _per_replica(strategy, dtype, *shape):
    n = strategy.num_replicas_in_sync
    return np.random.default_rng(n).integers(-9, 9, size=(n, *shape)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_all_reduce_is_the_reduction_of_the_rows_on_every_replica(dtype, strategy):
    values = _per_replica(strategy, jnp.dtype(dtype), 2, 3)
    reduce_all = lambda tree: {op: jdist.all_reduce(op, tree)["x"] for op in NUMPY}
    found = strategy.run(reduce_all, ({"x": jdist.PerReplica(values)},))
    for op, reduction in NUMPY.items():
        expected = reduction(np.asarray(values, np.float64), axis=0)
        assert found[op].dtype == (jnp.float32 if (op, dtype) == ("mean", "int32") else dtype)
        np.testing.assert_allclose(
            np.asarray(found[op], np.float64), expected, rtol=1e-2 if dtype == "bfloat16" else 1e-6
        )
        assert found[op].sharding.is_fully_replicated


def test_all_reduce_of_tree_keeps_its_structure(strategy):
    tree = {"a": (rows(strategy, 2), None), "b": []}
    found = strategy.run(lambda tree: jdist.all_reduce("max", tree), (tree,))
    chex.assert_trees_all_equal(found, {"a": (np.asarray(tree["a"][0].tree).max(0), None), "b": []})


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_all_gather_is_the_rows_joined_in_order_on_every_replica(axis, strategy):
    values = _per_replica(strategy, np.int32, 1, 2, 3)
    found = strategy.run(lambda x: jdist.all_gather({"x": x}, axis), (jdist.PerReplica(values),))["x"]
    np.testing.assert_array_equal(found, np.concatenate(values, axis=axis))
    assert found.sharding.is_fully_replicated


def test_all_gather_takes_booleans_and_keys(strategy):
    n = strategy.num_replicas_in_sync
    keys = jax.random.split(jax.random.key(5), n)
    tree = jdist.PerReplica({"odd": np.arange(n)[:, None] % 2 == 1, "key": keys[:, None]})
    found = strategy.run(lambda tree: jdist.all_gather(tree, 0), (tree,))
    np.testing.assert_array_equal(found["odd"], np.arange(n) % 2 == 1)
    np.testing.assert_array_equal(jax.random.key_data(found["key"]), jax.random.key_data(keys))


def sum_in_scan(x):
    total, seen = lax.scan(lambda c, y: (c + jdist.all_reduce("sum", y), jdist.all_reduce("max", y)), 0.0, x)
    return total, seen


def sum_in_cond(x):
    return lax.cond(jdist.num_replicas() > 0, lambda: jdist.all_reduce("sum", x), lambda: x), x.sum()


def sum_in_while(x):
    turn = lambda c: (c[0] + 1, c[1] + jdist.all_reduce("sum", x))
    return lax.while_loop(lambda c: c[0] < 3, turn, (0, jnp.zeros_like(x)))


def sum_in_vmap(x):
    return jax.vmap(lambda y: jdist.all_reduce("sum", y))(x), jax.vmap(lambda y: jdist.all_gather(y[None], 0))(x)


FLOWS = {
    "scan": (sum_in_scan, lambda x, i: (x.sum(), x.max(0))),
    "cond": (sum_in_cond, lambda x, i: (x.sum(0), x[i].sum())),
    "while": (sum_in_while, lambda x, i: (np.int32(3), 3 * x.sum(0))),
    "vmap": (sum_in_vmap, lambda x, i: (x.sum(0), x.T)),
}


@pytest.mark.parametrize("fn, expected", FLOWS.values(), ids=FLOWS)
def test_collective_in_control_flow_is_the_same_as_outside(fn, expected, strategy):
    x = rows(strategy, 4)
    found = strategy.local_results(strategy.run(fn, (x,)))
    for number, one in enumerate(found):
        chex.assert_trees_all_close(one, expected(np.asarray(x.tree), number), rtol=1e-5, atol=1e-6)


def test_gradient_through_a_mean_is_the_replicas_own(strategy):
    x = rows(strategy, 3)
    gradient = lambda w, x: jax.grad(lambda w: jdist.all_reduce("mean", jnp.sum(w * x * x)))(w)
    found = strategy.run(gradient, (np.ones(3, np.float32), x))
    np.testing.assert_allclose(found.tree, np.square(x.tree), rtol=1e-6)


WITHOUT_MEANING = {
    "sum_of_booleans": (
        "sum",
        np.True_,
        r"value\['x'\] is boolean \(bool\[\]\), and SUM of booleans .*`x.astype\(jnp.int32\)`",
    ),
    "max_of_booleans": ("max", np.array([True]), r"value\['x'\] is boolean \(bool\[1\]\).*MAX is any, MIN is all"),
    "mean_of_keys": ("mean", jax.random.key(0), r"value\['x'\] is a random key \(key<fry>\[\]\).*Reduce what is drawn"),
}


@pytest.mark.parametrize("op, leaf, says", WITHOUT_MEANING.values(), ids=WITHOUT_MEANING)
def test_all_reduce_of_leaf_without_that_reduction_is_refused_by_name(op, leaf, says, strategy):
    with pytest.raises(TypeError, match=says):
        strategy.run(lambda x: jdist.all_reduce(op, {"x": x}), (leaf,))
    with pytest.raises(TypeError, match=says):
        jdist.all_reduce(op, {"x": leaf})


@pytest.mark.parametrize("axis", [1, -1])
def test_all_gather_along_no_dimension_is_refused_by_name(axis, strategy):
    says = rf"value\['x'\] is float32\[3\]: it has no dimension {axis}\. Take `axis` from 0 up, below the rank"
    with pytest.raises(ValueError, match=says):
        strategy.run(lambda x: jdist.all_gather({"x": x}, axis), (np.ones(3, np.float32),))
    with pytest.raises(ValueError, match=says):
        jdist.all_gather({"x": jnp.ones(3)}, axis)


@pytest.mark.parametrize("ask", [lambda x: jdist.all_reduce("sum", x), lambda x: jdist.all_gather({"a": x}, 0)])
def test_collective_of_a_wrapper_on_the_host_is_refused(ask):
    value = rows(STRATEGIES["mirrored_2"](), 3)
    with pytest.raises(
        TypeError, match=r"PerReplica\(float32\[2,3\]\) is for the host .*`strategy\.run.*`strategy\.gather`"
    ):
        ask(value)
