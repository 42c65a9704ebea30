"""`value_and_grad` over replicas and micro-batches, compared with one device and the global batch."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

few = hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
START = {"w": np.float32([0.5, -1.0, 2.0]), "b": np.float32(0.25)}
COLLECTIVE = re.compile(r"\s(all-reduce|all-to-all|all-gather|reduce-scatter|collective-permute)(-start)?\(")


def mirrored(count):
    return jdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def squares(params, x, y):
    """Returns losses with the shape of `y`, for x `[..., 3]`."""
    return (x @ params["w"] + params["b"] - y) ** 2


def by_numpy(x, y, weights):
    """Returns the weighted mean of `squares` over all rows, and its gradient; zero if all weights are 0."""
    x, y, weights = (np.float64(value) for value in (x, y, weights))
    error = x @ np.float64(START["w"]) + float(START["b"]) - y
    weights = np.ones(error.shape) * weights.reshape(weights.shape + (1,) * (error.ndim - weights.ndim))
    share = weights / max(weights.sum(), 1e-30)
    rows = tuple(range(error.ndim))
    return np.sum(share * error**2), {
        "w": np.sum((2 * share * error)[..., None] * x, axis=rows),
        "b": np.sum(2 * share * error),
    }


def data(replicas, rows, time, seed):
    rng = np.random.default_rng(seed)
    shape = (replicas, rows, *time)
    return np.float32(rng.normal(size=(*shape, 3))), np.float32(rng.normal(size=shape))


def both(strategy, x, y, weights=None, **options):
    """Returns the mean of the replicas' shares of value and gradient."""

    def fn(params, x, y, weights):
        shares = jdist.value_and_grad(squares, weights=weights, **options)(params, x, y)
        return jdist.all_reduce("mean", shares)

    return strategy.run(fn, (START, *(None if v is None else jdist.PerReplica(v) for v in (x, y, weights))))


def assert_close(result, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), result, expected)


def flat(value):
    """Returns the rows of all replicas as one batch."""
    return value.reshape(-1, *value.shape[2:])


@st.composite
def cases(draw):
    """Draws replicas, micro-batches, x, y and weights: none, per example or per token, some of them zero."""
    replicas, parts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = parts * draw(st.integers(1, 3))
    time = draw(st.sampled_from([(), (2,), (3, 1)]))
    x, y = data(replicas, rows, time, draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["none", "examples", "tokens", "one_replica", "zero"]))
    if kind == "none":
        return replicas, parts, x, y, None
    shape = y.shape if kind == "tokens" else y.shape[:2]
    weights = np.float32(draw(st.lists(st.sampled_from([0, 0, 1, 2.5]), min_size=1, max_size=7)))
    weights = np.resize(weights, shape)
    if kind == "one_replica":
        weights[-1] = 0
    if kind == "zero":
        weights[:] = 0
    return replicas, parts, x, y, weights


@few
@hypothesis.given(cases())
def test_gradients_equal_the_gradients_of_the_weighted_mean_on_one_device(case):
    replicas, parts, x, y, weights = case
    result = both(mirrored(replicas), x, y, weights, micro_batches=parts)
    expected = by_numpy(flat(x), flat(y), np.ones(flat(y).shape[:1]) if weights is None else flat(weights))
    assert_close(result, expected)


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.float16])
def test_weights_may_have_any_real_dtype(two, dtype):
    x, y = data(2, 4, (), 0)
    weights = np.array([[1, 0, 1, 1], [0, 0, 1, 0]])
    assert_close(both(two, x, y, weights.astype(dtype), micro_batches=2), by_numpy(flat(x), flat(y), flat(weights)))


@pytest.mark.parametrize("parts", [1, 2])
def test_padding_with_nan_losses_has_no_effect_on_the_value(two, parts):
    x, y = data(2, 4, (), 0)
    weights = np.float32([[1, 1, 1, 0], [1, 0, 0, 0]])
    expected = by_numpy(flat(x), flat(y), flat(weights))
    value, _ = both(two, x, np.where(weights == 0, np.nan, y), weights, micro_batches=parts)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)


@pytest.mark.parametrize("parts", [1, 3])
def test_one_loss_for_all_rows_is_averaged_over_replicas_and_micro_batches(parts):
    x, y = data(2, 6, (), 0)
    mean = lambda params, x, y: jnp.mean(squares(params, x, y))

    def fn(params, x, y):
        return jdist.all_reduce("mean", jdist.value_and_grad(mean, micro_batches=parts)(params, x, y))

    result = mirrored(2).run(fn, (START, jdist.PerReplica(x), jdist.PerReplica(y)))
    assert_close(result, by_numpy(flat(x), flat(y), np.ones(12)))


@pytest.mark.parametrize("parts", [1, 2])
def test_share_of_a_replica_depends_only_on_itself_without_weights(two, parts):
    x, y = data(2, 4, (), 0)
    fn = lambda params, x, y: jdist.value_and_grad(squares, micro_batches=parts)(params, x, y)
    shares = two.run(fn, (START, jdist.PerReplica(x), jdist.PerReplica(y)))
    for number, share in enumerate(two.local_results(shares)):
        assert_close(share, by_numpy(x[number], y[number], np.ones(4)))


def test_aux_is_returned_and_stacked_with_micro_batches():
    x, y = data(1, 6, (), 0)

    def losses(params, x, y):
        error = squares(params, x, y)
        return error, {"error": error, "rows": x.shape[0], "text": None}

    params = jax.tree.map(jnp.asarray, START)
    (value, aux), grads = jdist.value_and_grad(losses, has_aux=True)(params, x[0], y[0])
    assert_close((value, grads), by_numpy(x[0], y[0], np.ones(6)))
    np.testing.assert_allclose(aux["error"], squares(params, x[0], y[0]), rtol=1e-5)
    assert (aux["rows"], aux["text"]) == (6, None)
    (value, parted), grads = jdist.value_and_grad(losses, has_aux=True, micro_batches=3)(params, x[0], y[0])
    assert_close((value, grads), by_numpy(x[0], y[0], np.ones(6)))
    np.testing.assert_allclose(parted["error"].reshape(-1), aux["error"], rtol=1e-5)
    assert parted["error"].shape == (3, 2)
    assert parted["rows"].tolist() == [2, 2, 2]


def test_batch_may_be_a_tree_and_any_number_of_arguments():
    x, y = data(1, 4, (), 0)
    losses = lambda params, batch, *more: squares(params, batch["x"], batch["y"]) + more[0] - more[1]["z"]
    zeros = np.zeros(4, np.float32)
    result = jdist.value_and_grad(losses, micro_batches=2)(START, {"x": x[0], "y": y[0]}, zeros, {"z": zeros})
    assert_close(result, by_numpy(x[0], y[0], np.ones(4)))


@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_keep_the_dtypes_of_the_parameters(parts):
    params = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.float32(0)}
    x, y = data(1, 4, (), 0)
    value, grads = jdist.value_and_grad(squares, micro_batches=parts)(params, x[0], y[0])
    assert {name: str(g.dtype) for name, g in grads.items()} == {"w": "bfloat16", "b": "float32"}
    assert value.dtype == jnp.float32


def test_micro_batches_of_few_bits_are_accumulated_in_float32():
    """300 gradients of 0.01 in bfloat16: their sum in bfloat16 would be a third of the true sum."""
    x = jnp.full((300, 1), 0.01, jnp.bfloat16)
    _, grad = jdist.value_and_grad(lambda w, x: x[:, 0] * w, micro_batches=300)(jnp.bfloat16(1), x)
    assert grad == jnp.bfloat16(0.01)


def test_value_and_grad_in_scan_in_a_replica_function(two):
    x, y = data(2, 4, (), 0)

    def fn(params, x, y):
        def descend(params, _):
            value, grads = jdist.value_and_grad(squares, micro_batches=2, weights=jnp.ones(4))(params, x, y)
            grads = jdist.all_reduce("mean", grads)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jdist.all_reduce("mean", value)

        return jax.lax.scan(descend, jax.tree.map(jnp.asarray, params), None, length=3)

    params, values = two.run(fn, (START, jdist.PerReplica(x), jdist.PerReplica(y)))
    w, b = np.float64(START["w"]), float(START["b"])
    for value in values:
        error = flat(x) @ w + b - flat(y)
        np.testing.assert_allclose(value, np.mean(error**2), rtol=1e-4)
        w, b = w - 0.2 * np.mean(error[:, None] * flat(x), 0), b - 0.2 * error.mean()
    assert_close(params, {"w": w, "b": b})


def test_outside_any_strategy_and_in_jit_it_equals_jax():
    x, y = data(1, 4, (), 0)
    params = jax.tree.map(jnp.asarray, START)
    expected = jax.value_and_grad(lambda p: jnp.mean(squares(p, x[0], y[0])))(params)
    assert_close(jax.jit(jdist.value_and_grad(squares, micro_batches=2))(params, x[0], y[0]), expected)


# --- cost


def compiled(strategy, fn, *args):
    step = strategy.step(lambda state, *args: (state, fn(state, *args)))
    return step.lower(strategy.put(jax.tree.map(jnp.asarray, args[0])), *map(strategy.put, args[1:])).compile()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_only_collective_is_one_all_reduce_of_the_weights(two, parts, weighted):
    x, y = data(2, 4, (), 0)
    weights = np.ones((2, 4), np.float32)

    def shares(params, x, y, w):
        return jdist.value_and_grad(squares, micro_batches=parts, weights=w if weighted else None)(params, x, y)

    text = compiled(two, shares, START, *map(jdist.PerReplica, (x, y, weights))).as_text()
    assert len(COLLECTIVE.findall(text)) == (1 if weighted else 0)


def test_micro_batches_need_the_memory_of_one():
    def deep(w, x):
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return x.mean(-1)

    w, x = np.eye(64, dtype=np.float32), np.ones((1, 4096, 64), np.float32)
    sizes = {
        parts: compiled(
            mirrored(1), lambda w, x, n=parts: jdist.value_and_grad(deep, micro_batches=n)(w, x), w, jdist.PerReplica(x)
        )
        .memory_analysis()
        .temp_size_in_bytes
        for parts in (1, 8)
    }
    assert sizes[8] < sizes[1] / 4


@pytest.mark.parametrize("parts", [1, 4])
def test_loss_function_is_traced_a_few_times_however_many_micro_batches(parts):
    traced = []

    def losses(params, x, y):
        traced.append(x.shape)
        return squares(params, x, y)

    x, y = data(1, 8, (), 0)
    jax.jit(jdist.value_and_grad(losses, micro_batches=parts))(START, x[0], y[0])
    assert len(traced) <= 3
    assert set(traced) == {(8 // parts, 3)}


# --- errors


@pytest.mark.parametrize("parts", [0, -1, 2.0, True, None, "2"])
def test_invalid_number_of_micro_batches_is_refused(parts):
    with pytest.raises(
        (TypeError, ValueError), match=rf"`micro_batches` must be an integer >= 1, got {re.escape(repr(parts))}"
    ):
        jdist.value_and_grad(squares, micro_batches=parts)


@pytest.mark.parametrize(
    "batch, weights, message",
    [
        (
            (np.ones((4, 3)), np.ones(4)),
            None,
            r"x is float64\[4,3\], with 4 examples, and cannot be split into 3 micro-batches",
        ),
        ((np.ones((6, 3)), np.ones(4)), None, r"y is float64\[4\], with 4 examples, and cannot be split into 3"),
        ((np.ones((6, 3)), np.float32(1)), None, r"y is float32\[\], with no examples, and cannot be split into 3"),
        ((np.ones((6, 3)), 1.0), None, r"y is 1\.0, with no examples, and cannot be split into 3"),
        ((np.ones((6, 3)), {"key": jax.random.key(0)}), None, r"y\['key'\] is key<fry>\[\], with no examples"),
        (
            (np.ones((6, 3)), np.ones(6)),
            np.ones(4),
            r"weights is float64\[4\], with 4 examples, and cannot be split into 3",
        ),
        (
            (np.ones((6, 3)), np.ones(6)),
            np.float32(1),
            r"weights is float32\[\], with no examples, and cannot be split into 3",
        ),
    ],
)
def test_batch_that_cannot_be_split_is_refused_by_name_with_its_number_of_examples(batch, weights, message):
    with pytest.raises(ValueError, match=message):
        jdist.value_and_grad(squares, micro_batches=3, weights=weights)(START, *batch)


@pytest.mark.parametrize("parts", [1, 2])
def test_arrays_of_different_numbers_of_rows_are_refused_or_an_error_of_the_loss(parts):
    with pytest.raises((ValueError, TypeError), match=r"\[6\]|\(6,\)|\(3,\)"):
        jdist.value_and_grad(squares, micro_batches=parts)(START, np.ones((4, 3), np.float32), np.ones(6, np.float32))


@pytest.mark.filterwarnings("default:size requires ndarray:DeprecationWarning")  # the default in a user's program
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "losses, message",
    [
        (lambda params, x, y: y > 0, r"losses"),
        (lambda params, x, y: None, r"losses"),
        (lambda params, x, y: {"a": y, "b": y}, r"losses|loss function"),
        (lambda params, x, y: (squares(params, x, y), y), r"has_aux"),
        (lambda params, x, y: (squares(params, x, y).mean(), x.mean()), r"has_aux"),
        (lambda params, x, y: [squares(params, x, y), y], r"losses|loss function"),
        (lambda params, x, y: "text", r"losses"),
    ],
    ids=["booleans", "none", "dict", "pair", "pair_of_numbers", "list", "text"],
)
def test_losses_that_are_not_numbers_are_refused(parts, losses, message):
    x, y = data(1, 4, (), 0)
    with pytest.raises((TypeError, ValueError), match=message):
        jdist.value_and_grad(losses, micro_batches=parts)(START, x[0], y[0])


@pytest.mark.parametrize(
    "parts, shape, time, message",
    [
        (1, (6,), (), "weights float32[6] do not match losses float32[4]"),
        (2, (6,), (), "weights float32[3] do not match losses float32[2]"),
        (1, (4, 3), (), "weights float32[4,3] do not match losses float32[4]"),
        (2, (4, 3), (), "weights float32[2,3] do not match losses float32[2]"),
        (1, (4, 3), (2,), "weights float32[4,3] do not match losses float32[4,2]"),
        (1, (4,), None, "weights float32[4] do not match losses float32[]"),
    ],
)
def test_weights_that_do_not_fit_the_losses_are_refused(parts, shape, time, message):
    x, y = data(1, 4, time or (), 0)
    losses = squares if time is not None else lambda params, x, y: squares(params, x, y).mean()
    with pytest.raises(ValueError, match=re.escape(message)):
        jdist.value_and_grad(losses, weights=np.ones(shape, np.float32), micro_batches=parts)(START, x[0], y[0])


@pytest.mark.parametrize("parts", [1, 2])
def test_has_aux_without_a_pair_is_refused(parts):
    x, y = data(1, 4, (), 0)
    with pytest.raises(TypeError, match=r"With `has_aux` .* pair `\(losses, aux\)`, and it returned"):
        jdist.value_and_grad(squares, has_aux=True, micro_batches=parts)(START, x[0], y[0])


def test_wrapped_values_are_refused(two):
    x, y = data(2, 4, (), 0)
    with pytest.raises(TypeError, match="PerReplica"):
        jdist.value_and_grad(squares)(START, two.put(jdist.PerReplica(x)), y)


def test_call_by_the_host_program_within_a_scope_is_refused(two):
    x, y = data(1, 4, (), 0)
    for name in ("value_and_grad", "global_loss"):
        message = rf"`jdist\.{name}` can only be called inside a function run by"
        with two.scope(), pytest.raises(RuntimeError, match=message):
            getattr(jdist, name)(squares)(START, x[0], y[0])


# -- global_loss -------------------------------------------------------------------------------------------------------

ROWS = 48
INPUTS = np.random.default_rng(5).normal(size=(ROWS, 3)).astype(np.float32)
TARGETS = np.random.default_rng(6).normal(size=ROWS).astype(np.float32)
ROW_WEIGHTS = np.tile(np.float32([1, 0, 0.5, 2]), ROWS // 4) * (np.arange(ROWS) >= ROWS // 2)  # some replicas have none
WEIGHT, DIRECTION = np.float32([0.1, 0.2, 0.3]), np.float32([1, -1, 0.5])


def tanh_losses(w, x, y):
    return jnp.tanh(x @ w["w"] - y) ** 2


def derivatives(loss):
    """Returns value, gradient, forward derivative, and the product of the Hessian with a vector in both orders."""
    params, direction = {"w": jnp.asarray(WEIGHT), "n": 3}, {"w": jnp.asarray(DIRECTION), "n": 3}
    of_w = lambda w: loss({**params, "w": w})
    w, v = params["w"], direction["w"]
    forward_over_reverse = jax.jvp(jax.grad(of_w), (w,), (v,))[1]
    reverse_over_reverse = jax.grad(lambda w: jnp.vdot(jax.grad(of_w)(w), v))(w)
    return of_w(w), jax.grad(of_w)(w), jax.jvp(of_w, (w,), (v,))[1], forward_over_reverse, reverse_over_reverse


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_global_loss_and_its_derivatives_are_those_of_one_device(strategy, weighted, micro_batches):
    def of_replica(x, y, weights):
        options = {"weights": weights if weighted else None, "micro_batches": micro_batches}
        loss = jdist.global_loss(tanh_losses, **options)
        return derivatives(lambda params: loss(params, x, y))

    results = strategy.run(of_replica, tuple(strategy.split(array) for array in (INPUTS, TARGETS, ROW_WEIGHTS)))
    weights = ROW_WEIGHTS if weighted else None
    expected = derivatives(lambda params: jnp.average(tanh_losses(params, INPUTS, TARGETS), weights=weights))
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=2e-5, atol=1e-6)


def test_global_loss_is_minimized_in_a_while_loop_of_virtual_replicas():
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4)

    def minimize(x, y):
        loss = jdist.global_loss(tanh_losses)
        value, grad = jax.value_and_grad(lambda w: loss({"w": w}, x, y))(jnp.asarray(WEIGHT))
        search = lambda rate: jax.lax.while_loop(
            lambda carry: carry[1] > value - 0.1 * carry[0] * jnp.vdot(grad, grad),
            lambda carry: (carry[0] / 2, loss({"w": WEIGHT - carry[0] / 2 * grad}, x, y)),
            (rate, loss({"w": WEIGHT - rate * grad}, x, y)),
        )
        return search(jnp.float32(64.0))

    rate, value = strategy.run(minimize, (strategy.split(INPUTS), strategy.split(TARGETS)))
    expected = lambda w: jnp.mean(tanh_losses({"w": w}, INPUTS, TARGETS))
    grad = jax.grad(expected)(WEIGHT)
    np.testing.assert_allclose(value, expected(WEIGHT - rate * grad), rtol=1e-5)
    assert value < expected(WEIGHT)


@pytest.mark.filterwarnings("ignore::jdist.LocalCountWarning")
def test_global_loss_ignores_nan_of_a_replica_with_only_padding(two):
    def of_replica(x, weights):
        losses = lambda w, x: (w * x).sum(1) / weights.sum()
        return jax.value_and_grad(jdist.global_loss(losses, weights=weights))(jnp.ones(3), x)

    weights = np.float32([1, 1, 0, 0])
    value, grad = two.run(of_replica, (two.split(INPUTS[:4]), two.split(weights)))
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_remat_that_is_not_a_policy_raises():
    for function in (jdist.value_and_grad, jdist.global_loss):
        with pytest.raises(TypeError, match="`remat` must be a boolean or a policy of `jax.checkpoint_policies`"):
            function(tanh_losses, remat="dots")
