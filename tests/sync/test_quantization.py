"""Gradients in fewer bits: errors of the result, collectives, and error messages."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import sync

from laws import STRATEGIES, rows
from policies import compiled, once, sent

few = hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)


# --- in another dtype


@pytest.mark.parametrize("place", ["one_device", "mirrored_2", "mirrored_3"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_in_dtype_equals_mean_up_to_rounding(dtype, place):
    strategy = STRATEGIES[place]()
    grads = rows(strategy, 50, 7)
    _, results = once(strategy, sync.in_dtype(dtype), grads)
    most = np.abs(grads.tree).mean(0)
    # Each number is rounded, and each partial sum may be.
    off = strategy.num_replicas_in_sync * float(jnp.finfo(dtype).eps) * most + 1e-7
    assert (np.abs(np.asarray(results) - np.mean(grads.tree, 0)) <= off).all()
    assert results.dtype == jnp.float32


def test_in_dtype_does_not_round_leaves_of_lower_precision(two):
    tx = sync.in_dtype(jnp.bfloat16)
    state = tx.init({"low": jnp.ones(3, jnp.bfloat16), "high": jnp.ones(3)})
    assert [leaf.dtype for leaf in jax.tree.leaves(state.residual)] == [jnp.float32]
    assert isinstance(state.residual["low"], optax.MaskedNode)


def test_in_dtype_sends_no_float32(two):
    tx = sync.in_dtype(jnp.bfloat16)
    program = []

    def update(grads):
        program.append(str(jax.make_jaxpr(lambda g: tx.update(g, tx.init(g), None)[0])(grads)))
        return ()

    two.run(update, (rows(two, 64),))
    assert re.findall(r":(\w+)\[64\] = psum", program[0]) == ["bf16"]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.bool_, jnp.complex64, "nonsense", None, 3, "int8"])
def test_in_dtype_of_a_dtype_that_is_not_a_float_is_refused(dtype):
    got = dtype.dtype.name if hasattr(dtype, "dtype") else repr(dtype)
    with pytest.raises(TypeError, match=rf"`jdist\.sync\.in_dtype` is a floating-point dtype, such as .*, got .*{got}"):
        sync.in_dtype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", np.float16, np.dtype("float16")])
def test_in_dtype_accepts_the_names_of_dtypes(dtype, two):
    _, results = once(two, sync.in_dtype(dtype), rows(two, 20))
    assert results.dtype == jnp.float32


# --- in 8 bits


@functools.cache
def _int8_on_one_replica(block_size):
    tx = sync.int8(block_size=block_size)
    return jax.jit(lambda grads: tx.update(grads, tx.init(grads)))


@few
@hypothesis.given(
    seed=st.integers(0, 99),
    size=st.sampled_from([16, 37, 200]),
    block=st.sampled_from([5, 16]),
    power=st.sampled_from([-12, 0, 12]),
)
def test_int8_on_one_replica_has_an_error_of_half_a_quantization_step(seed, size, block, power):
    grads = jnp.float32(10.0**power * np.random.default_rng(seed).normal(size=size))
    results, state = _int8_on_one_replica(block)(grads)
    filled = np.pad(np.abs(grads), (0, -size % block)).reshape(-1, block)
    step = np.repeat(filled.max(1) / 127, block)[:size]
    # The sum is quantized once more before it is sent back.
    assert (np.abs(results - grads) <= (0.5 + 0.5 + 1e-3) * step + 1e-30).all()
    np.testing.assert_allclose(results + state.residual, grads, rtol=1e-5, atol=1e-5 * 10.0**power)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("place", ["one_device", "mirrored_2", "mirrored_3"])
def test_int8_equals_mean_up_to_the_quantization_steps(place, rounding):
    strategy = STRATEGIES[place]()
    grads = rows(strategy, 50, 7)
    _, results = once(strategy, sync.int8(rounding=rounding, block_size=32), grads)
    off = 2 * np.abs(grads.tree).max() / 127 * (1 if rounding == "stochastic" else 0.5) + 1e-6
    assert (np.abs(np.asarray(results) - np.mean(grads.tree, 0)) <= off).all()
    assert not np.array_equal(results, np.mean(grads.tree, 0))


def test_int8_of_integers_up_to_127_is_exact(two):
    grads = np.float32([[127, -3, 0, 5] * 8, [127, 3, 0, 5] * 8])
    _, results = once(two, sync.int8(block_size=4), two.put(jdist.PerReplica(grads)))
    np.testing.assert_array_equal(results, np.float32([127, 0, 0, 5] * 8))


def test_int8_of_zeros_is_zeros(two):
    state, results = once(two, sync.int8(block_size=4), two.put(jdist.PerReplica(np.zeros((2, 10), np.float32))))
    assert not np.any(results)
    assert not np.any(state.residual.read())


@pytest.mark.parametrize("value", [1e-45, 1e-40, 1e-37, 1e37, 1e38])
def test_int8_at_the_ends_of_float32_is_finite(value, two):
    grads = np.full((2, 10), value, np.float32)
    state, results = once(two, sync.int8(block_size=4), two.put(jdist.PerReplica(grads)))
    assert np.isfinite(results).all()
    assert np.isfinite(state.residual.read()).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size, block_size", [(64, 16), (1 << 15, 512)])  # XLA drops NaN in the maximum of large arrays
def test_int8_of_a_non_finite_gradient_stays_non_finite(bad, size, block_size, two):
    grads = np.ones((2, size), np.float32)
    grads[1, 5] = bad
    _, results = once(two, sync.int8(block_size=block_size), two.put(jdist.PerReplica(grads)))
    assert not np.isfinite(results[5])
    assert np.isfinite(results[block_size:]).all()  # other blocks are independent of it


@pytest.mark.slow
def test_stochastic_rounding_is_correct_on_average_and_differs_between_steps(two):
    tx = sync.int8(rounding="stochastic", block_size=64)
    grads = rows(two, 64)
    zeros = jnp.zeros(64)
    update = two.step(lambda state, grads: tx.update(grads, state, zeros)[::-1])
    results = []
    for seed in range(20):
        tx = sync.int8(rounding="stochastic", block_size=64, seed=seed)
        state = two.init(lambda: tx.init(zeros))  # noqa: B023
        results.append(np.asarray(update(state, grads)[1]))
    exact, step = np.mean(grads.tree, 0), np.abs(grads.tree).max() / 127
    assert len({one.tobytes() for one in results}) == 20
    assert (np.abs(np.mean(results, 0) - exact) < 5 * step / np.sqrt(20)).all()


def test_stochastic_rounding_of_equal_gradients_differs_between_replicas(two):
    grads = np.tile(np.random.default_rng(0).normal(size=256).astype(np.float32), (2, 1))
    state, _ = once(two, sync.int8(rounding="stochastic", block_size=64), two.put(jdist.PerReplica(grads)))
    own, other = map(np.asarray, state.residual.values)
    assert not np.array_equal(own[128:], other[128:])
    assert not np.array_equal(own[:128], other[:128])


@pytest.mark.parametrize("place", ["mirrored_2", "mirrored_3"])
def test_int8_sends_8_bits_and_no_floats(place):
    text = compiled(STRATEGIES[place](), sync.int8(), [(40, 50), (512,)])
    assert set(sent(text, "all-to-all")) == {"s8"}
    assert set(sent(text, "all-gather")) == {"s8"}
    assert not sent(text, "all-reduce")
    assert not sent(text, "reduce-scatter")


def test_int8_reduces_small_leaves_by_the_fallback(two):
    text = compiled(two, sync.int8(), [(40, 50), (3,)])
    assert sent(text, "all-reduce") == ["f32"]
    assert set(sent(text, "all-gather")) == {"s8"}


@pytest.mark.parametrize("rounding", ["up", None, "Nearest", 1])
def test_int8_with_an_unknown_rounding_is_refused(rounding):
    with pytest.raises(ValueError, match=rf"`rounding` .* 'nearest' or 'stochastic', got {rounding!r}"):
        sync.int8(rounding=rounding)


@pytest.mark.parametrize("size", [0, -1, 2.5, "16", None, True])
def test_int8_with_a_block_size_that_is_not_a_positive_integer_is_refused(size):
    error = ValueError if size in (0, -1) else TypeError
    with pytest.raises(error, match=rf"`block_size` of `jdist\.sync\.int8` must be an integer >= 1, got {size!r}"):
        sync.int8(block_size=size)
