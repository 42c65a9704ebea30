"""Random keys per replica and per example."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, fixture_of_all_backends

strategy = fixture_of_all_backends()

KEYS = {
    "typed": lambda: jax.random.key(7),
    "raw": lambda: jax.random.PRNGKey(7),
    "of_another_kind": lambda: jax.random.key(7, impl="rbg"),
}
every_key = pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)


def bits(key):
    return np.asarray(jax.random.key_data(key))


def test_replica_key_differs_per_replica_and_is_the_folded_key(strategy):
    key = jax.random.key(7)
    result = strategy.run(lambda key: jax.random.key_data(jdist.replica_key(key)), (key,))
    n = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(result.tree, [bits(jax.random.fold_in(key, i)) for i in range(n)])
    assert len({row.tobytes() for row in np.asarray(result.tree)}) == n


@every_key
def test_replica_key_has_the_dtype_of_its_key(make, two):
    key = make()
    per_replica = two.run(jdist.replica_key, (key,))
    assert isinstance(per_replica, jdist.PerReplica)
    for number, mine in enumerate(per_replica.values):
        assert (mine.shape, mine.dtype) == (key.shape, key.dtype)
        np.testing.assert_array_equal(bits(mine), bits(jax.random.fold_in(key, number)))


def test_replica_key_outside_any_strategy_is_the_key_of_replica_zero():
    key = jax.random.key(3)
    np.testing.assert_array_equal(bits(jdist.replica_key(key)), bits(jax.random.fold_in(key, 0)))


def test_replica_keys_over_groups_of_replicas_are_distinct():
    ops = jdist.HierarchicalAllReduce(group_size=2)
    strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(4)], cross_device_ops=ops)
    key = jax.random.key(3)
    result = strategy.run(jdist.replica_key, (key,))
    np.testing.assert_array_equal(bits(result.tree), [bits(jax.random.fold_in(key, i)) for i in range(4)])


def test_shared_key_stays_replicated_while_each_replica_draws_its_own_numbers(two):
    def draw(state, x):
        key, now = jax.random.split(state["key"])
        noise = jax.random.normal(jdist.replica_key(now), x.shape)
        total = state["total"] + jdist.all_reduce("mean", noise + x)
        return {"key": key, "total": total}, noise

    step = two.step(draw)
    state = two.init(lambda key: {"key": key, "total": jnp.zeros(2)}, jax.random.key(5))
    x = jdist.PerReplica(np.ones((2, 2), np.float32))
    key = jax.random.key(5)
    for _ in range(2):
        state, noise = step(state, x)
        key, now = jax.random.split(key)
        expected = [jax.random.normal(jax.random.fold_in(now, i), 2) for i in range(2)]
        np.testing.assert_allclose(noise.tree, expected, rtol=1e-6)
    assert set(step.proof.replicated) == {"state['key']", "state['total']"}
    np.testing.assert_array_equal(bits(state["key"]), bits(key))
    assert_in_step(state)


def test_replica_key_that_is_stored_is_refused_with_the_fix(strategy):
    step = strategy.step(lambda state: ({"key": jdist.replica_key(state["key"])}, None))
    with pytest.raises(jdist.NotMirroredError, match=r"(?s)state\['key'\].*store .*the key that was folded"):
        step(strategy.put({"key": jax.random.key(0)}))


INDICES = {
    "scalar": np.int32(4),
    "python_number": 4,
    "row": np.arange(5),
    "table": np.arange(6).reshape(2, 3)[::-1],
    "cube": np.arange(4).reshape(2, 1, 2),
    "none": np.zeros((0, 2), np.int32),
    "bytes": np.uint8([0, 255]),
    "repeated": np.array([3, 3]),
}


@every_key
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_example_keys_equal_keys_folded_one_by_one(index, make):
    key = make()
    result = jdist.example_key(key, index)
    assert (result.shape, result.dtype) == ((*np.shape(index), *key.shape), key.dtype)
    expected = [bits(jax.random.fold_in(key, int(i))) for i in np.ravel(index)]
    np.testing.assert_array_equal(bits(result), np.reshape(np.asarray(expected, np.uint32), bits(result).shape))


@pytest.mark.parametrize("name", ["one_device", "mirrored_3"])
def test_example_keys_of_a_batch_in_a_replica_function_equal_those_of_the_global_batch(name):
    strategy = STRATEGIES[name]()
    n = strategy.num_replicas_in_sync
    key = jax.random.key(1)
    per_replica = lambda key: jax.random.key_data(jdist.example_key(key, jdist.replica_id() * 3 + jnp.arange(3)))
    result = strategy.run(per_replica, (key,))
    np.testing.assert_array_equal(np.concatenate(result.tree), bits(jdist.example_key(key, np.arange(3 * n))))


NOT_NUMBERS = {
    "floats": (np.float32([0, 1]), r"float32\[2\]"),
    "float": (0.5, r"0\.5"),
    "booleans": (np.array([True]), r"bool\[1\]"),
}


@pytest.mark.parametrize("index, text", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
def test_example_key_of_an_index_that_is_not_an_integer_is_refused(index, text):
    with pytest.raises(TypeError, match=rf"`index` must contain integers, the positions of examples, got {text}"):
        jdist.example_key(jax.random.key(0), index)


class Dropped(nn.Module):
    """A model with two layers of dropout, for one example."""

    @nn.compact
    def __call__(self, x):
        hidden = nn.Dropout(0.25, deterministic=False)(x)
        return hidden, nn.Dropout(0.5, deterministic=False)(jnp.ones(32))


@pytest.mark.slow
def test_dropout_of_each_example_is_the_same_on_any_number_of_replicas():
    model, key = Dropped(), jax.random.key(9)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    index = np.random.default_rng(1).permutation(16)

    def drop(key, x, index):
        single = lambda x, key: model.apply({}, x, rngs={"dropout": key})
        return jax.vmap(single)(x, jdist.example_key(key, index))

    result = []
    for name in ("one_device", "mirrored_2", "mirrored_8"):
        strategy = STRATEGIES[name]()
        split = [jdist.PerReplica(a.reshape(strategy.num_replicas_in_sync, -1, *a.shape[1:])) for a in (x, index)]
        result.append([np.concatenate(rows.tree) for rows in strategy.run(drop, (key, *split))])
    chex.assert_trees_all_equal(*result)
    _, masks = result[0]
    assert len({row.tobytes() for row in masks}) == 16
    np.testing.assert_array_equal(np.unique(masks), [0, 2])


@pytest.mark.parametrize("index", [np.array([2**40]), np.uint64([2**32 + 1, 1]), 2**40, -(2**31) - 1])
def test_example_key_of_an_index_of_more_than_32_bits_is_refused(index):
    with pytest.raises(ValueError, match=r"`fold_in` uses 32 bits\. Pass it modulo"):
        jdist.example_key(jax.random.key(0), index)
