"""Dynamic loss scaling for float16, with the same scale on all replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import sync

FLOAT16 = jdist.Precision(compute_dtype=jnp.float16)


def make_state(strategy, tx, *shape, start=0.0):
    return strategy.init(lambda: (w := jnp.full(shape, start, jnp.float32), tx.init(w)))


def make_step(strategy, tx, losses, precision=FLOAT16, **options):
    def step(state, *batch):
        w, opt_state = state
        value, grad = jdist.value_and_grad(losses, **options)(w, *batch)
        updates, opt_state = tx.update(grad, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), (value, grad)

    return strategy.step(step, precision=precision)


def reduced(optimizer=None):
    return optax.chain(sync.mean(), optimizer or optax.sgd(0.1))


def rows(strategy, *values):
    return strategy.put(jdist.PerReplica(np.float32(values)))


# --- growth and shrinkage


@pytest.mark.parametrize("initial, factor, interval", [(8.0, 2.0, 3), (1.0, 4.0, 1), (2.0**15, 1.5, 2)])
def test_scale_grows_and_shrinks_like_the_reference(two, initial, factor, interval):
    """Finite and non-finite steps, some non-finite on one replica only."""
    tx = sync.dynamic_loss_scale(reduced(), initial=initial, factor=factor, interval=interval)
    state = make_state(two, tx)

    @two.step
    def step(state, grad):
        w, opt_state = state
        updates, opt_state = tx.update(grad, opt_state, w)
        return (w + updates, opt_state), None

    scale, good, skipped = initial, 0, 0
    for number, bad in enumerate([0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]):
        grads = np.ones(2)
        if bad:
            grads[number % 2] = [np.nan, np.inf, -np.inf][number % 3]
            scale, good, skipped = max(scale / factor, 1), 0, skipped + 1
        else:
            good += 1
            if good == interval:
                scale, good = min(scale * factor, 2.0**24), 0
        before = float(state[0])
        state, _ = step(state, rows(two, *grads))
        now = state[1]
        np.testing.assert_allclose([now.scale, now.finite_steps, now.skipped], [scale, good, skipped], rtol=1e-6)
        assert (float(state[0]) == before) == bool(bad)


def test_scale_stays_finite_if_all_gradients_are_zero():
    tx = sync.dynamic_loss_scale(optax.sgd(0.1), interval=1, factor=1e6)
    state, scales = tx.init(jnp.float32(0)), []
    for _ in range(10):
        _, state = tx.update(jnp.float32(0), state)
        scales.append(float(state.scale))
    assert np.isfinite(scales).all()


def test_non_finite_step_leaves_the_state_bitwise_equal(two):
    tx = sync.dynamic_loss_scale(optax.chain(sync.int8(block_size=2), optax.adam(0.1)))
    state = make_state(two, tx, 4, start=1.0)
    step = make_step(two, tx, lambda w, x: (w * x).sum(-1), precision=None)
    state, _ = step(state, two.put(jdist.PerReplica(np.random.default_rng(0).normal(size=(2, 3, 4)).astype("f"))))
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state[0], state[1].opt_state))]
    x = np.ones((2, 3, 4), np.float32)
    x[1, 0, 2] = np.inf
    state, _ = step(state, two.put(jdist.PerReplica(x)))
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state[0], state[1].opt_state))] == before
    assert int(state[1].skipped) == 1


# --- with float16


def test_gradients_in_float16_equal_float32_up_to_rounding(two):
    rng = np.random.default_rng(0)
    x, y, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 8, 5), (2, 8), (2, 8)))
    losses = lambda p, x, y: (jnp.tanh(x @ p) - y) ** 2
    results = {}
    for precision in (FLOAT16, None):
        tx = sync.dynamic_loss_scale(reduced(), initial=2.0**10)
        state = make_state(two, tx, 5, start=0.3)
        step = make_step(two, tx, losses, precision, micro_batches=2)
        _, (value, grad) = step(state, *(two.put(jdist.PerReplica(v)) for v in (x, y)))
        results[precision] = value.tree, grad.tree
    for half, single in zip(*results.values(), strict=True):
        np.testing.assert_allclose(half, single, rtol=5e-3, atol=1e-3)
        assert np.asarray(half).tobytes() != np.asarray(single).tobytes()


@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_that_underflow_in_unscaled_float16_survive(two, parts):
    losses = lambda w, x, z: w * x * z
    small = np.full((2, 4), 1e-4, np.float32)
    alone = jax.grad(lambda w: losses(w, *jnp.float16(small[:, 0])))(jnp.float16(1))
    assert float(alone) == 0

    tx = sync.dynamic_loss_scale(reduced(optax.sgd(1.0)))
    state, step = make_state(two, tx, start=1.0), make_step(two, tx, losses, micro_batches=parts)
    _, (value, grad) = step(state, *(two.put(jdist.PerReplica(small)) for _ in range(2)))
    np.testing.assert_allclose([float(g) for g in grad.values], 1e-8, rtol=1e-2)
    assert all(np.isfinite(float(v)) for v in value.values)


def test_initial_scale_that_is_too_large_shrinks_and_training_continues(two):
    tx = sync.dynamic_loss_scale(reduced(optax.sgd(0.05)), initial=2.0**24, interval=50)
    state = make_state(two, tx, 3)
    step = make_step(two, tx, lambda w, x, y: (x @ w - y) ** 2)
    rng, scales = np.random.default_rng(0), []
    for _ in range(120):
        x = rng.normal(size=(2, 8, 3))
        batch = np.float32(x), np.float32(x @ [1, -2, 0.5])
        state, _ = step(state, *(two.put(jdist.PerReplica(v)) for v in batch))
        scales.append(float(state[1].scale))
    assert scales[0] == 2.0**23  # 2**24 / 8 overflows float16
    assert 5 < int(state[1].skipped) < 20
    assert min(scales) < scales[-1] or scales[-1] == scales[-2]
    np.testing.assert_allclose(state[0], [1, -2, 0.5], atol=0.02)


def test_overflow_on_one_replica_shrinks_the_scale_on_all(two):
    tx = sync.dynamic_loss_scale(reduced(), initial=2.0**8)
    state, step = make_state(two, tx, start=1.0), make_step(two, tx, lambda w, x: w * x * x)
    state, _ = step(state, rows(two, [1.0, 1.0], [200.0, 200.0]))  # 200**2 * 2**8 overflows float16
    assert (float(state[1].scale), int(state[1].skipped), float(state[0])) == (2.0**7, 1, 1.0)
    assert isinstance(state[1].scale, jax.Array)


def test_value_of_a_loss_is_not_scaled(two):
    tx = sync.dynamic_loss_scale(reduced(), initial=2.0**8)
    state, step = make_state(two, tx, start=1.0), make_step(two, tx, lambda w, x: w * x)
    _, (value, _) = step(state, rows(two, [1.0, 2.0], [3.0, 4.0]))
    assert [float(v) for v in value.values] == [1.5, 3.5]


def test_scale_is_found_at_any_depth_of_the_state(two):
    tx = optax.chain(optax.identity(), sync.every(sync.dynamic_loss_scale(reduced(optax.sgd(1.0)), initial=8.0), 2))
    state = two.init(lambda: {"deep": [(w := jnp.float32(1)), {"opt": tx.init(w)}]})

    @two.step(precision=FLOAT16)
    def step(state, x):
        w, opt = state["deep"][0], state["deep"][1]["opt"]
        _, grad = jdist.value_and_grad(lambda w, x: w * x)(w, x)
        updates, opt = tx.update(grad, opt, w)
        return {"deep": [w + updates, {"opt": opt}]}, None

    for x in ([[1.0], [2.0]], [[3.0], [4.0]]):
        state, _ = step(state, rows(two, *x))
    np.testing.assert_allclose(float(state["deep"][0]), 1 - 2.5, rtol=1e-3)


def test_scale_within_local_sgd_is_replicated(two):
    tx = sync.local_sgd(sync.dynamic_loss_scale(optax.sgd(0.1), initial=2.0**8), every=2)
    state, step = make_state(two, tx, start=1.0), make_step(two, tx, lambda w, x: w * x * x)
    state, _ = step(state, rows(two, [1.0, 1.0], [200.0, 200.0]))
    assert float(state[1].opt_state.scale) == 2.0**7
    assert [float(w) for w in state[0].values] == [1.0, 1.0]


def test_scale_without_a_precision_does_not_change_gradients(two):
    tx = sync.dynamic_loss_scale(reduced(), initial=2.0**8)
    state, step = make_state(two, tx, start=1.0), make_step(two, tx, lambda w, x: w * x, precision=None)
    _, (_, grad) = step(state, rows(two, [1.0, 2.0], [3.0, 4.0]))
    assert [float(g) for g in grad.values] == [1.5, 3.5]


def test_steps_trace_once_without_transfers(two):
    traced, tx = [], sync.dynamic_loss_scale(reduced())
    state = make_state(two, tx, start=1.0)
    step = make_step(two, tx, lambda w, x: traced.append(x) or w * x)
    data = [rows(two, [1.0, 2.0], [3.0, 4.0]) for _ in range(4)]
    state, _ = step(state, data[0])
    first = len(traced)
    with jax.transfer_guard("disallow"):
        for x in data[1:]:
            state, _ = step(state, x)
    assert len(traced) == first


# --- errors


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(initial=0.0), ValueError, r"`initial` .* between 1 and 2\*\*24, got 0\.0"),
        (dict(initial=-1), ValueError, r"`initial` .* got -1"),
        (dict(initial=float("inf")), ValueError, r"`initial` .* got inf"),
        (dict(initial=float("nan")), ValueError, r"`initial` .* got nan"),
        (dict(initial="big"), TypeError, r"`initial` .*'big'"),
        (dict(factor=1.0), ValueError, r"`factor` .* greater than 1, got 1\.0"),
        (dict(factor=float("nan")), ValueError, r"`factor` .* greater than 1, got nan"),
        (dict(factor=None), TypeError, r"`factor` .*None"),
        (dict(interval=0), ValueError, r"`interval` .* >= 1, got 0"),
        (dict(interval=1.5), TypeError, r"`interval` .* integer >= 1, got 1\.5"),
        (dict(interval=True), TypeError, r"`interval` .* got True"),
    ],
)
def test_number_out_of_range_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        sync.dynamic_loss_scale(optax.sgd(0.1), **options)


def test_optimizer_that_is_not_a_transformation_is_refused():
    with pytest.raises(
        TypeError,
        match=r"`optimizer` of `jdist\.sync\.dynamic_loss_scale` must be an optax gradient transformation.*Call it",
    ):
        sync.dynamic_loss_scale(optax.sgd)
