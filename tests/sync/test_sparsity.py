"""Top-k sparsification: the sent entries, collectives, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import sync

from laws import STRATEGIES
from policies import compiled, once, sent

GRADS = np.float32([[1, -5, 2, 0.5], [3, -1, 4, 0.25]])


def put(strategy, grads):
    return strategy.put(jdist.PerReplica(np.asarray(grads)))


def test_top_k_returns_the_mean_of_the_largest_entries_of_each_replica_and_stores_the_others(two):
    state, results = once(two, sync.top_k(0.25), put(two, GRADS))
    np.testing.assert_array_equal(results, [0, -2.5, 2, 0])
    np.testing.assert_array_equal(state.residual.values[0], [0.5, 0, 1, 0.25])
    np.testing.assert_array_equal(state.residual.values[1], [1.5, -0.5, 0, 0.125])


def test_top_k_sums_entries_that_both_replicas_send(two):
    _, results = once(two, sync.top_k(0.25), put(two, np.float32([[1, 8, 0, 0], [1, 4, 0, 0]])))
    np.testing.assert_array_equal(results, [0, 6, 0, 0])


@pytest.mark.parametrize(
    "fraction, count", [(1e-9, 1), (0.01, 1), (0.25, 5), (0.26, 6), (0.99, 20), (1, 20), (1.0, 20)]
)
def test_top_k_sends_its_fraction_of_each_leaf_rounded_up(fraction, count):
    grads = {"w": jnp.arange(1.0, 21.0)}
    tx = sync.top_k(fraction)
    results, _ = tx.update(grads, tx.init(grads))
    assert np.count_nonzero(results["w"]) == count
    np.testing.assert_array_equal(results["w"][20 - count :], grads["w"][20 - count :])


def test_top_k_selects_entries_per_leaf():
    grads = {"large": 100.0 * jnp.arange(1.0, 11.0), "small": 0.01 * jnp.arange(1.0, 11.0)}
    tx = sync.top_k(0.1)
    results, _ = tx.update(grads, tx.init(grads))
    assert jax.tree.map(np.count_nonzero, results) == {"large": 1, "small": 1}


def test_unsent_entry_is_sent_once_it_is_large_enough():
    grads = jnp.float32([1.0, 0.4, 0.0, 0.0])
    tx = sync.top_k(0.25)
    state, sent_at = tx.init(grads), []
    for step in range(3):
        results, state = tx.update(grads, state)
        if results[1]:
            sent_at.append((step, float(results[1])))
    assert [step for step, _ in sent_at] == [2]
    assert sent_at[0][1] == pytest.approx(1.2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_top_k_of_a_non_finite_gradient_stays_non_finite(bad, two):
    grads = np.ones((2, 64), np.float32)
    grads[1, 5] = bad
    _, results = once(two, sync.top_k(0.1), put(two, grads))
    assert not np.isfinite(results[5])


@pytest.mark.parametrize("place", ["mirrored_2", "mirrored_3"])
def test_top_k_uses_a_single_all_gather(place):
    text = compiled(STRATEGIES[place](), sync.top_k(0.01), [(40, 50), (512,)])
    assert sent(text, "all-gather") == ["s32"]
    assert not [word for word in ("all-reduce", "all-to-all", "reduce-scatter") if sent(text, word)]


@pytest.mark.parametrize("fraction", [0, 0.0, 1.5, -0.1, float("nan"), float("inf"), 2, True, "half", None, [0.1], 1j])
def test_top_k_of_a_fraction_that_is_not_in_its_range_is_refused(fraction):
    is_number = type(fraction) in (int, float)
    error, message = (ValueError, r"in \(0, 1\], got ") if is_number else (TypeError, "a number.*, got ")
    with pytest.raises(error, match=rf"`fraction` of `jdist\.sync\.top_k` must be {message}"):
        sync.top_k(fraction)


@pytest.mark.parametrize("fraction", [np.float32(0.5), np.float64(0.5), np.array(1)[()]])
def test_top_k_accepts_numpy_numbers(fraction):
    grads = jnp.arange(1.0, 5.0)
    tx = sync.top_k(fraction)
    assert np.count_nonzero(tx.update(grads, tx.init(grads))[0]) == (4 if fraction == 1 else 2)
