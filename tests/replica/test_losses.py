"""Averages over the batches of all replicas, compared with numpy in float64."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, each_row, fixture_of_all_backends

strategy = fixture_of_all_backends()

WIDTH = 12
SPLITS = {n: jdist.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in (1, 3)}
GROUPS = jdist.MirroredStrategy(
    [f"cpu:{i}" for i in range(4)], cross_device_ops=jdist.HierarchicalAllReduce(group_size=2)
)
some = hypothesis.settings(max_examples=30, deadline=None, derandomize=True, database=None)


def mean_and_gradient(w, x, y, weights):
    value, grad = jax.value_and_grad(lambda w: jdist.global_mean(jnp.square(x @ w - y), weights))(w)
    return value, jdist.all_reduce("mean", grad)


def share_and_gradient(w, x, y, weights, size):
    share = lambda w: jdist.compute_average_loss(jnp.square(x @ w - y), weights, size)
    return jdist.all_reduce("sum", jax.value_and_grad(share)(w))


def weighted_loss_and_gradient(w, x, y, weights):
    """Returns the reference: the weighted mean over the global batch, and its gradient."""
    error = x.astype(np.float64) @ w - y
    total = weights.astype(np.float64).sum()
    return weights @ np.square(error) / total, 2 * (weights * error) @ x / total


@st.composite
def batches(draw):
    """Draws up to 12 examples with weights, not all of them 0, and the end of each replica's part."""
    size, seed = draw(st.integers(1, WIDTH)), draw(st.integers(0, 999))
    weights = draw(st.lists(st.sampled_from([0, 0.25, 1, 1, 3.5]), min_size=size, max_size=size).filter(any))
    ends = draw(st.lists(st.integers(0, size), min_size=3, max_size=3).map(sorted))
    rng = np.random.default_rng(seed)
    x, y, w = (rng.normal(size=shape).astype(np.float32) for shape in ((size, 3), (size,), (3,)))
    return w, x, y, np.float32(weights), ends


def _split(n, ends, *arrays):
    """Returns each replica's examples, padded with rows of 9; the last array, the weights, with 0."""
    ends = [0, *ends[: n - 1], len(arrays[0])]
    result = []
    for number, array in enumerate(arrays):
        rows = np.full((n, WIDTH, *array.shape[1:]), 0 if number == len(arrays) - 1 else 9, np.float32)
        for i in range(n):
            part = array[ends[i] : ends[i + 1]]
            rows[i, : len(part)] = part
        result.append(jdist.PerReplica(rows))
    return result


@pytest.mark.parametrize("n", SPLITS)
@some
@hypothesis.given(batches())
def test_mean_and_average_loss_and_their_gradients_equal_those_of_the_global_batch_for_every_split(n, case):
    w, x, y, weights, ends = case
    expected, split = weighted_loss_and_gradient(w, x, y, weights), (w, *_split(n, ends, x, y, weights))
    mean = SPLITS[n].run(mean_and_gradient, split)
    chex.assert_trees_all_close(mean, expected, rtol=1e-4, atol=1e-5)
    assert all(leaf.sharding.is_fully_replicated for leaf in mean)
    average = SPLITS[n].run(share_and_gradient, (*split, np.float32(len(x))))
    expected = jax.tree.map(lambda z: z * weights.sum() / len(x), expected)
    chex.assert_trees_all_close(average, expected, rtol=1e-4, atol=1e-5)


def test_mean_over_groups_of_replicas_equals_that_of_the_global_batch():
    rng = np.random.default_rng(0)
    w, x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((3,), (10, 3), (10,)))
    weights = np.float32([1, 0, 2, 1, 1, 1, 0.5, 1, 0, 1])
    result = GROUPS.run(mean_and_gradient, (w, *_split(4, [1, 1, 9], x, y, weights)))
    chex.assert_trees_all_close(result, weighted_loss_and_gradient(w, x, y, weights), rtol=1e-5)


def test_mean_outside_any_strategy_is_the_plain_weighted_mean():
    rng = np.random.default_rng(1)
    w, x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((3,), (6, 3), (6,)))
    weights = np.float32([1, 0, 2, 1, 1, 0.5])
    result = mean_and_gradient(w, x, y, weights)
    chex.assert_trees_all_close(result, weighted_loss_and_gradient(w, x, y, weights), rtol=1e-5)


def test_mean_without_weights_is_the_mean_of_all_values(strategy):
    global_values = np.random.default_rng(2).normal(size=(strategy.num_replicas_in_sync, 4, 2)).astype(np.float32)
    np.testing.assert_allclose(
        strategy.run(jdist.global_mean, (jdist.PerReplica(global_values),)), global_values.mean(), rtol=1e-5
    )


def test_mean_of_uneven_values_counts_each_row_once(strategy):
    parts = [np.arange(i % 3, dtype=np.float32) + i for i in range(1, strategy.num_replicas_in_sync + 1)]
    uneven = strategy.distribute_values_from_function(lambda c: (parts[c.replica_id_in_sync_group],))
    (value,), weights = (part.tree for part in uneven.padded())
    result = strategy.run(jdist.global_mean, (jdist.PerReplica(value), jdist.PerReplica(weights)))
    np.testing.assert_allclose(result, np.concatenate(parts).mean(), rtol=1e-6)


def test_mean_of_tree_is_the_mean_of_each_leaf_and_none_stays(strategy):
    n = strategy.num_replicas_in_sync
    values_of_one = np.random.default_rng(3).normal(size=(n, 2)).astype(np.float32)
    tokens = np.random.default_rng(4).normal(size=(n, 2, 3)).astype(np.float32)
    weights = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    values = {"one": values_of_one, "tokens": tokens, "none": None}
    result = strategy.run(jdist.global_mean, (jdist.PerReplica(values), jdist.PerReplica(weights)))
    expected = {
        "one": np.average(values_of_one, weights=weights),
        "tokens": np.average(tokens, weights=np.repeat(weights[..., None], 3, -1)),
        "none": None,
    }
    chex.assert_trees_all_close(result, expected, rtol=1e-5)


AXES = {
    "features_stay": (0, (1,), (3, 2)),
    "pixels_and_batch": ((0, 1), (1, 2), (2,)),
    "none_over_replicas_alone": ((), (), (2, 3, 2)),
    "last": (2, (3,), (2, 3)),
}


@pytest.mark.parametrize("axis, over, left", AXES.values(), ids=AXES)
def test_mean_over_axis_keeps_the_other_dimensions(axis, over, left, strategy):
    n = strategy.num_replicas_in_sync
    values = np.random.default_rng(5).normal(size=(n, 2, 3, 2)).astype(np.float32)
    weights = np.arange(1, 2 * n + 1, dtype=np.float32).reshape(n, 2)
    average = lambda values, weights: jdist.global_mean(values, weights, axis=axis)
    result = strategy.run(average, (jdist.PerReplica(values), jdist.PerReplica(weights)))
    global_values = np.broadcast_to(weights[:, :, None, None], values.shape)
    np.testing.assert_allclose(result, np.average(values, axis=(0, *over), weights=global_values), rtol=1e-4, atol=1e-6)
    assert result.shape == left


WEIGHTS = {
    "of_examples": (np.float32([2, 0]), (2 * (1 + 2 + 3)) / 6),
    "of_tokens": (np.float32([[1, 1, 0], [0, 0, 1]]), (1 + 2 + 6) / 3),
    "of_none": (np.float32(3), 3.5),
    "integers": (np.array([1, 3]), (6 + 3 * 15) / 12),
    "booleans": (np.array([False, True]), 5),
}


@pytest.mark.parametrize("weights, expected", WEIGHTS.values(), ids=WEIGHTS)
def test_mean_accepts_weights_of_the_first_dimensions(weights, expected, two):
    values = np.float32([[1, 2, 3], [4, 5, 6]])
    assert float(two.run(jdist.global_mean, (values, weights))) == pytest.approx(expected)
    assert float(jdist.global_mean(values, weights)) == pytest.approx(expected)


@pytest.mark.parametrize("nonfinite", [np.nan, np.inf, -np.inf])
def test_row_of_weight_zero_that_is_not_finite_has_no_effect_on_the_mean(nonfinite, two):
    values = jdist.PerReplica(np.float32([[1, nonfinite], [3, 5]]))
    weights = jdist.PerReplica(np.float32([[1, 0], [1, 1]]))
    average = lambda values, weights: jax.value_and_grad(jdist.global_mean)(values, weights)
    value, gradient = two.run(average, (values, weights))
    assert float(value) == 3
    np.testing.assert_allclose(gradient.tree, np.float32([[1, 0], [1, 1]]) * 2 / 3, rtol=1e-6)


def test_row_that_is_not_finite_makes_the_mean_nan(two):
    values = jdist.PerReplica(np.float32([[1, np.nan], [3, 5]]))
    assert np.isnan(two.run(jdist.global_mean, (values,)))


def test_mean_and_gradient_with_zero_weights_are_zero(strategy):
    n = strategy.num_replicas_in_sync
    nothing = jdist.PerReplica(np.zeros((n, 2), np.float32))
    average = lambda values, weights: jax.value_and_grad(jdist.global_mean)(values, weights)
    value, gradient = strategy.run(average, (jdist.PerReplica(np.ones((n, 2), np.float32)), nothing))
    assert float(value) == 0
    np.testing.assert_array_equal(gradient.tree, np.zeros((n, 2)))


def test_mean_without_rows_is_zero_for_each_feature(two):
    average = lambda values: jdist.global_mean(values, axis=0)
    np.testing.assert_array_equal(two.run(average, (jdist.PerReplica(np.zeros((2, 0, 3), np.float32)),)), np.zeros(3))


DTYPES = {
    "bfloat16": jnp.float32,
    "float16": jnp.float32,
    "float32": jnp.float32,
    "int8": jnp.float32,
    "uint8": jnp.float32,
    "int32": jnp.float32,
    "complex64": jnp.complex64,
}


@pytest.mark.parametrize("dtype, expected", DTYPES.items(), ids=DTYPES)
def test_mean_is_float32_at_least(dtype, expected, two):
    values = jdist.PerReplica(jnp.asarray([[100, 101], [102, 104]], dtype))
    result = two.run(jdist.global_mean, (values,))
    assert result.dtype == expected
    np.testing.assert_allclose(result, np.mean(np.asarray(values.tree, expected)), rtol=1e-6)


def test_mean_of_complex_values_is_weighted_in_both_parts(two):
    values = jdist.PerReplica(np.complex64([[1 + 2j, 9], [3j, 9j]]))
    result = two.run(jdist.global_mean, (values, np.float32([1, 0])))
    np.testing.assert_allclose(result, 0.5 + 2.5j)


@pytest.mark.parametrize("weights", [None, np.ones(3, np.float32), np.float32([1, 0, 2])], ids=str)
def test_mean_of_replicated_values_is_their_mean_without_a_warning(weights, strategy):
    values = np.float32([1, 2, 6])
    result = strategy.run(jdist.global_mean, (values, weights))
    assert float(result) == pytest.approx(np.average(values, weights=weights))


def test_mean_in_scan_is_the_same_as_outside(strategy):
    global_values = np.random.default_rng(6).normal(size=(strategy.num_replicas_in_sync, 5, 2)).astype(np.float32)
    turn = lambda total, x: (total + jdist.global_mean(x), jdist.global_mean(x, axis=0))
    total, means = strategy.run(lambda xs: jax.lax.scan(turn, 0.0, xs), (jdist.PerReplica(global_values[:, :, None]),))
    np.testing.assert_allclose(total, global_values.mean((0, 2)).sum(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(means, global_values.mean(0), rtol=1e-5, atol=1e-6)


BAD_WEIGHTS = {
    "negative": (
        np.float32([1, -0.5]),
        r"weights has 1 of 2 values .* the first is -0\.5 at \[1\]\. Weights must be finite",
    ),
    "negative_integer": (np.array([-2, -1]), r"weights has 2 of 2 values .* the first is -2 at \[0\]"),
    "nan": (np.float32([np.nan, 1]), r"weights has 1 of 2 values .* the first is nan at \[0\]"),
    "infinite": (jnp.float32([1, np.inf]), r"weights has 1 of 2 values .* the first is inf at \[1\]"),
    "jax": (jnp.asarray([-1, 1], jnp.bfloat16), r"the first is -1\.0 at \[0\]"),
}


@each_row("weights, message", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_weights_that_are_negative_or_not_finite_are_refused(weights, message, two):
    values, labels = np.float32([1, 2]), np.array([1, 2])
    for call in (
        lambda: jdist.global_mean(values, weights),
        lambda: two.run(lambda values: jdist.global_mean(values, weights), (values,)),
        lambda: two.run(lambda values: jdist.compute_average_loss(values, weights), (values,)),
        lambda: jdist.metrics.Mean().update(values, weights=weights),
        lambda: jdist.metrics.ConfusionMatrix.empty(3).update(labels, labels, weights=weights),
    ):
        with pytest.raises(ValueError, match=message):
            call()


MEAN_REFUSED = {
    "keys": (jax.random.key(0), None, None, TypeError, r"values is a random key .*Reduce the numbers drawn from it"),
    "key_weights": (
        np.ones((), np.float32),
        jax.random.key(0),
        None,
        TypeError,
        r"weights are random keys, key<fry>\[\]",
    ),
    "negative_axis": (np.ones(2, np.float32), None, -2, ValueError, r"it does not have dimension -2"),
    "weights_of_other_length": (
        {"x": np.ones((2, 3), np.float32)},
        np.ones(3, np.float32),
        None,
        ValueError,
        r"weights float32\[3\] do not match values\['x'\] float32\[2,3\]: the dimensions of the weights must be",
    ),
    "weights_of_more_dimensions": (
        np.ones(2, np.float32),
        np.ones((2, 1), np.float32),
        None,
        ValueError,
        r"weights float32\[2,1\] do not match values float32\[2\]",
    ),
    "booleans": (
        [np.array([True])],
        None,
        None,
        TypeError,
        r"values\[0\] is boolean \(bool\[1\]\), and MEAN of booleans .*`x\.astype\(jnp\.int32\)`",
    ),
    "slices": (
        jdist.RowSlices(np.ones((1, 2), np.float32), np.array([0]), 3),
        None,
        None,
        TypeError,
        r"`global_mean` does not support RowSlices.*`value\.dense\(\)`.*`value\.rows`",
    ),
    "axis": (
        np.ones(2, np.float32),
        None,
        1,
        ValueError,
        r"values is float32\[2\]: it does not have dimension 1\. Its dimensions are 0 to 0",
    ),
}


@each_row("values, weights, axis, error, message", MEAN_REFUSED.values(), ids=MEAN_REFUSED)
def test_mean_of_invalid_values_and_weights_is_refused_by_name(values, weights, axis, error, message, two):
    with pytest.raises(error, match=message):
        jdist.global_mean(values, weights, axis=axis)
    with pytest.raises(error, match=message):
        two.run(lambda values, weights: jdist.global_mean(values, weights, axis=axis), (values, weights))


def test_average_loss_counts_the_batches_of_all_replicas_by_default(strategy):
    n = strategy.num_replicas_in_sync
    losses = np.random.default_rng(7).normal(size=(n, 3)).astype(np.float32)
    shares = strategy.run(jdist.compute_average_loss, (jdist.PerReplica(losses),))
    np.testing.assert_allclose(shares.tree, losses.sum(1) / (3 * n), rtol=1e-5)
    np.testing.assert_allclose(strategy.reduce("sum", shares, axis=None), losses.mean(), rtol=1e-5, atol=1e-7)


TF_LOSSES = {
    "plain": (np.float32([1, 2, 3]), None, None, 1.0),
    "with_size": (np.float32([1, 2, 3]), None, 12, 0.5),
    "with_weights": (np.float32([1, 2, 3]), np.float32([1, 0, 3]), None, 10 / 6),
    "with_both": (np.float32([1, 2, 3]), np.float32([1, 0, 3]), 4, 2.5),
    "scalar_with_size": (np.float32(6), None, 3, 2.0),
    "tokens_with_example_weights": (np.float32([[1, 2], [3, 4]]), np.float32([1, 2]), None, 17 / 4),
    "tokens_with_token_weights": (np.float32([[1, 2], [3, 4]]), np.float32([[1, 0], [0, 1]]), None, 5 / 4),
}


@pytest.mark.parametrize("loss, weights, size, expected", TF_LOSSES.values(), ids=TF_LOSSES)
def test_average_loss_equals_tensorflow(loss, weights, size, expected, two):
    share = lambda loss, weights: jdist.compute_average_loss(loss, weights, size)
    assert float(two.run(share, (loss, weights))) == pytest.approx(expected)
    alone = expected if size else 2 * expected
    assert float(share(loss, weights)) == pytest.approx(alone)


AVERAGE_REFUSED = {
    **{
        f"size_{size!r}": (
            (np.ones(2, np.float32), None, size),
            rf"`global_batch_size` must be a positive number of examples, got {got}",
        )
        for size, got in [(0, "0"), (-3, "-3"), (np.int64(0), r"np\.int64\(0\)"), (2.5, r"2\.5"), ("many", "'many'")]
    },
    "scalar": (
        (np.float32(1),),
        r"`per_example_loss` is float32\[\], without examples to count\. Pass `global_batch",
    ),
    "weights": (
        (np.ones((2, 3), np.float32), np.ones(3, np.float32)),
        r"weights float32\[3\] do not match per_example_loss float32\[2,3\].*as \[batch\] for \[batch, \.\.\.\]",
    ),
}


@each_row("args, message", AVERAGE_REFUSED.values(), ids=AVERAGE_REFUSED)
def test_average_loss_of_no_batch_is_refused(args, message, two):
    with pytest.raises(ValueError, match=message):
        jdist.compute_average_loss(*args)
    with pytest.raises(ValueError, match=message):
        two.run(lambda: jdist.compute_average_loss(*args))


@pytest.mark.parametrize("loss", [np.float32(6), np.float32([1, 2, 3]), np.float32([[1], [5]])], ids=np.shape)
def test_regularization_loss_summed_over_replicas_is_its_sum(loss, strategy):
    total = lambda loss: jdist.all_reduce("sum", jdist.scale_regularization_loss(loss) + 0 * jdist.replica_id())
    assert float(strategy.run(total, (loss,))) == pytest.approx(6)
    assert float(jdist.scale_regularization_loss(loss)) == 6


def test_loss_of_shares_trains_as_one_device_does(strategy):
    n = strategy.num_replicas_in_sync
    rng = np.random.default_rng(8)
    x, y = rng.normal(size=(n, 2, 3)).astype(np.float32), rng.normal(size=(n, 2)).astype(np.float32)

    def descend(w, x, y):
        def share(w):
            average = jdist.compute_average_loss(jnp.square(x @ w - y))
            return average + jdist.scale_regularization_loss(0.1 * jnp.square(w))

        return w - 0.1 * jdist.all_reduce("sum", jax.grad(share)(w)), None

    result, _ = strategy.step(descend)(strategy.put(np.ones(3, np.float32)), jdist.PerReplica(x), jdist.PerReplica(y))
    global_values, _ = descend(np.ones(3, np.float32), x.reshape(-1, 3), y.ravel())
    np.testing.assert_allclose(result, global_values, rtol=1e-5, atol=1e-6)


IN_SCOPE = {
    "global_mean": (lambda: jdist.global_mean(np.ones(2, np.float32)), r"strategy\.reduce"),
    "compute_average_loss": (lambda: jdist.compute_average_loss(np.ones(2, np.float32)), r"strategy\.reduce"),
    "scale_regularization_loss": (lambda: jdist.scale_regularization_loss(1.0), r"strategy\.num_replicas_in_sync"),
}


@pytest.mark.parametrize("name", ["one_device", "mirrored_2"])
@pytest.mark.parametrize("function", IN_SCOPE)
def test_average_on_the_host_in_scope_is_refused(function, name):
    call, instead = IN_SCOPE[function]
    with (
        STRATEGIES[name]().scope(),
        pytest.raises(RuntimeError, match=rf"`jdist\.{function}` can only be called inside .*`{instead}`"),
    ):
        call()


@pytest.mark.parametrize("function", [jdist.compute_average_loss, jdist.scale_regularization_loss, jdist.global_mean])
def test_loss_of_a_wrapped_value_is_refused_with_the_fix(function, two):
    with pytest.raises(TypeError, match=r"PerReplica\(float32\[2,3\]\) is a distributed value.*`strategy\.run"):
        function(two.put(jdist.PerReplica(np.ones((2, 3), np.float32))))


@pytest.mark.parametrize("function", [jdist.compute_average_loss, jdist.scale_regularization_loss])
def test_loss_that_is_a_key_is_refused_by_name(function):
    with pytest.raises(TypeError, match="loss is a random key"):
        function(jax.random.key(0))


def test_mean_without_weights_sends_its_sum_and_no_count(two):
    values = two.put(jdist.PerReplica(np.arange(6, dtype=np.float32).reshape(2, 3)))
    program = str(jax.make_jaxpr(lambda x: two.run(jdist.global_mean, (x,)))(values))
    sent = [line for line in program.splitlines() if "psum" in line]
    assert len(sent) == 1
    assert "f32[] = psum" in sent[0]
