"""Trains a sharded state on one process of several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import jdist

draw = np.random.default_rng(0).normal
DATA = draw(size=(22, 6)).astype(np.float32), draw(size=(22, 4)).astype(np.float32)
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def make(key):
    params = {"in": jax.random.normal(key, (6, 16)), "out": jax.random.normal(key, (16, 4)), "scale": jnp.ones(())}
    return {"params": params, "opt_state": TX.init(params), "key": key}


def losses(params, x, y):
    return jnp.mean((params["scale"] * (jnp.tanh(x @ params["in"]) @ params["out"]) - y) ** 2, -1)


def trained(strategy):
    @strategy.step
    def step(state, batch, weights):
        key, noise = jax.random.split(state["key"])
        x = batch[0] + 0.1 * jax.random.normal(jdist.replica_key(noise), batch[0].shape)
        loss, grads = jdist.all_reduce(
            "mean", jdist.value_and_grad(losses, weights=weights)(state["params"], x, batch[1])
        )
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "key": key}, loss

    state = strategy.init(make, jax.random.key(0))
    before = [leaf.sharding for leaf in jax.tree.leaves(state)]
    for batch, weights in strategy.distribute_dataset(DATA, 8, shuffle=True, epochs=2, remainder="pad"):
        state, loss = step(state, batch, weights)
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == before
    return state, loss


def gathered(strategy, tree):
    """Returns every leaf as a numpy array, on each process."""
    replicated = jax.jit(lambda tree: tree, out_shardings=strategy.replicas.replicated_sharding)(tree)
    return jax.tree.map(np.asarray, replicated)


def final_states():
    """Returns the leaves of the final state under each mesh."""
    devices = np.array(jax.devices())
    strategies = {
        "all": jdist.ShardedStrategy("all", mesh=Mesh(devices, ("data",))),
        "host_data": jdist.ShardedStrategy("all", mesh=Mesh(devices.reshape(2, 2), ("host", "data"))),
        # The model axis spans the processes, so both read every example.
        "model": (
            jdist.ShardedStrategy(
                "all",
                mesh=Mesh(devices.reshape(2, 2).T, ("data", "model")),
                model_axis="model",
                layout={"in": PartitionSpec(None, "model")},
            )
        ),
    }
    results = {}
    for name, strategy in strategies.items():
        state, loss = trained(strategy)
        results[f"{name}/loss"] = np.asarray(loss)
        for part in ("params", "opt_state"):
            for path, leaf in jax.tree_util.tree_leaves_with_path(gathered(strategy, state[part])):
                results[f"{name}/{part}{jax.tree_util.keystr(path)}"] = leaf
        moved = strategy.put(gathered(strategy, state["params"]))
        results[f"{name}/moved"] = gathered(strategy, moved)["in"]
    return results
