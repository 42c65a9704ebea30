"""PowerSGD: exactness for low rank, collectives, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import sync

from laws import STRATEGIES
from policies import compiled, once, sent


def of_rank(rank, replicas, shape, seed=0):
    """Returns gradients `[replica, *shape]` whose mean has the given rank, with the same columns on all replicas."""
    draw = np.random.default_rng(seed).normal
    left, right = draw(size=(replicas, shape[0], rank)), draw(size=(rank, shape[1]))
    return np.float32(left @ right)


@pytest.mark.parametrize("place", ["one_device", "mirrored_2", "mirrored_3"])
def test_gradient_of_the_policy_rank_is_exact_without_a_residual(place):
    strategy = STRATEGIES[place]()
    grads = of_rank(2, strategy.num_replicas_in_sync, (20, 30))
    state, results = once(strategy, sync.power_sgd(2), strategy.put(jdist.PerReplica(grads)))
    np.testing.assert_allclose(results, grads.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state.residual.read(), 0, atol=1e-4)


def test_gradient_of_higher_rank_is_approximated_with_the_policy_rank(two):
    grads = np.random.default_rng(0).normal(size=(2, 20, 30)).astype(np.float32)
    state, results = once(two, sync.power_sgd(3), two.put(jdist.PerReplica(grads)))
    assert np.linalg.matrix_rank(np.asarray(results), tol=1e-4) == 3
    np.testing.assert_allclose(results + state.residual.read(), grads.mean(0), rtol=1e-4, atol=1e-5)


def test_power_iteration_continues_from_the_last_step():
    grads = jnp.asarray(np.random.default_rng(0).normal(size=(20, 30)) * np.linspace(1, 5, 30), jnp.float32)
    tx = sync.power_sgd(2)
    state, off = tx.init(grads), []
    for _ in range(8):
        state = state._replace(residual=jnp.zeros_like(grads))
        results, state = tx.update(grads, state)
        off.append(float(jnp.linalg.norm(results - grads)))
    best = np.linalg.norm(np.linalg.svd(np.asarray(grads), compute_uv=False)[2:])
    assert off[-1] < off[0]
    assert off[-1] == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("shape", [(3, 3, 8, 16), (2, 40, 20), (100, 6)])
def test_leaf_of_any_ndim_is_a_matrix_of_its_last_dimension(shape, two):
    grads = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    state, results = once(two, sync.power_sgd(1), two.put(jdist.PerReplica(grads)))
    assert results.shape == shape
    assert np.linalg.matrix_rank(np.asarray(results).reshape(-1, shape[-1]), tol=1e-4) == 1
    np.testing.assert_allclose(results + state.residual.read(), grads.mean(0), rtol=1e-4, atol=1e-4)


def test_leaf_that_would_not_become_smaller_is_reduced_by_the_fallback(two):
    tx = sync.power_sgd(3)
    state = tx.init({"w": jnp.ones((20, 30)), "small": jnp.ones((5, 6)), "b": jnp.ones(900), "one": jnp.ones(())})
    kept = {name for name, leaf in state.residual.items() if not isinstance(leaf, optax.MaskedNode)}
    assert kept == {"w"}


def test_zero_gradient_is_zero_and_the_next_one_is_reduced(two):
    tx, like = sync.power_sgd(2), jnp.zeros((20, 30))
    state = two.init(lambda: tx.init(like))
    update = two.step(lambda state, grads: tx.update(grads, state, like)[::-1])
    state, results = update(state, two.put(jdist.PerReplica(np.zeros((2, 20, 30), np.float32))))
    assert not np.any(results)
    grads = of_rank(2, 2, (20, 30))
    rows = two.put(jdist.PerReplica(grads))
    for _ in range(3):
        state, results = update(state, rows)
    assert np.linalg.norm(results) > 0.5 * np.linalg.norm(grads.mean(0))


def test_non_finite_gradient_stays_non_finite(two):
    grads = np.ones((2, 20, 30), np.float32)
    grads[1, 5, 5] = np.nan
    _, results = once(two, sync.power_sgd(2), two.put(jdist.PerReplica(grads)))
    assert np.isnan(results).any()


@pytest.mark.parametrize("place", ["mirrored_2", "mirrored_3"])
def test_low_rank_sends_two_all_reduces_of_its_columns(place):
    text = compiled(STRATEGIES[place](), sync.power_sgd(2), [(40, 50), (30, 60)])
    assert sent(text, "all-reduce") == ["f32", "f32"]
    assert not [word for word in ("all-gather", "all-to-all", "reduce-scatter") if sent(text, word)]


@pytest.mark.parametrize("rank", [0, -1, 2.5, 2.0, "2", None, True])
def test_rank_that_is_not_a_positive_integer_is_refused(rank):
    error = ValueError if type(rank) is int else TypeError
    with pytest.raises(error, match=rf"`rank` of `jdist\.sync\.power_sgd` must be an integer >= 1, got {rank!r}"):
        sync.power_sgd(rank)


def test_rank_larger_than_every_matrix_is_refused_by_name(two):
    params = {"w": jnp.ones((4, 6)), "b": jnp.ones(100)}
    says = r"power_sgd\(rank=5\).*larger than every matrix .*params\['w'\] float32\[4,6\].*at most 4\."
    for make in (lambda: sync.power_sgd(5).init(params), lambda: two.init(lambda: sync.power_sgd(5).init(params))):
        with pytest.raises(ValueError, match=says):
            make()


def test_rank_larger_than_some_matrices_is_accepted():
    sync.power_sgd(5).init({"w": jnp.ones((4, 6)), "v": jnp.ones((40, 60))})


@pytest.mark.parametrize("params", [{}, {"b": jnp.ones(3)}, None], ids=["empty", "vectors", "none"])
def test_parameters_without_a_matrix_are_reduced_by_the_fallback(params):
    tx = sync.power_sgd(5)
    results, _ = tx.update(params, tx.init(params))
    jax.tree.map(np.testing.assert_array_equal, results, params)
