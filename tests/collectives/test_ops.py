"""The collectives of replica functions, compared with numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdist
from jdist import ReduceOp

from laws import STRATEGIES, assert_in_step, each_row, fixture_of_all_backends, rows

strategy = fixture_of_all_backends()

NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


@pytest.mark.parametrize("name", ["mean", "MEAN", "Mean", ReduceOp.MEAN])
def test_reduction_accepts_its_name_in_any_case(name):
    assert ReduceOp.of(name) is ReduceOp.MEAN


@each_row("op", ["avg", "", 3, None])
@each_row("call", [jdist.all_reduce, lambda op, x: jdist.OneDeviceStrategy("cpu:0").reduce(op, x, axis=None)])
def test_unknown_reduction_is_an_error(op, call):
    with pytest.raises(ValueError, match="is not a reduction"):
        call(op, 1.0)


def _per_replica(strategy, dtype, *shape):
    n = strategy.num_replicas_in_sync
    return np.random.default_rng(n).integers(-9, 9, size=(n, *shape)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_all_reduce_equals_numpy_on_every_replica(dtype, strategy):
    values = _per_replica(strategy, jnp.dtype(dtype), 2, 3)
    reduce_all = lambda tree: {op: jdist.all_reduce(op, tree)["x"] for op in NUMPY}
    results = strategy.run(reduce_all, ({"x": jdist.PerReplica(values)},))
    for op, reduction in NUMPY.items():
        expected = reduction(np.asarray(values, np.float64), axis=0)
        assert results[op].dtype == (jnp.float32 if (op, dtype) == ("mean", "int32") else dtype)
        np.testing.assert_allclose(
            np.asarray(results[op], np.float64), expected, rtol=1e-2 if dtype == "bfloat16" else 1e-6
        )
        assert results[op].sharding.is_fully_replicated


def test_all_reduce_of_tree_keeps_its_structure(strategy):
    tree = {"a": (rows(strategy, 2), None), "b": []}
    result = strategy.run(lambda tree: jdist.all_reduce("max", tree), (tree,))
    chex.assert_trees_all_equal(result, {"a": (np.asarray(tree["a"][0].tree).max(0), None), "b": []})


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_all_gather_concatenates_in_replica_order_on_every_replica(axis, strategy):
    values = _per_replica(strategy, np.int32, 1, 2, 3)
    result = strategy.run(lambda x: jdist.all_gather({"x": x}, axis), (jdist.PerReplica(values),))["x"]
    np.testing.assert_array_equal(result, np.concatenate(values, axis=axis))
    assert result.sharding.is_fully_replicated


def test_all_gather_accepts_booleans_and_keys(strategy):
    n = strategy.num_replicas_in_sync
    keys = jax.random.split(jax.random.key(5), n)
    tree = jdist.PerReplica({"odd": np.arange(n)[:, None] % 2 == 1, "key": keys[:, None]})
    result = strategy.run(lambda tree: jdist.all_gather(tree, 0), (tree,))
    np.testing.assert_array_equal(result["odd"], np.arange(n) % 2 == 1)
    np.testing.assert_array_equal(jax.random.key_data(result["key"]), jax.random.key_data(keys))


SCATTERING = {
    **STRATEGIES,
    "virtual_4": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4),
    "virtual_5": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=5),
    "groups": lambda: jdist.MirroredStrategy(cross_device_ops=jdist.HierarchicalAllReduce(2)),
}
every_scattering = pytest.mark.parametrize("make", SCATTERING.values(), ids=SCATTERING)


@every_scattering
def test_reduce_scatter_equals_numpy_in_replica_order(make):
    strategy = make()
    n = strategy.num_replicas_in_sync
    values = np.random.default_rng(n).integers(-9, 9, size=(n, 2 * n, 3)).astype(np.float32)
    scatter = lambda x: {"sum": jdist.reduce_scatter("sum", {"x": x})["x"], "mean": jdist.reduce_scatter("MEAN", x)}
    results = strategy.run(scatter, (jdist.PerReplica(values),))
    for op, result in results.items():
        shards = np.concatenate([np.asarray(shard) for shard in strategy.local_results(result)])
        np.testing.assert_allclose(shards, NUMPY[op](values.astype(np.float64), axis=0), rtol=1e-6)


@every_scattering
def test_reduce_scatter_and_all_gather_are_an_all_reduce(make):
    strategy = make()
    n = strategy.num_replicas_in_sync
    tree = jdist.PerReplica({"x": rows(strategy, n, 2 * n).tree, "i": np.arange(n * n).reshape(n, n, 1).repeat(n, 2)})

    def gathered_and_reduced(tree):
        shards = {
            (op, axis): jdist.reduce_scatter(op, tree, axis=axis) for op in ("sum", "mean") for axis in (0, 1, -1, -2)
        }
        gathered = {f"{op} {axis}": jdist.all_gather(shard, axis) for (op, axis), shard in shards.items()}
        return gathered, {f"{op} {axis}": jdist.all_reduce(op, tree) for op, axis in shards}

    gathered, reduced = strategy.run(gathered_and_reduced, (tree,))
    assert_in_step(gathered)
    chex.assert_trees_all_equal_shapes_and_dtypes(gathered, reduced)
    chex.assert_trees_all_close(gathered, reduced, rtol=1e-5, atol=1e-6)


def test_reduce_scatter_of_an_empty_leaf_is_empty(strategy):
    n = strategy.num_replicas_in_sync
    scatter = lambda x: [jnp.shape(jdist.reduce_scatter("sum", x, axis=axis)) for axis in (0, 1)]
    shapes = []
    strategy.run(lambda x: shapes.append(scatter(x)), (rows(strategy, 0, 2 * n),))
    assert shapes[-1] == [(0, 2 * n), (0, 2)]


def test_gradient_through_reduce_scatter_is_a_gather(two):
    x = rows(two, 4)
    loss = lambda x: jnp.sum(jdist.reduce_scatter("sum", x) * (1.0 + jdist.replica_id()))
    grads = two.run(jax.grad(loss), (x,))
    np.testing.assert_allclose(grads.tree if isinstance(grads, jdist.PerReplica) else [grads] * 2, [[1, 1, 2, 2]] * 2)


def test_reduce_scatter_outside_any_strategy_is_the_identity():
    tree = {"x": np.float32([1, 2, 3]), "none": None}
    chex.assert_trees_all_equal(jdist.reduce_scatter("sum", tree), tree)


def test_result_of_reduce_scatter_is_varying(two):
    step = two.step(lambda w, x: (w + jdist.reduce_scatter("sum", x), None))
    with pytest.raises(jdist.NotMirroredError, match="reduce_scatter"):
        step(two.put(np.zeros(2, np.float32)), rows(two, 4))


def test_reduce_scatter_of_a_replicated_leaf_is_a_repeated_sum(two):
    with pytest.warns(jdist.RepeatedSumWarning):
        two.run(lambda w: jdist.reduce_scatter("sum", w), (np.ones(4, np.float32),))


SCATTER_ERRORS = {
    "not_divisible": (
        lambda: jdist.reduce_scatter("sum", {"x": jnp.ones((3, 2))}),
        ValueError,
        r"value\['x'\] is float32\[3,2\]: dimension 0 has 3 elements, which 2 replicas do not divide evenly\. Pad",
    ),
    "negative_not_divisible": (
        lambda: jdist.reduce_scatter("sum", {"x": jnp.ones((2, 3))}, axis=-1),
        ValueError,
        r"value\['x'\] is float32\[2,3\]: dimension 1 has 3 elements, which 2 replicas",
    ),
    "negative_axis": (
        lambda: jdist.reduce_scatter("sum", jnp.ones((2, 2)), axis=-3),
        ValueError,
        r"value is float32\[2,2\]: it does not have dimension -3\. Its dimensions are 0 to 1, or -2 to -1",
    ),
    "scalar": (lambda: jdist.reduce_scatter("sum", 1.0), ValueError, r"does not have dimension 0\. It is a scalar"),
    "axis_type": (lambda: jdist.reduce_scatter("sum", jnp.ones(2), axis=None), TypeError, r"`axis` must be a dim"),
    "max": (
        lambda: jdist.reduce_scatter("max", jnp.ones(2)),
        ValueError,
        r"`reduce_scatter` supports 'SUM' and 'MEAN', got 'MAX'\. For MAX, slice the result of `all_reduce`",
    ),
    "unknown": (lambda: jdist.reduce_scatter("avg", jnp.ones(2)), ValueError, "'avg' is not a reduction"),
    "boolean": (lambda: jdist.reduce_scatter("sum", [jnp.array([True, False])]), TypeError, r"value\[0\] is boolean"),
    "row_slices": (
        lambda: jdist.reduce_scatter("sum", jdist.RowSlices(np.ones((2, 2)), np.int32([0, 1]), 4)),
        TypeError,
        r"`reduce_scatter` does not support RowSlices",
    ),
}


@each_row("call, error, message", SCATTER_ERRORS.values(), ids=SCATTER_ERRORS)
def test_invalid_reduce_scatter_is_an_error(call, error, message, two):
    with pytest.raises(error, match=message):
        two.run(call)


def test_reduce_scatter_in_the_cross_replica_context_is_an_error(two):
    with two.scope(), pytest.raises(RuntimeError, match=r"`jdist\.reduce_scatter`.*`strategy\.reduce`"):
        jdist.reduce_scatter("sum", jnp.ones(2))


def sum_in_scan(x):
    return lax.scan(lambda c, y: (c + jdist.all_reduce("sum", y), jdist.all_reduce("max", y)), 0.0, x)


def sum_in_cond(x):
    return lax.cond(jdist.num_replicas() > 0, lambda: jdist.all_reduce("sum", x), lambda: x), x.sum()


def sum_in_while(x):
    body = lambda c: (c[0] + 1, c[1] + jdist.all_reduce("sum", x))
    return lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.zeros_like(x)))


def sum_in_vmap(x):
    return jax.vmap(lambda y: jdist.all_reduce("sum", y))(x), jax.vmap(lambda y: jdist.all_gather(y[None], 0))(x)


CONTROL_FLOW = {
    "scan": (sum_in_scan, lambda x, i: (x.sum(), x.max(0))),
    "cond": (sum_in_cond, lambda x, i: (x.sum(0), x[i].sum())),
    "while": (sum_in_while, lambda x, i: (np.int32(3), 3 * x.sum(0))),
    "vmap": (sum_in_vmap, lambda x, i: (x.sum(0), x.T)),
}


@pytest.mark.parametrize("fn, expected", CONTROL_FLOW.values(), ids=CONTROL_FLOW)
def test_collectives_work_in_control_flow(fn, expected, strategy):
    x = rows(strategy, 4)
    results = strategy.local_results(strategy.run(fn, (x,)))
    for number, result in enumerate(results):
        chex.assert_trees_all_close(result, expected(np.asarray(x.tree), number), rtol=1e-5, atol=1e-6)


def test_gradient_through_a_mean_is_local(strategy):
    x = rows(strategy, 3)
    gradient = lambda w, x: jax.grad(lambda w: jdist.all_reduce("mean", jnp.sum(w * x * x)))(w)
    grads = strategy.run(gradient, (np.ones(3, np.float32), x))
    np.testing.assert_allclose(grads.tree, np.square(x.tree), rtol=1e-6)


@each_row(
    "call",
    [
        lambda x: jdist.all_reduce("sum", x),
        lambda x: jdist.all_gather({"a": x}, 0),
        lambda x: jdist.reduce_scatter("sum", x),
        jdist.broadcast,
    ],
)
def test_collective_of_a_distributed_value_on_the_host_is_an_error(call):
    value = rows(STRATEGIES["mirrored_2"](), 3)
    with pytest.raises(
        TypeError, match=r"PerReplica\(float32\[2,3\]\) is a distributed value.*`strategy\.run.*`strategy\.gather`"
    ):
        call(value)


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


def test_broadcast_returns_the_values_of_the_first_replica_on_every_replica(strategy):
    n = strategy.num_replicas_in_sync
    other = lambda x: ~x if x.dtype == np.bool_ else np.full_like(x, 1)
    values = {name: np.stack([x] + [other(x)] * (n - 1)) for name, x in BROADCAST.items()}
    result = strategy.run(lambda tree: jdist.broadcast({**tree, "none": None}), (jdist.PerReplica(values),))
    assert result.pop("none") is None
    chex.assert_trees_all_equal(result, BROADCAST)
    chex.assert_trees_all_equal_shapes_and_dtypes(result, jax.tree.map(jnp.asarray, BROADCAST))
    assert_in_step(result)


KEYS = {"typed": jax.random.key, "raw": jax.random.PRNGKey, "rbg": lambda seed: jax.random.key(seed, impl="rbg")}


@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
def test_broadcast_of_keys_returns_the_key_of_the_first_replica(make, strategy):
    key = strategy.run(lambda key: jdist.broadcast(jdist.replica_key(key)), (make(3),))
    expected = jax.random.fold_in(make(3), 0)
    assert key.dtype == expected.dtype
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(expected))
    assert_in_step(key)


ALGORITHMS = {
    "groups_of_1": jdist.HierarchicalAllReduce(1),
    "groups_of_2": jdist.HierarchicalAllReduce(2),
    "groups_of_4": jdist.HierarchicalAllReduce(4),
    "one_device": jdist.ReductionToOneDevice(),
    "scattered": jdist.AllReduce(0),
}


@pytest.mark.parametrize("ops", ALGORITHMS.values(), ids=ALGORITHMS)
def test_collectives_are_equal_under_every_all_reduce_algorithm(ops):
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(4)], cross_device_ops=ops)
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    collectives = lambda x: (
        jdist.broadcast((x, x > 5)),
        jdist.all_gather(x, 0),
        jdist.all_reduce("sum", _slices(x, 20)).dense(),
    )
    first, gathered, table = strategy.run(collectives, (jdist.PerReplica(x),))
    chex.assert_trees_all_equal(first, (x[0], x[0] > 5))
    np.testing.assert_array_equal(gathered, x.reshape(-1))
    np.testing.assert_array_equal(table, _table(x, 20))
    assert_in_step((first, gathered, table))


def test_broadcast_outside_any_strategy_is_the_value():
    chex.assert_trees_all_equal(jdist.broadcast({"x": 3.0, "none": None}), {"x": np.float32(3), "none": None})


def test_result_of_broadcast_is_proved_replicated(two):
    step = two.step(lambda w, x: (w + jdist.broadcast(x), None))
    state, _ = step(two.put(np.zeros(3, np.float32)), rows(two, 3))
    np.testing.assert_array_equal(state, rows(two, 3).tree[0])


def _slices(x, num_rows):
    """Returns `x` as row `replica_id` of a table, and `2 * x` as row 0."""
    return jdist.RowSlices(jnp.stack([x, 2 * x]), jnp.stack([jdist.replica_id(), 0 * jdist.replica_id()]), num_rows)


def _table(x, num_rows):
    table = np.zeros((num_rows, *x.shape[1:]), x.dtype)
    for number, row in enumerate(x):
        table[number] += row
        table[0] += 2 * row
    return table


TABLES = {"small": 8, "large": 60}


@pytest.mark.parametrize("num_rows", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce_of_row_slices_represents_the_reduced_table(op, num_rows, strategy):
    n = strategy.num_replicas_in_sync
    x = rows(strategy, 3)
    reduced = strategy.run(lambda x: jdist.all_reduce(op, {"e": _slices(x, num_rows), "b": x.sum()}), (x,))
    values = np.asarray(x.tree)
    expected = _table(values, num_rows) / (n if op == "mean" else 1)
    assert isinstance(reduced["e"], jdist.RowSlices)
    assert reduced["e"].num_rows == num_rows
    assert_in_step(reduced)
    np.testing.assert_allclose(reduced["e"].dense(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(reduced["b"], values.sum() / (n if op == "mean" else 1), rtol=1e-4, atol=1e-5)


SENT = {"rows_are_less": (50, [0, 1, 0, 1]), "rows_are_still_less": (3, [0, 1, 0, 1]), "table_is_less": (2, [0, 1])}


@pytest.mark.parametrize("num_rows, indices", SENT.values(), ids=SENT)
def test_all_reduce_of_row_slices_sends_the_smaller_representation(num_rows, indices, two):
    make = lambda: jdist.RowSlices(jdist.replica_id() + jnp.ones((2, 100)), jnp.arange(2), num_rows)
    reduced = two.run(lambda: jdist.all_reduce("sum", make()))
    assert reduced.rows.shape == (len(indices), 100)
    assert reduced.indices.tolist() == indices
    np.testing.assert_array_equal(reduced.dense()[:2], np.full((2, 100), 3))
    assert not np.any(reduced.dense()[2:])


def test_all_reduce_of_empty_row_slices_is_a_table_of_zeros(strategy):
    make = lambda: jdist.RowSlices(jnp.ones((0, 2)) * jdist.replica_id(), jnp.zeros(0, jnp.int32), 4)
    reduced = strategy.run(lambda: jdist.all_reduce("mean", make()))
    np.testing.assert_array_equal(reduced.dense(), np.zeros((4, 2)))


def test_all_gather_of_empty_leaves_is_empty(strategy):
    n = strategy.num_replicas_in_sync
    results = strategy.run(lambda x: (jdist.all_gather(x, 0), jdist.all_gather(x, 1)), (rows(strategy, 0, 2),))
    assert [leaf.shape for leaf in results] == [(0, 2), (0, 2 * n)]


def test_all_reduce_of_row_slices_outside_any_strategy_is_the_identity():
    slices = jdist.RowSlices(np.float32([[1, 2]]), np.int32([3]), 5)
    chex.assert_trees_all_equal(jdist.all_reduce("mean", slices), slices)


def test_row_slices_of_booleans_are_an_error_with_the_path(two):
    slices = jdist.RowSlices(np.array([[True]]), np.int32([0]), 4)
    with pytest.raises(TypeError, match=r"value\['e'\] is boolean \(bool\[1,1\]\), and SUM of booleans"):
        two.run(lambda: jdist.all_reduce("sum", {"e": slices}))


def test_sum_of_a_replicated_leaf_among_others_is_a_warning(strategy):
    x = rows(strategy, 3)
    pack = jdist.CommunicationOptions(2**40)
    with pytest.warns(
        jdist.RepeatedSumWarning, match=r"the same on every replica multiplies it by the number of replicas"
    ):
        strategy.run(lambda w, x: jdist.all_reduce("sum", {"w": w, "x": x}, options=pack), (np.ones(3, np.float32), x))


def test_sum_of_a_constant_is_a_count_and_not_a_warning(strategy):
    x = rows(strategy, 3)
    pack = jdist.CommunicationOptions(2**40)
    sums = strategy.run(lambda x: jdist.all_reduce("sum", {"n": 1.0, "x": x}, options=pack), (x,))
    assert float(sums["n"]) == strategy.num_replicas_in_sync


def test_sum_of_a_captured_array_is_a_warning(two):
    captured = jnp.arange(3.0)
    with pytest.warns(jdist.RepeatedSumWarning):
        two.run(lambda: jdist.all_reduce("sum", captured))


NANS = [[np.nan, 1, -0.0, -np.inf, -2, np.nan], [1, np.nan, 0, -3, -2.5, -np.nan], [1, 2, -0.0, np.inf, -3, 1e-40]]
VIRTUAL = {"virtual_4": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4)}
BY_OPS = {
    repr(ops): lambda ops=ops: jdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    for ops in (jdist.ReductionToOneDevice(), jdist.HierarchicalAllReduce(1))
}


@each_row("dtype", ["float32", "bfloat16", "float16"])
@each_row("make", (STRATEGIES | VIRTUAL | BY_OPS).values(), ids=STRATEGIES | VIRTUAL | BY_OPS)
def test_max_and_min_are_nan_where_any_replica_has_nan(make, dtype):
    strategy = make()
    examples = [np.array(row).astype(jnp.dtype(dtype)) for row in NANS]
    values = np.stack([examples[i % 3] for i in range(strategy.num_replicas_in_sync)])
    x = strategy.put(jdist.PerReplica(values))
    results = strategy.run(lambda x: [jdist.all_reduce(op, [x, x[:2]]) for op in ("max", "min")], (x,))
    for op, reduced in zip(("max", "min"), results, strict=True):
        expected = NUMPY[op](values.astype(np.float64), axis=0)
        for result in (reduced[0], strategy.reduce(op, x, axis=None)):
            assert result.dtype == dtype
            np.testing.assert_array_equal(np.asarray(result, np.float64), expected)
        np.testing.assert_array_equal(np.asarray(reduced[1], np.float64), expected[:2])


@each_row("axis", [None, "0", 1.0, (0,), True])
def test_all_gather_along_an_axis_that_is_not_an_integer_is_an_error(axis, two):
    message = r"`axis` must be a dimension of one replica's value, an integer, got .*`x\[None\]`, and use `axis=0`"
    for gather in (lambda x: two.gather(x, axis), lambda x: two.run(lambda x: jdist.all_gather(x, axis), (x,))):
        with pytest.raises(TypeError, match=message):
            gather(rows(two, 3))


def test_gradient_through_a_max_is_an_error_with_the_fix(two):
    maximum = lambda x: jdist.all_reduce("max", x) * x
    with pytest.raises(
        NotImplementedError, match=r"`jdist.all_reduce` with MAX or MIN is not differentiable. Stop .*stop_grad"
    ):
        two.run(jax.grad(maximum), (1.0,))
    stopped = lambda x: jdist.all_reduce("max", lax.stop_gradient(x)) * x
    assert float(two.run(jax.grad(stopped), (3.0,))) == 3.0


TOO_LARGE = {
    "all_reduce": (lambda x: jdist.all_reduce("max", [x]), r"value\[0\]"),
    "sum": (lambda x: jdist.all_reduce("sum", x), "value"),
    "all_gather": (lambda x: jdist.all_gather([x[None]], 0), r"value\[0\]"),
    "reduce_scatter": (lambda x: jdist.reduce_scatter("sum", [x[None]]), r"value\[0\]"),
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


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
@each_row("fn, name", TOO_LARGE.values(), ids=TOO_LARGE)
def test_host_integer_beyond_32_bits_is_an_error_with_its_path(fn, name, two):
    for call in (lambda: two.run(lambda: fn(np.int64(2**40))), lambda: fn(np.int64(2**40))):
        with pytest.raises(ValueError, match=f"^{name} holds 1099511627776, which is out of the range of int32"):
            call()


REFUSED = [
    (
        lambda: jdist.all_reduce("sum", {"x": np.True_}),
        TypeError,
        r"value\['x'\] is boolean \(bool\[\]\), and SUM of booleans .*`x.astype\(jnp.int32\)`",
    ),
    (
        lambda: jdist.all_reduce("max", {"x": np.array([True])}),
        TypeError,
        r"value\['x'\] is boolean \(bool\[1\]\).*MAX is any, MIN is all",
    ),
    (
        lambda: jdist.all_reduce("mean", {"x": jax.random.key(0)}),
        TypeError,
        r"value\['x'\] is a random key \(key<fry>\[\]\).*Reduce the numbers drawn",
    ),
    *(
        (
            lambda axis=axis: jdist.all_gather({"x": jnp.ones(3)}, axis),
            ValueError,
            rf"value\['x'\] is float32\[3\]: it does .* dimension {axis}\. Its dimensions are 0 to 0, or -1 to -1; `axis`",
        )
        for axis in (1, -2)
    ),
    *(
        (
            lambda op=op: jdist.all_reduce(op, {"e": _slices(jnp.ones(3), 9)}),
            TypeError,
            rf"value\['e'\] is RowSlices, whose {op.upper()} .*Use SUM or MEAN, or reduce the table: `value\.dense\(\)`",
        )
        for op in ("max", "min")
    ),
    (
        lambda: jdist.all_gather({"e": _slices(jnp.ones(3), 9)}, 0),
        TypeError,
        r"`all_gather` does not support RowSlices\. .*`value\.dense\(\)`.*`value\.rows`, `value\.indices`",
    ),
]


@each_row("call, error, message", REFUSED, ids=[message for _, _, message in REFUSED])
def test_unsupported_leaf_or_axis_is_an_error_with_its_path_in_and_outside_a_strategy(call, error, message, strategy):
    for run in (lambda: strategy.run(call), call):
        with pytest.raises(error, match=message):
            run()
