"""Contexts: in a replica function, on the host in a scope, in `merge_call`, and outside any strategy."""

import asyncio
import contextvars
import gc
import threading
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdist

from laws import STRATEGIES, rows


def test_context_outside_any_strategy_is_of_one_replica():
    context = jdist.get_replica_context()
    assert (context.num_replicas_in_sync, context.strategy, context.axes) == (1, jdist.get_strategy(), ())
    assert int(context.replica_id_in_sync_group) == int(jdist.replica_id()) == 0
    assert jdist.num_replicas() == 1


def test_context_in_replica_function_has_the_number_of_replicas(strategy):
    seen = []

    def look(x):
        context = jdist.get_replica_context()
        seen.append((context.strategy, context.num_replicas_in_sync, jdist.num_replicas()))
        local = context.replica_id_in_sync_group, jdist.replica_id()
        return local, context.all_reduce("sum", x), context.all_gather(x[None], 0)

    n = strategy.num_replicas_in_sync
    ids, total, joined = strategy.run(look, (jdist.PerReplica(np.arange(n)),))
    assert seen == [(strategy, n, n)]
    for result in ids:
        np.testing.assert_array_equal(result.tree, np.arange(n))
        assert result.tree.dtype == np.int32
    assert int(total) == n * (n - 1) // 2
    np.testing.assert_array_equal(joined, np.arange(n))


def test_replica_context_in_scope_is_none(two):
    with two.scope():
        assert jdist.get_replica_context() is None
        assert two.run(lambda x: jdist.num_replicas() * x, (1,)) == 2
        assert jdist.get_replica_context() is None
    assert jdist.get_replica_context() is not None


WORDS = {
    "all_reduce": (lambda: jdist.all_reduce("sum", 1.0), "strategy.reduce"),
    "all_gather": (lambda: jdist.all_gather(np.ones(1), 0), "strategy.gather"),
    "broadcast": (lambda: jdist.broadcast(1.0), "strategy.put"),
    "replica_id": (jdist.replica_id, "strategy.num_replicas_in_sync"),
    "num_replicas": (jdist.num_replicas, "strategy.num_replicas_in_sync"),
    "replica_key": (lambda: jdist.replica_key(jax.random.key(0)), "jax.random.split"),
}


@pytest.mark.parametrize("function", WORDS)
def test_replica_function_called_by_the_host_in_scope_is_refused(function, two):
    ask, instead = WORDS[function]
    message = rf"`jdist\.{function}` can only be called inside a function run by `strategy\.run` or `strategy\.step`.* use `{instead}"
    with two.scope(), pytest.raises(RuntimeError, match=message):
        ask()
    ask()  # outside the scope there is one replica


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
    """Calls every function of the replica-context API."""
    noise = jax.random.normal(jdist.replica_key(key), x.shape)
    return {
        "sum": jdist.all_reduce("sum", x),
        "mean": jdist.all_reduce("mean", jnp.int32(3)),
        "max": jdist.all_reduce(jdist.ReduceOp.MAX, {"x": x, "none": None}),
        "gathered": jdist.all_gather(x, 0),
        "first": jdist.broadcast({"x": x, "none": None}),
        "merged": jdist.get_replica_context().merge_call(lambda strategy, x: strategy.reduce("sum", x, axis=0), (x,)),
        "count": x * jdist.num_replicas() + jdist.replica_id(),
        "noise": noise,
    }


@pytest.mark.parametrize("name", ["one_device", "mirrored_1"])
def test_function_called_outside_any_strategy_returns_the_result_of_one_replica(name):
    strategy = STRATEGIES[name]()
    x, key = rows(strategy, 3), jax.random.key(2)
    (seen,) = strategy.local_results(strategy.run(all_words, (x, key)))
    alone = all_words(np.asarray(x.tree)[0], key)
    chex.assert_trees_all_equal_shapes_and_dtypes(seen, alone)
    chex.assert_trees_all_close(seen, alone, rtol=1e-6)


def _where():
    """Returns whether the context is cross-replica, whether it is a replica's, and the current strategy."""
    return jdist.in_cross_replica_context(), jdist.get_replica_context() is not None, jdist.get_strategy()


def test_cross_replica_context_is_in_scope_and_in_merge_call_and_nowhere_else(strategy):
    seen = {}

    def replica_function():
        seen["replica"] = _where()
        jdist.get_replica_context().merge_call(lambda strategy: seen.setdefault("merge", _where()) and None)
        seen["replica_again"] = _where()
        lax.cond(jdist.num_replicas() > 0, lambda: seen.setdefault("cond", _where())[0] + 0, lambda: 0)

    outside = _where()
    with strategy.scope():
        seen["scope"] = _where()
        strategy.run(replica_function)
        strategy.distribute_values_from_function(lambda c: seen.setdefault("values", _where())[0])
    assert outside[:2] == (False, True)
    assert seen == {
        "scope": (True, False, strategy),
        "replica": (False, True, strategy),
        "merge": (True, False, strategy),
        "replica_again": (False, True, strategy),
        "cond": (False, True, strategy),
        "values": (True, False, strategy),
    }
    assert _where() == outside


@pytest.fixture
def outermost():
    """Sets the default strategy, and resets it after the test."""
    yield jdist.set_strategy
    jdist.set_strategy(None)


def test_set_strategy_is_current_in_all_threads_until_it_is_reset(strategy, outermost):
    seen = {}
    look = lambda name: seen.setdefault(name, (_where(), jdist.has_strategy()))
    outermost(strategy)
    look("here")
    for target, name in ((look, "thread"), (lambda name: contextvars.Context().run(look, name), "empty")):
        thread = threading.Thread(target=target, args=(name,))
        thread.start()
        thread.join()
    asyncio.run(asyncio.to_thread(look, "task"))
    assert seen == dict.fromkeys(["here", "thread", "empty", "task"], ((True, False, strategy), True))
    outermost(None)
    assert not jdist.has_strategy()
    assert not jdist.in_cross_replica_context()
    assert jdist.get_replica_context().num_replicas_in_sync == 1


def test_set_strategy_is_replaced_in_a_replica_function_and_by_the_next(two, outermost):
    outermost(two)
    assert two.run(lambda: jdist.in_cross_replica_context() + 0) == 0
    with two.scope():
        assert jdist.get_strategy() is two
    other = STRATEGIES["mirrored_1"]()
    outermost(other)
    assert jdist.get_strategy() is other
    outermost(None)
    outermost(None)
    assert not jdist.has_strategy()


def test_set_strategy_in_a_scope_or_a_replica_function_is_refused(two, outermost):
    message = r"`set_strategy` cannot be called inside a `strategy\.scope\(\)` or a replica function\. Call it outside"
    for strategy in (two, None):
        with two.scope(), pytest.raises(RuntimeError, match=message):
            outermost(strategy)
        with pytest.raises(RuntimeError, match=message):
            two.run(lambda strategy=strategy: outermost(strategy))
        with pytest.raises(RuntimeError, match=message):
            two.run(lambda: jdist.get_replica_context().merge_call(outermost))
    assert not jdist.has_strategy()


@pytest.mark.parametrize("invalid", [1, "mirrored", jdist.MirroredStrategy, {}], ids=str)
def test_set_strategy_refuses_other_objects(invalid, outermost):
    with pytest.raises(TypeError, match=r"`strategy` must be a strategy or None, got (int|str|type|ABCMeta|dict)\."):
        outermost(invalid)
    assert not jdist.has_strategy()


def test_tasks_have_each_their_own_scope_at_the_same_time():
    strategies = [make() for make in STRATEGIES.values()]

    async def work(strategy, entered, everyone):
        with strategy.scope():
            entered.append(strategy)
            if len(entered) == len(strategies):
                everyone.set()
            await everyone.wait()
            result = (
                jdist.get_strategy(),
                int(strategy.run(lambda: jdist.all_reduce("sum", jdist.replica_id() * 0 + 1))),
            )
            await asyncio.sleep(0)
            assert jdist.get_strategy() is strategy
        return result

    async def main():
        entered, everyone = [], asyncio.Event()
        return await asyncio.gather(*(work(strategy, entered, everyone) for strategy in strategies))

    assert asyncio.run(main()) == [(strategy, strategy.num_replicas_in_sync) for strategy in strategies]
    assert not jdist.has_strategy()


def test_threads_have_each_their_own_scope_at_the_same_time():
    strategies = [STRATEGIES[name]() for name in ("mirrored_1", "mirrored_2", "mirrored_3")]
    together = threading.Barrier(len(strategies), timeout=60)
    result = {}

    def work(number, strategy):
        with strategy.scope():
            together.wait()
            inside = jdist.get_strategy()
            together.wait()
        result[number] = inside, jdist.has_strategy()

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(strategies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == {number: (strategy, False) for number, strategy in enumerate(strategies)}


def test_scope_is_restored_after_exceptions_one_by_one(two):
    with two.scope():
        with pytest.raises(KeyError, match="mine"), two.scope():
            raise KeyError("mine")
        assert _where() == (True, False, two)
        with pytest.raises(ZeroDivisionError):
            two.run(lambda: 1 // 0)
        assert _where() == (True, False, two)
    assert not jdist.has_strategy()


def _merge(fn, *args, **kwargs):
    return jdist.get_replica_context().merge_call(fn, args, kwargs)


def test_merge_call_receives_the_values_of_all_replicas(strategy):
    n = strategy.num_replicas_in_sync
    seen = []

    def look(current, value, tree, *, scale):
        leaves = [value, tree["a"], scale]
        wrapped = [isinstance(x, jdist.PerReplica) for x in leaves]
        shapes = [np.shape(x.tree if n > 1 else x) for x in leaves]
        seen.append((current, _where(), len(strategy.local_results(value)), wrapped, shapes, tree["none"]))

    x = rows(strategy, 3)
    strategy.run(lambda x: _merge(look, x, {"a": jdist.replica_id(), "none": None}, scale=2.0), (x,))
    several = (n,) if n > 1 else ()
    shapes = [(*several, 3), several, several]
    assert seen == [(strategy, (True, False, strategy), n, [n > 1] * 3, shapes, None)]


def ask_the_strategy(strategy, x, *, ids):
    return {
        "sum": strategy.reduce("sum", x, axis=None),
        "mean": strategy.reduce("mean", {"x": x, "none": None}, axis=0),
        "joined": strategy.gather(ids, axis=0),
        "own": x,
        "mapped": x.map(lambda row: row * 2) if isinstance(x, jdist.PerReplica) else x * 2,
        "last": strategy.local_results(x)[-1],
        "again": strategy.reduce("sum", strategy.reduce("max", x, axis=None), axis=None),
        "number": 3,
        "none": None,
    }


def _asked(x, i):
    n = len(x)
    return {
        "sum": x.sum(0),
        "mean": {"x": x.mean(), "none": None},
        "joined": np.arange(n, dtype=np.int32),
        "own": x[i],
        "mapped": x[i] * 2,
        "last": x[-1],
        "again": n * x.max(0),
        "number": np.int32(3),
        "none": None,
    }


def merge_alone(x):
    return _merge(ask_the_strategy, x, ids=jdist.replica_id()[None])


def ask_little(strategy, x):
    return {"sum": strategy.reduce("sum", x, axis=None), "own": x, "none": None}


def merge_in_scan(x):
    _, result = lax.scan(lambda carry, _: (carry, _merge(ask_little, x)), 0, None, length=2)
    return jax.tree.map(lambda leaf: leaf[1], result)


def merge_in_cond(x):
    merge = lambda x: _merge(ask_little, x)
    return lax.cond(jdist.num_replicas() > 0, merge, merge, x)


def merge_in_while(x):
    turn = lambda carry: (carry[0] + 1, _merge(ask_little, x))
    return lax.while_loop(lambda carry: carry[0] < 2, turn, (0, {"sum": jnp.zeros(3), "own": 0 * x, "none": None}))[1]


MERGES = {fn.__name__: fn for fn in (merge_alone, merge_in_scan, merge_in_cond, merge_in_while)}


@pytest.mark.parametrize("fn", MERGES.values(), ids=MERGES)
def test_merge_call_returns_each_replica_its_row_of_the_result_of_the_host(fn, strategy):
    x = rows(strategy, 3)
    result = strategy.run(fn, (x,))
    for number, part_of_one in enumerate(strategy.local_results(result)):
        expected = _asked(np.asarray(x.tree), number)
        chex.assert_trees_all_close(part_of_one, {name: expected[name] for name in part_of_one}, rtol=1e-5, atol=1e-6)
    for name, leaf in result.items():
        assert isinstance(leaf, jdist.PerReplica) == (name in ("own", "mapped"))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_merge_call_on_a_mesh_of_groups_equals_that_on_a_mesh_of_replicas(groups):
    strategy = jdist.MirroredStrategy(cross_device_ops=jdist.HierarchicalAllReduce(groups))
    x = rows(strategy, 3)
    for number, part_of_one in enumerate(strategy.local_results(strategy.run(merge_alone, (x,)))):
        chex.assert_trees_all_close(part_of_one, _asked(np.asarray(x.tree), number), rtol=1e-5, atol=1e-6)


def test_merge_call_on_several_replicas_reads_the_values_of_each(two):
    result = two.run(lambda: _merge(lambda strategy, ids: ids.values, jdist.replica_id() + 5))
    assert [int(x) for x in result] == [5, 6]


@pytest.mark.parametrize("name", ["one_device", "mirrored_1", "sharded_4"])
def test_merge_call_on_one_replica_receives_plain_arrays(name):
    strategy = STRATEGIES[name]()
    add = lambda strategy, x, *, y: x + y
    result = strategy.run(lambda x: _merge(add, x, y=2), (rows(strategy, 3),))
    np.testing.assert_array_equal(result.values[0], np.asarray(rows(strategy, 3).tree)[0] + 2)


def test_scope_in_merge_call_on_one_replica_has_no_effect():
    strategy = STRATEGIES["one_device"]()

    def total(strategy, x):
        with strategy.scope():
            return strategy.reduce("sum", x, axis=None)

    step = strategy.step(lambda w, x: (w + _merge(total, x), None))
    state, _ = step(strategy.put(np.zeros(2, np.float32)), rows(strategy, 2))
    np.testing.assert_allclose(state, rows(strategy, 2).tree[0])


def test_merge_call_outside_any_strategy_receives_plain_arrays():
    add = lambda strategy, x: {
        "total": x + 1,
        "reduced": strategy.reduce("sum", x, axis=0),
        "all": strategy.gather(x, 0),
    }
    for call in (_merge, lambda *args: jax.jit(lambda x: _merge(add, x))(*args[1:])):
        result = call(add, np.float32([1, 2]))
        chex.assert_trees_all_equal(result, {"total": np.float32([2, 3]), "reduced": 3.0, "all": np.float32([1, 2])})


@pytest.mark.parametrize(
    "args, message",
    [
        (
            ((), [1]),
            r"^`kwargs` must be a mapping from argument names to values, got list\. Write `merge_call\(fn, kwargs=",
        ),
        ((1.0,), r"`args` must be a tuple of arguments, got float: write `merge_call\(fn, \(value,\)\)`"),
    ],
)
def test_merge_call_with_arguments_of_another_kind_is_refused(args, message, two):
    with pytest.raises(TypeError, match=message):
        two.run(lambda: jdist.get_replica_context().merge_call(lambda s: 1, *args))


def test_merge_call_outside_any_strategy_is_of_one_replica():
    result = merge_alone(np.float32([1, 2, 3]))
    chex.assert_trees_all_close(result, _asked(np.float32([[1, 2, 3]]), 0))
    assert not jdist.in_cross_replica_context()


def test_merge_call_of_empty_trees_returns_empty_trees(strategy):
    assert strategy.run(lambda: (_merge(lambda strategy: None), _merge(lambda strategy: {}))) == (None, {})
    assert strategy.run(
        lambda: jdist.get_replica_context().merge_call(lambda strategy, *args, **kwargs: (args, kwargs))
    ) == (
        (),
        {},
    )


PARTS = {
    "per_replica": (lambda n: jdist.PerReplica({"x": jnp.arange(n)}), lambda n, i: {"x": np.int32(i)}),
    "sync_on_read": (lambda n: jdist.SyncOnRead(jnp.arange(n), "sum"), lambda n, i: np.int32(i)),
    "sharded": (lambda n: jdist.Sharded(jnp.arange(2 * n)), lambda n, i: np.int32([2 * i, 2 * i + 1])),
    "mirrored": (lambda n: jdist.Mirrored((jnp.arange(3), None)), lambda n, i: (np.arange(3, dtype=np.int32), None)),
}


@pytest.mark.parametrize("make, part", PARTS.values(), ids=PARTS)
def test_merge_call_returns_each_replica_its_part_of_every_wrapper(make, part, strategy):
    n = strategy.num_replicas_in_sync
    result = strategy.run(lambda: _merge(lambda strategy: make(n)))
    for number, part_of_one in enumerate(strategy.local_results(result)):
        chex.assert_trees_all_equal(part_of_one, part(n, number))


UNFIT = {
    "more_rows": (
        lambda s: jdist.PerReplica(jnp.arange(3)),
        r"the result of merge_call is a PerReplica of int32\[3\], for 3 replicas; this strategy has 2",
    ),
    "one_row": (
        lambda s: jdist.PerReplica({"x": jnp.arange(1)}),
        r"\['x'\] is a PerReplica of int32\[1\], for 1 replicas",
    ),
    "odd_parts": (
        lambda s: jdist.Sharded(jnp.arange(3)),
        r"is Sharded, of int32\[3\], .*cannot be split into 2 equal shards",
    ),
    "uneven": (
        lambda s: s.distribute_values_from_function(lambda c: np.ones(2 - c.replica_id_in_sync_group)),
        r"the result of merge_call is PerReplica\(float\d+\[2\] \| float\d+\[1\]\): the replicas hold values of",
    ),
}


@pytest.mark.parametrize("make, message", UNFIT.values(), ids=UNFIT)
def test_merge_call_with_a_result_that_does_not_fit_is_refused(make, message, two):
    with pytest.raises(ValueError, match=message):
        value = make(two)
        two.run(lambda: _merge(lambda strategy: value))


def test_merge_call_accepts_keys_booleans_and_empty_leaves(strategy):
    n = strategy.num_replicas_in_sync
    local = {"key": jax.random.split(jax.random.key(1), n), "odd": np.arange(n) % 2 == 1, "empty": np.zeros((n, 0, 2))}
    result = strategy.run(lambda tree: _merge(lambda strategy, tree: tree, tree), (jdist.PerReplica(local),))
    for name, leaf in result.items():
        plain = jax.random.key_data if name == "key" else np.asarray
        value = leaf.tree if isinstance(leaf, jdist.PerReplica) else jnp.stack([leaf] * n)
        np.testing.assert_array_equal(plain(value), plain(local[name]))


def test_result_of_merge_call_is_proved_replicated_only_if_it_was_reduced(strategy):
    step = strategy.step(lambda w, x: (w + _merge(lambda strategy, x: strategy.reduce("mean", x, axis=None), x), None))
    x = rows(strategy, 2)
    state, _ = step(strategy.put(np.zeros(2, np.float32)), x)
    np.testing.assert_allclose(state, np.asarray(x.tree).mean(0), rtol=1e-5)
    local = strategy.step(lambda w, x: (w + _merge(lambda strategy, x: x, x), None))
    with pytest.raises(jdist.NotMirroredError, match="state is not proved to be replicated"):
        local(strategy.put(np.zeros(2, np.float32)), x)


def test_merge_call_is_differentiable(strategy):
    n = strategy.num_replicas_in_sync
    mean = lambda strategy, x: strategy.reduce("mean", x, axis=None)
    gradient = lambda x: jax.grad(lambda x: _merge(mean, x * x))(x)
    plain = lambda x: jax.grad(lambda x: jdist.all_reduce("mean", x * x))(x)
    x = rows(strategy)
    result, expected = (np.asarray(strategy.run(fn, (x,)).tree) for fn in (gradient, plain))
    assert result.shape == (n,)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_exception_in_merge_call_is_raised_and_restores_the_context(strategy):
    def fail(strategy):
        raise KeyError("mine")

    def catch():
        with pytest.raises(KeyError, match="mine"):
            _merge(fail)
        assert jdist.get_replica_context().strategy is strategy
        return jdist.replica_id()

    assert len(strategy.run(catch).values) == strategy.num_replicas_in_sync
    with pytest.raises(KeyError, match="mine"):
        strategy.run(lambda: _merge(fail))
    assert not jdist.in_cross_replica_context()


def _run_in_scope(strategy):
    with strategy.scope():
        return strategy.run(jdist.replica_id)


INSIDE = {
    "run": lambda strategy: strategy.run(lambda: 1),
    "run_in_a_scope": _run_in_scope,
    "init": lambda strategy: strategy.init(lambda: 1),
    "step": lambda strategy: strategy.step(lambda state: (state, None))(1.0),
}


@pytest.mark.parametrize("ask", INSIDE.values(), ids=INSIDE)
def test_program_inside_merge_call_is_refused(ask, strategy):
    message = r"`strategy\.run`, `strategy\.init` or a step is called inside a replica function\. Call the inner function directly"
    with pytest.raises(RuntimeError, match=message):
        strategy.run(lambda: _merge(ask))


@pytest.mark.parametrize(
    "function", ["all_reduce", "all_gather", "replica_id", "num_replicas", "replica_key", "broadcast"]
)
def test_collective_inside_merge_call_is_refused(function, two):
    ask = WORDS[function][0]
    with pytest.raises(RuntimeError, match=rf"`jdist\.{function}` can only be called inside a function run by"):
        two.run(lambda: _merge(lambda strategy: ask()))


def test_merge_call_that_only_some_replicas_reach_is_refused(two):
    sums = lambda strategy, x: strategy.reduce("sum", x, axis=None)
    some = lambda x: lax.cond(jdist.replica_id() > 0, lambda: _merge(sums, x), lambda: x)
    with pytest.raises(jdist.DivergentCollectiveError):
        two.run(some, (1.0,))


def test_merge_call_of_a_scalar_key_returns_the_key_of_each_replica(two):
    local = lambda: jdist.replica_key(jax.random.key(0))
    handed = lambda: jax.random.key_data(jdist.get_replica_context().merge_call(lambda _, key: key, (local(),)))
    expected = two.run(lambda: jax.random.key_data(local()))
    np.testing.assert_array_equal(two.run(handed).tree, expected.tree)


def test_variable_within_merge_call_is_refused(two):
    with pytest.raises(RuntimeError, match=r"`jdist\.variable` is called in a `merge_call`\. Create the value before"):
        two.run(lambda: jdist.get_replica_context().merge_call(lambda _: jdist.variable(1.0)))


def test_options_of_another_kind_are_refused():
    with pytest.raises(TypeError, match=r"`options` must be a `jdist\.CommunicationOptions\(bytes_per_pack\)`, got 3"):
        jdist.all_reduce("sum", 1.0, options=3)


# --- contexts are part of JAX's trace cache key


def test_jitted_helper_is_traced_again_in_each_context(two):
    helper = jax.jit(lambda x: jdist.all_reduce("sum", x * jdist.replica_id()) + 10 * jdist.num_replicas())
    assert float(helper(1.0)) == 10
    for strategy, expected in ((two, 21), (STRATEGIES["mirrored_3"](), 33), (two, 21)):
        assert float(strategy.run(lambda x: helper(x), (1.0,))) == expected
        with strategy.scope(), pytest.raises(RuntimeError, match=r"can only be called inside a function run by"):
            helper(1.0)
        jdist.set_strategy(strategy)
        try:
            with pytest.raises(RuntimeError, match=r"can only be called inside a function run by"):
                helper(1.0)
        finally:
            jdist.set_strategy(None)
    assert float(helper(1.0)) == 10


def test_jitted_helper_that_reads_the_strategy_gets_the_current_one():
    helper, seen = jax.jit(lambda x: (seen.append(jdist.get_strategy()), x)[1]), []
    strategies = [STRATEGIES["mirrored_2"](), STRATEGIES["mirrored_2"]()]
    for strategy in strategies:
        strategy.run(lambda x: helper(x), (1.0,))
    assert seen == strategies


def test_trace_cache_does_not_keep_a_strategy_alive():
    strategy = STRATEGIES["mirrored_2"]()
    helper = jax.jit(lambda x: x * jdist.num_replicas())
    strategy.run(lambda x: helper(x), (1.0,))
    with strategy.scope():
        jax.jit(lambda x: x + 1)(1.0)
    reference = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert reference() is None
