"""Error feedback: no part of a gradient is lost, also on another number of replicas and after a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import sync

from laws import among
from policies import FEEDBACK, POLICIES, State, assert_synchronized, batches, read, start, stepper

SHAPES = {"w": (12, 10), "v": (40,), "b": (3,)}
STEPS = 7


def strategy_of(replicas):
    return jdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def zeros():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def gradients(replicas, seed=0):
    """Returns constant gradients, one per replica: numpy arrays `[replica, ...]`."""
    draw = np.random.default_rng(seed).normal
    return {name: np.float32(draw(size=(replicas, *shape))) for name, shape in SHAPES.items()}


def adder(strategy, tx):
    """Returns a step that adds the updates of `tx` to the parameters."""

    @strategy.step
    def step(state, grads):
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), None

    return step


def residuals(opt_state):
    """Returns the stored residual of each compressed leaf."""
    is_partial = lambda x: isinstance(x, jdist.SyncOnRead)
    results = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_partial)
    return {path[-1].key: leaf for path, leaf in results if is_partial(leaf)}


def pending(opt_state):
    """Returns the unsent part of each leaf's mean."""
    return {name: np.asarray(leaf.read()) for name, leaf in residuals(opt_state).items()}


def assert_nothing_lost(policy, state, expected):
    # `in_dtype` compensates the rounding of the sent gradients, not the rounding of their sum.
    rounding = {"in_dtype": 2e-2, "in_dtype_float16": 2e-3}.get(policy, 1e-4)
    residual_sums = pending(state.opt_state)
    assert residual_sums
    for name, applied in read(state.params).items():
        total = applied + residual_sums.get(name, 0)
        np.testing.assert_allclose(total, expected[name], rtol=rounding, atol=rounding, err_msg=name)


@pytest.mark.parametrize("name", [name for name in FEEDBACK if name != "top_k_in_bfloat16"])
def test_applied_and_unsent_gradients_add_up_to_all_gradients(name):
    strategy, tx, grads = strategy_of(3), POLICIES[name](optax.identity()), gradients(3)
    state, step, rows = start(strategy, tx, zeros), adder(strategy, tx), strategy.put(jdist.PerReplica(grads))
    for _ in range(STEPS):
        state, _ = step(state, rows)
    assert any(np.abs(leaf).max() > 1e-4 for leaf in pending(state.opt_state).values())
    assert_nothing_lost(name, state, {name: STEPS * leaf.mean(0) for name, leaf in grads.items()})


@pytest.mark.parametrize("name", FEEDBACK)
def test_residual_is_local_to_each_replica_and_read_as_a_sum(name, two):
    state = start(two, POLICIES[name](optax.identity()), zeros)
    for leaf in residuals(state.opt_state).values():
        assert leaf.aggregation is jdist.VariableAggregation.SUM
        assert not leaf.trainable
        assert leaf.tree.dtype == jnp.float32
        assert [np.abs(own).max() for own in leaf.values] == [0, 0]


@pytest.mark.parametrize("name", FEEDBACK)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_residual_of_half_precision_is_float32(name, dtype, two):
    make = lambda: jax.tree.map(lambda x: x.astype(dtype), zeros())
    state = start(two, POLICIES[name](optax.identity()), make)
    assert {leaf.tree.dtype for leaf in residuals(state.opt_state).values()} <= {np.dtype(np.float32)}


@pytest.mark.parametrize("change", among([(2, 3), (3, 1), (1, 4)], (2, 3)), ids=str)
@pytest.mark.parametrize("policy", ["in_dtype", "int8", "int8_stochastic", "top_k", "power_sgd"])
def test_residual_on_another_number_of_replicas_is_split_and_nothing_is_lost(policy, change):
    before, after = change
    tx, first, second = POLICIES[policy](optax.identity()), gradients(before), gradients(after, seed=1)
    strategy = strategy_of(before)
    state, step = start(strategy, tx, zeros), adder(strategy, tx)
    rows = strategy.put(jdist.PerReplica(first))
    for _ in range(STEPS):
        state, _ = step(state, rows)
    residual_sums = pending(state.opt_state)
    strategy = strategy_of(after)
    state, step, rows = strategy.put(state), adder(strategy, tx), strategy.put(jdist.PerReplica(second))
    assert {leaf.tree.shape[0] for leaf in residuals(state.opt_state).values()} == {after}
    for name, now in pending(state.opt_state).items():
        np.testing.assert_allclose(now, residual_sums[name], rtol=1e-5, atol=1e-6)
    for _ in range(STEPS):
        state, _ = step(state, rows)
    assert_synchronized(state.params)
    assert_nothing_lost(policy, state, {name: STEPS * (first[name].mean(0) + second[name].mean(0)) for name in SHAPES})


def to_numpy(state):
    """Returns `state` as numpy arrays, with random keys as their data."""
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if _is_key(x) else x), state)


def from_numpy(saved, like):
    return jax.tree.map(lambda x, old: jax.random.wrap_key_data(x) if _is_key(old) else x, saved, like)


def _is_key(leaf):
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize(
    "name",
    among([name for name in POLICIES if name != "hierarchical"], "int8_stochastic", "power_sgd", "every", "diloco"),
)
def test_restored_state_continues_bitwise_equal(name, two):
    tx = POLICIES[name](optax.sgd(0.1, momentum=0.9))
    step, state, data = stepper(two, tx), start(two, tx), list(batches(two, 6))
    for batch in data[:3]:  # in the middle of an accumulation of two
        state, _ = step(state, batch)
    saved = to_numpy(state)
    restored = two.put(from_numpy(saved, state))
    for batch in data[3:]:
        state, _ = step(state, batch)
        restored, _ = step(restored, batch)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(state), to_numpy(restored))


def test_stochastic_rounding_continues_with_its_key_after_a_restore(two):
    tx = sync.int8(rounding="stochastic", block_size=16)
    state, step, rows = start(two, tx, zeros), adder(two, tx), two.put(jdist.PerReplica(gradients(2)))
    keys = []
    for _ in range(3):
        keys.append(to_numpy(state).opt_state.codec.tobytes())
        state, _ = step(state, rows)
        state = two.put(from_numpy(to_numpy(state), state))
    assert len(set(keys)) == 3


@pytest.mark.parametrize("name", ["in_dtype", "int8", "top_k", "power_sgd"])
def test_state_made_outside_the_strategy_is_refused_by_name(name, two):
    tx = POLICIES[name](optax.identity())
    state = two.put(State(zeros(), tx.init(zeros())))
    with pytest.raises(jdist.NotMirroredError, match=r"state\.opt_state\[0\]\.residual\['\w'\]"):
        adder(two, tx)(state, two.put(jdist.PerReplica(gradients(2))))


@pytest.mark.parametrize("name", ["in_dtype", "int8", "top_k", "power_sgd"])
def test_gradient_that_is_not_finite_stays_in_the_residual_unless_it_is_skipped(name, two):
    inner = POLICIES[name](optax.identity())
    grads = gradients(2)
    spoiled = {**grads, "w": np.where(np.arange(10) == 3, np.float32(np.nan), grads["w"])}
    tx = sync.skip_nonfinite(inner)
    state, step = start(two, tx, zeros), adder(two, tx)
    for rows in (grads, spoiled, grads):
        state, _ = step(state, two.put(jdist.PerReplica(rows)))
    assert int(state.opt_state.skipped) == 1
    assert_nothing_lost(name, state, {name: 2 * leaf.mean(0) for name, leaf in grads.items()})
