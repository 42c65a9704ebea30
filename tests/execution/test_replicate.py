"""`strategy.run`: the arguments that one replica receives, and the wrappers of its results."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, assert_in_step, each_row, rows


def nested(tree, scale=1.0):
    """Uses a tree with a per-replica part and a replicated part."""
    own, (shared, none) = tree["own"], tree["shared"]
    assert none is None
    return {"own": own["x"] * shared + own["n"], "pair": (own["x"].sum(), shared * scale), "none": None}


# The arguments of `run`, where `own(shape)` makes a per-replica value; numpy evaluates the same function.
CALLS = {
    "per_replica": (lambda own: ((own(2, 3),), {}), lambda x: x * 2 + 1),
    "scalar_per_replica": (lambda own: ((own(),), {}), lambda x: x * 2),
    "mirrored": (lambda own: ((own(3), np.arange(3, dtype=np.float32)), {}), lambda x, w: {"wx": w * x, "w": w * 2}),
    "only_mirrored": (lambda own: ((np.arange(4, dtype=np.int32),), {}), lambda w: w[::-1] + 1),
    "by_name": (lambda own: ((own(3),), {"b": own(), "a": 3}), lambda x, a, b: x * a + b),
    "python_numbers": (lambda own: ((own(2), 2, 0.5, True), {}), lambda x, n, f, b: (x * n + f, b)),
    "nested": (
        lambda own: (({"own": {"x": own(3), "n": own()}, "shared": (np.float32(3), None)},), {"scale": 2.0}),
        nested,
    ),
    "none_leaves": (lambda own: (({"x": own(2), "none": None}, None), {}), lambda tree, none: {**tree, "also": none}),
    "nothing": (lambda own: ((), {}), lambda: np.arange(3, dtype=np.int32)),
    "many_kinds": (
        lambda own: ((own(2, dtype=jnp.bfloat16), own(2, dtype=np.int32), own(2, dtype=np.bool_)), {}),
        lambda half, whole, flags: (half, whole * 2, flags),
    ),
}


class _Own(tuple):
    """The rows of a `PerReplica` argument."""


def _own(strategy):
    generator = np.random.default_rng(3)

    def own(*shape, dtype=np.float32):
        values = generator.normal(size=(strategy.num_replicas_in_sync, *shape)) * 9
        return _Own(np.asarray(values, dtype))

    return own


def _is_own(node):
    return isinstance(node, _Own)


def _map_own(fn, tree):
    return jax.tree.map(lambda node: fn(node) if _is_own(node) else node, tree, is_leaf=_is_own)


@pytest.mark.parametrize("arguments, fn", CALLS.values(), ids=CALLS)
def test_run_returns_the_function_of_each_replicas_arguments(arguments, fn, strategy):
    args, kwargs = call = arguments(_own(strategy))
    placed = _map_own(lambda rows: strategy.put(jdist.PerReplica(np.stack(rows))), call)
    result = strategy.run(lambda *args, **kwargs: fn(*args, **kwargs), *placed)
    results = strategy.local_results(result)
    assert len(results) == strategy.num_replicas_in_sync
    for number, replica_result in enumerate(results):
        args, kwargs = _map_own(lambda rows, i=number: rows[i], call)
        chex.assert_trees_all_close(replica_result, fn(*args, **kwargs), rtol=1e-6)


def test_run_accepts_host_rows_in_a_wrapper(strategy):
    values = np.arange(strategy.num_replicas_in_sync * 2.0, dtype=np.float32).reshape(-1, 2)
    negated = strategy.run(lambda x: -x, (jdist.PerReplica(values),))
    np.testing.assert_array_equal(negated.tree, -values)


def test_run_takes_and_returns_typed_keys(strategy):
    n = strategy.num_replicas_in_sync
    own = strategy.put(jdist.PerReplica(jax.random.split(jax.random.key(0), n)))
    split = lambda own, shared: (jax.random.split(own)[0], jax.random.fold_in(shared, 1), jax.random.bits(own))
    mine, ours, bits = strategy.run(split, (own, jax.random.key(9)))
    assert jnp.issubdtype(mine.tree.dtype, jax.dtypes.prng_key)
    for number, key in enumerate(own.values):
        expected = split(key, jax.random.key(9))
        np.testing.assert_array_equal(jax.random.key_data(mine.values[number]), jax.random.key_data(expected[0]))
        assert bits.values[number] == expected[2]
    np.testing.assert_array_equal(jax.random.key_data(ours), jax.random.key_data(expected[1]))


def test_results_are_plain_if_replicated_and_wrapped_otherwise(strategy):
    def results(x, w):
        return {
            "own": x * w,
            "all": jdist.all_reduce("sum", x),
            "constant": jnp.ones(2),
            "wrapped": jdist.PerReplica(w),
        }

    values = strategy.run(results, (rows(strategy, 2), np.ones(2, np.float32)))
    assert {name: isinstance(value, jdist.PerReplica) for name, value in values.items()} == {
        "own": True, "all": False, "constant": False, "wrapped": True,
    }  # fmt: skip
    n = strategy.num_replicas_in_sync
    assert values["own"].tree.shape == values["wrapped"].tree.shape == (n, 2)
    assert values["own"].tree.sharding.shard_shape((n, 2)) == (1, 2)
    assert_in_step((values["all"], values["constant"]))


def test_wrapper_of_a_tree_is_returned_with_its_tree(strategy):
    value = strategy.run(lambda x: jdist.PerReplica({"x": x, "pair": (x, None)}), (rows(strategy, 2),))
    assert jax.tree.structure(value) == jax.tree.structure(jdist.PerReplica({"x": 0, "pair": (0, None)}))
    assert len(value.values) == strategy.num_replicas_in_sync


def test_proof_lists_the_replicated_results(two):
    def results(state, x):
        return {"w": jdist.all_reduce("mean", x), "own": state["own"]}, {"x": x, "n": 1}

    step = two.step(results)
    state = two.put({"w": np.zeros(2, np.float32), "own": jdist.PerReplica(np.zeros(2, np.float32))})
    step(state, rows(two, 2))
    assert step.proof.replicated == ("state['w']", "output['n']")
    assert step.proof.per_replica == ("state['own']", "output['x']")
    text = "2 of 4 results are replicated; one value per replica: state['own'], output['x']"
    assert str(step.proof).splitlines()[0] == text


OTHER_DEVICES = {
    "per_replica_of_more": (lambda: rows(STRATEGIES["mirrored_3"](), 2), "has 2", "uses cpu:0, cpu:1"),
    "per_replica_of_fewer": (lambda: rows(STRATEGIES["mirrored_1"](), 2), "has 2", "uses cpu:0, cpu:1"),
    "per_replica_of_others": (lambda: rows(jdist.MirroredStrategy(["cpu:2", "cpu:3"]), 2), "uses cpu:0, cpu:1"),
    "per_replica_of_the_same_in_other_order": (
        lambda: rows(jdist.MirroredStrategy(["cpu:1", "cpu:0"]), 2),
        "uses cpu:0, cpu:1",
    ),
    "mirrored_on_more": (lambda: STRATEGIES["mirrored_8"]().put(np.ones(2)), "uses cpu:0, cpu:1"),
    "on_one_device": (lambda: jax.device_put(np.ones(2), jax.devices()[1]), "uses cpu:0, cpu:1"),
}


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
@each_row("make, ours", [(m, w) for m, *w in OTHER_DEVICES.values()], ids=OTHER_DEVICES)
def test_argument_of_another_strategy_raises_with_its_name_and_the_state_is_not_donated(make, ours, two):
    def predict(batch, weight):
        return batch["image"]

    step = two.step(lambda state, batch: (state, batch["image"]))
    state, batch, weight = two.put(np.ones(3)), {"image": make()}, np.ones(2)
    message = rf"batch\['image'\].*this strategy ({'|'.join(map(re.escape, ours))})"
    for call in (
        lambda: two.run(predict, (batch, weight)),
        lambda: two.run(predict, (), {"batch": batch, "weight": weight}),
        lambda: step(state, batch),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    np.testing.assert_array_equal(state, 1)
    step(state, {"image": rows(two, 2)})


WRONG_ROWS = {
    "more": (np.ones((3, 2), np.float32), r"x is a PerReplica of float32\[3,2\], for 3 replicas; this strategy has 2"),
    "scalar": (np.float32(1), r"x is a PerReplica of float32\[\], for no replicas; this strategy has 2"),
    "one_leaf": (
        {"a": np.ones((2, 1)), "b": np.ones(1, np.int32)},
        r"x.*\['b'\] is a PerReplica of int32\[1\], for 1 replicas; .*can only be used with the strategy that created it",
    ),
}


@pytest.mark.parametrize("tree, message", WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_run_with_wrong_number_of_host_rows_raises(tree, message, two):
    with pytest.raises(ValueError, match=message):
        two.run(lambda x: x, (jdist.PerReplica(tree),))


def test_run_returns_empty_trees(strategy):
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda x: ((), {}), (1.0,)) == ((), {})


def test_traced_value_that_a_function_closes_over_is_replicated():
    strategy = STRATEGIES["mirrored_2"]()
    x = rows(strategy, 3)

    @jax.jit
    def outer(factor):
        return strategy.run(lambda x: (x * factor, factor + 1), (x,))

    product, more = outer(jnp.float32(3))
    np.testing.assert_allclose(product.tree, np.asarray(x.tree) * 3, rtol=1e-6)
    assert isinstance(product, jdist.PerReplica)
    assert more == 4


def test_function_may_close_over_arrays():
    strategy = STRATEGIES["mirrored_2"]()
    here, numpy, key = jnp.arange(3.0), np.float32([1, 2, 3]), jax.random.key(0)
    other = jax.device_put(numpy, jax.devices()[1])
    drawn, total = strategy.run(lambda: (jax.random.normal(key), here + numpy + other))
    np.testing.assert_allclose(total, here + 2 * numpy)
    np.testing.assert_allclose(drawn, jax.random.normal(key), rtol=1e-6)
