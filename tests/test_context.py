"""Who is asking: a replica, the host program in a scope, or nobody's program outside any strategy."""

import contextvars
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, rows


def test_context_outside_any_strategy_is_of_one_replica():
    context = jdist.get_replica_context()
    assert (context.num_replicas_in_sync, context.strategy, context.axes) == (1, jdist.get_strategy(), ())
    assert int(context.replica_id_in_sync_group) == int(jdist.replica_id()) == 0
    assert jdist.num_replicas() == 1


def test_context_in_replica_function_knows_the_others(strategy):
    seen = []

    def look(x):
        context = jdist.get_replica_context()
        seen.append((context.strategy, context.num_replicas_in_sync, jdist.num_replicas()))
        own = context.replica_id_in_sync_group, jdist.replica_id()
        return own, context.all_reduce("sum", x), context.all_gather(x[None], 0)

    n = strategy.num_replicas_in_sync
    ids, total, joined = strategy.run(look, (jdist.PerReplica(np.arange(n)),))
    assert seen == [(strategy, n, n)]
    for found in ids:
        np.testing.assert_array_equal(found.tree, np.arange(n))
        assert found.tree.dtype == np.int32
    assert int(total) == n * (n - 1) // 2
    np.testing.assert_array_equal(joined, np.arange(n))


def test_context_in_scope_is_none(two):
    with two.scope():
        assert jdist.get_replica_context() is None
        assert two.run(lambda x: jdist.num_replicas() * x, (1,)) == 2
        assert jdist.get_replica_context() is None
    assert jdist.get_replica_context() is not None


WORDS = {
    "all_reduce": (lambda: jdist.all_reduce("sum", 1.0), "strategy.reduce"),
    "all_gather": (lambda: jdist.all_gather(np.ones(1), 0), "strategy.gather"),
    "replica_id": (jdist.replica_id, "strategy.num_replicas_in_sync"),
    "num_replicas": (jdist.num_replicas, "strategy.num_replicas_in_sync"),
    "replica_key": (lambda: jdist.replica_key(jax.random.key(0)), "jax.random.split"),
}


@pytest.mark.parametrize("word", WORDS)
def test_word_of_replicas_said_by_the_host_in_scope_is_refused(word, two):
    ask, instead = WORDS[word]
    says = (
        rf"`jdist\.{word}` is a word of replica functions.*`strategy\.run` or `strategy\.step` runs, or use `{instead}"
    )
    with two.scope(), pytest.raises(RuntimeError, match=says):
        ask()
    ask()  # outside there is one replica


def test_context_after_a_function_that_raised_is_restored(two):
    def fail(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        two.run(fail, (1.0,))
    assert not jdist.has_strategy()
    with pytest.raises(KeyError, match="mine"), two.scope():
        raise KeyError("mine")
    assert not jdist.has_strategy()


def test_context_of_scope_is_of_its_own_thread(two):
    seen = {}
    with two.scope():
        here = contextvars.copy_context()
        look = lambda name: seen.setdefault(name, jdist.has_strategy())
        threads = [
            threading.Thread(target=look, args=("bare",)),
            threading.Thread(target=here.run, args=(look, "copied")),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"bare": False, "copied": True}


def all_words(x, key):
    """Every word of replica functions, in one."""
    noise = jax.random.normal(jdist.replica_key(key), x.shape)
    return {
        "sum": jdist.all_reduce("sum", x),
        "mean": jdist.all_reduce("mean", jnp.int32(3)),
        "max": jdist.all_reduce(jdist.ReduceOp.MAX, {"x": x, "none": None}),
        "gathered": jdist.all_gather(x, 0),
        "count": x * jdist.num_replicas() + jdist.replica_id(),
        "noise": noise,
    }


@pytest.mark.parametrize("name", ["one_device", "mirrored_1"])
def test_function_called_outside_any_strategy_gives_what_one_replica_sees(name):
    strategy = STRATEGIES[name]()
    x, key = rows(strategy, 3), jax.random.key(2)
    (seen,) = strategy.local_results(strategy.run(all_words, (x, key)))
    alone = all_words(np.asarray(x.tree)[0], key)
    chex.assert_trees_all_equal_shapes_and_dtypes(seen, alone)
    chex.assert_trees_all_close(seen, alone, rtol=1e-6)


def test_replica_key_differs_per_replica_and_is_the_folded_key(strategy):
    key = jax.random.key(7)
    draws = strategy.run(lambda key: jax.random.bits(jdist.replica_key(key)), (key,))
    expected = [jax.random.bits(jax.random.fold_in(key, i)) for i in range(strategy.num_replicas_in_sync)]
    np.testing.assert_array_equal(strategy.gather(strategy.run(lambda x: x[None], (draws,)), 0), expected)
    assert len(set(map(int, expected))) == strategy.num_replicas_in_sync


def test_replica_key_of_raw_key_is_raw(two):
    raw = jax.random.PRNGKey(7)
    found = two.run(jdist.replica_key, (raw,))
    np.testing.assert_array_equal(found.tree, [jax.random.fold_in(raw, i) for i in range(2)])
