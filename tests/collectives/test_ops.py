"""The words between replicas, with numpy as the judge."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdist
from jdist import ReduceOp

from laws import STRATEGIES, assert_in_step, rows

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


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
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


@pytest.mark.parametrize("axis", [1, -2])
def test_all_gather_along_no_dimension_is_refused_by_name(axis, strategy):
    says = rf"value\['x'\] is float32\[3\]: it has no dimension {axis}\. Its dimensions are 0 to 0, or -1 to -1; `axis` counts"
    with pytest.raises(ValueError, match=says):
        strategy.run(lambda x: jdist.all_gather({"x": x}, axis), (np.ones(3, np.float32),))
    with pytest.raises(ValueError, match=says):
        jdist.all_gather({"x": jnp.ones(3)}, axis)


@pytest.mark.parametrize(
    "ask", [lambda x: jdist.all_reduce("sum", x), lambda x: jdist.all_gather({"a": x}, 0), jdist.broadcast]
)
def test_collective_of_a_wrapper_on_the_host_is_refused(ask):
    value = rows(STRATEGIES["mirrored_2"](), 3)
    with pytest.raises(
        TypeError, match=r"PerReplica\(float32\[2,3\]\) is for the host .*`strategy\.run.*`strategy\.gather`"
    ):
        ask(value)


BROADCAST = {
    "float32": np.float32([1.5, -2, np.nan, np.inf]),
    "bfloat16": np.array([1.5, -2], jnp.bfloat16),
    "int8": np.int8([-128, 127]),
    "uint32": np.uint32([2**32 - 1, 0]),
    "complex64": np.complex64([1 - 2j]),
    "bool": np.array([True, False]),
    "scalar": np.float32(3),
    "empty": np.zeros((0, 2), np.float32),
}


def test_broadcast_hands_every_replica_what_the_first_holds(strategy):
    n = strategy.num_replicas_in_sync
    other = lambda x: ~x if x.dtype == np.bool_ else np.full_like(x, 1)
    own = {name: np.stack([x] + [other(x)] * (n - 1)) for name, x in BROADCAST.items()}
    found = strategy.run(lambda tree: jdist.broadcast({**tree, "none": None}), (jdist.PerReplica(own),))
    assert found.pop("none") is None
    chex.assert_trees_all_equal(found, BROADCAST)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, jax.tree.map(jnp.asarray, BROADCAST))
    assert_in_step(found)


KEYS = {"typed": jax.random.key, "raw": jax.random.PRNGKey, "rbg": lambda seed: jax.random.key(seed, impl="rbg")}


@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
def test_broadcast_of_keys_is_the_first_replicas_key(make, strategy):
    found = strategy.run(lambda key: jdist.broadcast(jdist.replica_key(key)), (make(3),))
    expected = jax.random.fold_in(make(3), 0)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(expected))
    assert_in_step(found)


GROUPED = {
    "groups_of_1": jdist.HierarchicalAllReduce(1),
    "groups_of_2": jdist.HierarchicalAllReduce(2),
    "groups_of_4": jdist.HierarchicalAllReduce(4),
    "one_device": jdist.ReductionToOneDevice(),
    "scattered": jdist.AllReduce(0),
}


@pytest.mark.parametrize("ops", GROUPED.values(), ids=GROUPED)
def test_words_mean_the_same_whichever_way_the_strategy_adds(ops):
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(4)], ops)
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    words = lambda x: (
        jdist.broadcast((x, x > 5)),
        jdist.all_gather(x, 0),
        jdist.all_reduce("sum", _slices(x, 20)).dense(),
    )
    first, joined, table = strategy.run(words, (jdist.PerReplica(x),))
    chex.assert_trees_all_equal(first, (x[0], x[0] > 5))
    np.testing.assert_array_equal(joined, x.reshape(-1))
    np.testing.assert_array_equal(table, _whole(x, 20))
    assert_in_step((first, joined, table))


def test_broadcast_outside_any_strategy_is_the_value():
    chex.assert_trees_all_equal(jdist.broadcast({"x": 3.0, "none": None}), {"x": np.float32(3), "none": None})


def test_broadcast_makes_a_leaf_fit_for_the_state(two):
    step = two.step(lambda w, x: (w + jdist.broadcast(x), None))
    state, _ = step(two.put(np.zeros(3, np.float32)), rows(two, 3))
    np.testing.assert_array_equal(state, rows(two, 3).tree[0])


def _slices(x, num_rows):
    """This replica's row of a table, twice: once at its own number and once at the first."""
    return jdist.RowSlices(jnp.stack([x, 2 * x]), jnp.stack([jdist.replica_id(), 0 * jdist.replica_id()]), num_rows)


def _whole(x, num_rows):
    table = np.zeros((num_rows, *x.shape[1:]), x.dtype)
    for number, row in enumerate(x):
        table[number] += row
        table[0] += 2 * row
    return table


TABLES = {"small": 8, "large": 60}


@pytest.mark.parametrize("num_rows", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce_of_row_slices_stands_for_the_reduced_table(op, num_rows, strategy):
    n = strategy.num_replicas_in_sync
    x = rows(strategy, 3)
    reduced = strategy.run(lambda x: jdist.all_reduce(op, {"e": _slices(x, num_rows), "b": x.sum()}), (x,))
    own = np.asarray(x.tree)
    expected = _whole(own, num_rows) / (n if op == "mean" else 1)
    assert isinstance(reduced["e"], jdist.RowSlices)
    assert reduced["e"].num_rows == num_rows
    assert_in_step(reduced)
    np.testing.assert_allclose(reduced["e"].dense(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(reduced["b"], own.sum() / (n if op == "mean" else 1), rtol=1e-4, atol=1e-5)


SENT = {"rows_are_less": (50, [0, 1, 0, 1]), "rows_are_still_less": (3, [0, 1, 0, 1]), "table_is_less": (2, [0, 1])}


@pytest.mark.parametrize("num_rows, indices", SENT.values(), ids=SENT)
def test_all_reduce_of_row_slices_sends_what_is_less(num_rows, indices, two):
    make = lambda: jdist.RowSlices(jdist.replica_id() + jnp.ones((2, 100)), jnp.arange(2), num_rows)
    reduced = two.run(lambda: jdist.all_reduce("sum", make()))
    assert reduced.rows.shape == (len(indices), 100)
    assert reduced.indices.tolist() == indices
    np.testing.assert_array_equal(reduced.dense()[:2], np.full((2, 100), 3))
    assert not np.any(reduced.dense()[2:])


def test_all_reduce_of_no_row_slices_is_an_empty_table(strategy):
    none = lambda: jdist.RowSlices(jnp.ones((0, 2)) * jdist.replica_id(), jnp.zeros(0, jnp.int32), 4)
    reduced = strategy.run(lambda: jdist.all_reduce("mean", none()))
    np.testing.assert_array_equal(reduced.dense(), np.zeros((4, 2)))


def test_all_gather_of_empty_leaves_is_empty(strategy):
    n = strategy.num_replicas_in_sync
    found = strategy.run(lambda x: (jdist.all_gather(x, 0), jdist.all_gather(x, 1)), (rows(strategy, 0, 2),))
    assert [leaf.shape for leaf in found] == [(0, 2), (0, 2 * n)]


def test_all_reduce_of_row_slices_outside_any_strategy_is_themselves():
    slices = jdist.RowSlices(np.float32([[1, 2]]), np.int32([3]), 5)
    found = jdist.all_reduce("mean", slices)
    chex.assert_trees_all_equal(found, slices)


@pytest.mark.parametrize("op", ["max", "min"])
def test_greatest_of_row_slices_is_refused_with_the_way_out(op, strategy):
    says = rf"value\['e'\] is RowSlices, and its {op.upper()} over the replicas .*for others take `value\.dense\(\)`"
    ask = lambda: jdist.all_reduce(op, {"e": _slices(jnp.ones(3), 9)})
    with pytest.raises(TypeError, match=says):
        strategy.run(ask)
    with pytest.raises(TypeError, match=says):
        ask()


def test_gather_of_row_slices_is_refused_with_the_way_out(strategy):
    says = r"`all_gather` of RowSlices: .*`value\.dense\(\)`.*`value\.rows`, `value\.indices`"
    ask = lambda: jdist.all_gather({"e": _slices(jnp.ones(3), 9)}, 0)
    with pytest.raises(TypeError, match=says):
        strategy.run(ask)
    with pytest.raises(TypeError, match=says):
        ask()


def test_row_slices_without_a_reduction_are_refused_by_name(two):
    slices = jdist.RowSlices(np.array([[True]]), np.int32([0]), 4)
    with pytest.raises(TypeError, match=r"value\['e'\] is boolean \(bool\[1,1\]\), and SUM of booleans"):
        two.run(lambda: jdist.all_reduce("sum", {"e": slices}))


def test_mirrored_leaf_that_is_summed_among_others_is_warned_of(strategy):
    x = rows(strategy, 3)
    pack = jdist.CommunicationOptions(2**40)
    with pytest.warns(
        jdist.RepeatedSumWarning, match=r"the same on every replica multiplies it by the number of replicas"
    ):
        strategy.run(lambda w, x: jdist.all_reduce("sum", {"w": w, "x": x}, pack), (np.ones(3, np.float32), x))


def test_constant_that_is_summed_among_others_is_a_count_and_not_warned_of(strategy):
    x = rows(strategy, 3)
    pack = jdist.CommunicationOptions(2**40)
    found = strategy.run(lambda x: jdist.all_reduce("sum", {"n": 1.0, "x": x}, pack), (x,))
    assert float(found["n"]) == strategy.num_replicas_in_sync


def test_sum_of_a_captured_array_is_a_repeated_sum(two):
    captured = jnp.arange(3.0)
    with pytest.warns(jdist.RepeatedSumWarning):
        two.run(lambda: jdist.all_reduce("sum", captured))


NANS = [[np.nan, 1, -0.0, -np.inf, -2, np.nan], [1, np.nan, 0, -3, -2.5, -np.nan], [1, 2, -0.0, np.inf, -3, 1e-40]]
VIRTUAL = {"virtual_4": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4)}
BY_OPS = {
    repr(ops): lambda ops=ops: jdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    for ops in (jdist.ReductionToOneDevice(), jdist.HierarchicalAllReduce(1))
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", (STRATEGIES | VIRTUAL | BY_OPS).values(), ids=STRATEGIES | VIRTUAL | BY_OPS)
def test_greatest_and_least_are_nan_where_any_replica_has_nan(make, dtype):
    strategy = make()
    some = [np.array(row).astype(jnp.dtype(dtype)) for row in NANS]
    values = np.stack([some[i % 3] for i in range(strategy.num_replicas_in_sync)])
    x = strategy.put(jdist.PerReplica(values))
    found = strategy.run(lambda x: [jdist.all_reduce(op, [x, x[:2]]) for op in ("max", "min")], (x,))
    for op, of_step in zip(("max", "min"), found, strict=True):
        expected = NUMPY[op](values.astype(np.float64), axis=0)
        for got in (of_step[0], strategy.reduce(op, x, axis=None)):
            assert got.dtype == dtype
            np.testing.assert_array_equal(np.asarray(got, np.float64), expected)
        np.testing.assert_array_equal(np.asarray(of_step[1], np.float64), expected[:2])


@pytest.mark.parametrize("axis", [None, "0", 1.0, (0,), True], ids=repr)
def test_all_gather_along_what_is_no_number_is_refused(axis, two):
    says = (
        r"`axis` is the dimension to join the replicas' values along, a whole number, got .*`x\[None\]`, and join along"
    )
    for gather in (lambda x: two.gather(x, axis), lambda x: two.run(lambda x: jdist.all_gather(x, axis), (x,))):
        with pytest.raises(TypeError, match=says):
            gather(rows(two, 3))


def test_gradient_through_a_greatest_is_refused_with_the_way_out(two):
    greatest = lambda x: jdist.all_reduce("max", x) * x
    with pytest.raises(
        NotImplementedError, match=r"`jdist.all_reduce` with MAX or MIN has no gradient. Stop .*stop_grad"
    ):
        two.run(jax.grad(greatest), (1.0,))
    stopped = lambda x: jdist.all_reduce("max", lax.stop_gradient(x)) * x
    assert float(two.run(jax.grad(stopped), (3.0,))) == 3.0


CUT = {
    "all_reduce": (lambda x: jdist.all_reduce("max", [x]), r"value\[0\]"),
    "sum": (lambda x: jdist.all_reduce("sum", x), "value"),
    "all_gather": (lambda x: jdist.all_gather([x[None]], 0), r"value\[0\]"),
    "broadcast": (jdist.broadcast, "value"),
    "mean": (lambda x: jdist.global_mean([x]), r"values\[0\]"),
    "average_loss": (lambda x: jdist.compute_average_loss(x[None]), "per_example_loss"),
    "regularization": (jdist.scale_regularization_loss, "regularization_loss"),
    "merge_call": (lambda x: jdist.get_replica_context().merge_call(lambda s, x: x, (x,)), r"args\[0\]"),
    "row_slices": (
        lambda x: jdist.all_reduce("sum", jdist.RowSlices(np.ones((1, 2)), x[None], 3)),
        r"value\.indices",
    ),
}


@pytest.mark.parametrize("ask, name", CUT.values(), ids=CUT)
def test_host_number_that_would_be_cut_to_32_bits_is_refused_by_its_name(ask, name, two):
    for call in (lambda: two.run(lambda: ask(np.int64(2**40))), lambda: ask(np.int64(2**40))):
        with pytest.raises(ValueError, match=f"^{name} holds 1099511627776, which int32 does not"):
            call()
