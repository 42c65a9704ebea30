"""`ShardedStrategy(offload="optimizer")`: the state of the optimizer in host memory between steps, with the same results."""

import functools
import importlib.util
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jdist
from jdist._src.devices import mesh as meshes

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
DATA = (X, X @ np.arange(8, dtype=np.float32))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def strategy_of(shard, offload="optimizer"):
    return jdist.ShardedStrategy(shard, mesh=Mesh(np.array(jax.devices()[:4]), ("data",)), offload=offload)


def make(key, x):
    return {"w": jax.random.normal(key, (8, 16)), "v": jax.random.normal(key, (16,)), "odd": jnp.zeros(3)}


def apply(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"] + params["odd"].sum()


@functools.cache
def trainer(shard, offload="optimizer"):
    return jdist.Trainer((make, apply), OPTIMIZER, optax.squared_error, strategy=strategy_of(shard, offload))


def fit(of, **options):
    return of.fit(DATA, **{"batch_size": 16, "epochs": 3, "progress": "off", **options})


def assert_equal(state, other):
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def memory_kinds(state):
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x.sharding.memory_kind for path, x in leaves}


def test_arrays_of_the_optimizer_are_in_host_memory():
    state = trainer("all").init(X)
    on_host = {name for name, kind in memory_kinds(state).items() if kind == "pinned_host"}
    assert on_host == {f"opt_state/1/0/{moment}/{name}" for moment in ("mu", "nu") for name in ("w", "v", "odd")}
    assert state.opt_state[1][0].mu["w"].addressable_shards[0].data.shape == (8, 4)
    assert memory_kinds(strategy_of("all").put(jax.device_get(state.opt_state))) == {
        name.removeprefix("opt_state/"): kind
        for name, kind in memory_kinds(state).items()
        if name.startswith("opt_state")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "shard, options",
    [("all", {}), ("optimizer", {}), ("gradients", {}), ("all", {"steps_per_call": 3}), ("all", {"micro_batches": 2})],
)
def test_results_are_those_without_offload(shard, options):
    offloaded, expected = fit(trainer(shard), **options), fit(trainer(shard, None), **options)
    assert_equal(offloaded.state, expected.state)
    assert offloaded.history.losses == expected.history.losses
    assert memory_kinds(offloaded.state) == memory_kinds(trainer(shard).init(X))


def test_state_is_donated_and_traced_once():
    traced = []

    def step(state, batch):
        traced.append(1)
        grads = jax.grad(lambda params: (apply(params, batch[0]) - batch[1]).mean() ** 2)(state["params"])
        grads = jdist.all_reduce("mean", grads)
        updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, None

    strategy = strategy_of("all")
    params = make(jax.random.key(0), None)
    state, take = strategy.put({"params": params, "opt_state": OPTIMIZER.init(params)}), strategy.step(step)
    for batch in strategy.distribute_dataset(DATA, batch_size=16, remainder="drop"):
        old, (state, _) = state, take(state, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert len(traced) == 1


def test_state_is_an_argument_of_other_replica_functions():
    strategy, result = strategy_of("all"), fit(trainer("all"))
    mean = strategy.run(lambda state: state.opt_state[1][0].mu["v"].mean(), (result.state,))
    np.testing.assert_allclose(mean, np.asarray(result.state.opt_state[1][0].mu["v"]).mean(), rtol=1e-5)
    reduced = strategy.reduce("mean", result.state.opt_state[1][0].mu["v"], axis=0)
    np.testing.assert_allclose(reduced, mean, rtol=1e-5)
    assert trainer("all").evaluate(result.state, DATA, batch_size=16)["examples"] == 64


@pytest.mark.slow
def test_interrupted_training_is_resumed_and_continues_without_offload(tmp_path):
    expected = fit(trainer("all"))
    with jdist.Checkpointer(tmp_path, every=5) as checkpointer:
        fit(trainer("all"), steps=7, callbacks=[jdist.callbacks.Checkpoint(checkpointer), jdist.callbacks.EMA(0.9)])
    for offload in ("optimizer", None):
        of = trainer("all", offload)
        ema = jdist.callbacks.EMA(0.9)
        resumed = fit(of, resume=str(tmp_path), callbacks=[ema])
        assert_equal(resumed.state, expected.state)
        assert memory_kinds(resumed.state) == memory_kinds(of.init(X))


def test_description_and_pickle_contain_the_offload():
    strategy = jdist.ShardedStrategy("all", offload="optimizer")
    copy = pickle.loads(pickle.dumps(strategy))
    tree = {"opt_state": {"m": np.zeros((8, 8), np.float32)}}
    assert copy.shardings(tree)["opt_state"]["m"].memory_kind == "pinned_host"
    (leaf,) = copy.describe(copy.put(tree)).leaves
    assert leaf.placement == "split dim 0 over 'data' (8 parts), in host memory (pinned_host)"
    assert (leaf.device_bytes, leaf.host_bytes) == (0, 32)


def test_unknown_offload_is_refused():
    with pytest.raises(
        ValueError, match="`offload` is \"optimizer\" or None, got 'all'. To store the parameters in host memory"
    ):
        jdist.ShardedStrategy(offload="all")


def test_devices_without_host_memory_are_refused(monkeypatch):
    monkeypatch.setattr(meshes, "HOST_MEMORY", "none_such")
    message = (
        r"have the memories \[.*\], and not 'none_such', which would store .* leave `offload` out, and split the state"
    )
    with pytest.raises(ValueError, match=message):
        jdist.ShardedStrategy(offload="optimizer")


@pytest.mark.slow
def test_memory_of_a_core_decreases_by_the_moments():
    """From a program that is compiled for TPUs."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("memory is not checked: libtpu, the TPU's compiler, is not installed (pip install jdist[plan])")
    width, layers = 4096, 4
    mesh = Mesh(np.array(jdist.topology_devices("v5e:2x4")[:4]), ("data",))

    def step(state, x):
        loss = lambda params: jnp.mean(functools.reduce(lambda h, w: jnp.tanh(h @ w), params, x) ** 2)
        value, grads = jdist.all_reduce("mean", jax.value_and_grad(loss)(state["params"]))
        updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    def new_state():
        params = [jnp.ones((width, width))] * layers
        return {"params": params, "opt_state": OPTIMIZER.init(params)}

    def figures(offload):
        strategy = jdist.ShardedStrategy("all", mesh=mesh, offload=offload)
        batch = jdist.PerReplica(jax.ShapeDtypeStruct((1, 32, width), jnp.float32))
        return strategy.compile(step, jax.eval_shape(new_state), batch).memory_analysis()

    full, part = figures(None), figures("optimizer")
    moments = 2 * layers * width * width * 4 / 4  # the bytes of a device's parts
    assert part.host_argument_size_in_bytes == pytest.approx(moments, rel=0.01)
    assert full.argument_size_in_bytes - part.argument_size_in_bytes == pytest.approx(moments, rel=0.01)
    assert part.host_alias_size_in_bytes == pytest.approx(moments, rel=0.01)
