"""Trains with the state in host memory, on one process of several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist

draw = np.random.default_rng(0).normal
DATA = draw(size=(24, 6)).astype(np.float32), draw(size=(24, 4)).astype(np.float32)
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def make(key):
    params = {"in": jax.random.normal(key, (6, 16)), "out": jax.random.normal(key, (16, 4)), "scale": jnp.ones(())}
    return {"params": params, "opt_state": TX.init(params)}


def loss(params, x, y):
    return jnp.mean((params["scale"] * (jnp.tanh(x @ params["in"]) @ params["out"]) - y) ** 2)


def trained(strategy):
    @strategy.step
    def step(state, batch):
        value, grads = jdist.all_reduce("mean", jax.value_and_grad(loss)(state["params"], *batch))
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    state = strategy.init(make, jax.random.key(0))
    before = [leaf.sharding for leaf in jax.tree.leaves(state)]
    for batch in strategy.distribute_dataset(DATA, 8):
        state, _ = step(state, batch)
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == before
    assert state["params"]["in"].sharding.memory_kind == ("pinned_host" if "Central" in repr(strategy) else "device")
    return strategy.run(lambda state: state, (state,))


def final_states():
    """Returns the leaves of the state after training under each strategy."""
    results = {}
    strategies = {"central": jdist.CentralStorageStrategy, "mirrored": jdist.MirroredStrategy}
    for name, strategy in strategies.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(trained(strategy(jax.devices()))):
            results[f"{name}{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
    return results
