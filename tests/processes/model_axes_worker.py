"""Trains on groups of devices, on one process of several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdist

LAYOUT = {"up": P(None, "model"), "down": P("model", None)}
POLICIES = {
    "mean": lambda: optax.chain(jdist.sync.mean(), optax.adam(0.1)),
    "diloco": lambda: jdist.sync.diloco(optax.sgd(0.1), optax.sgd(0.7), every=2),
}


def meshes():
    """Returns meshes of four devices: groups within a process, groups of devices of several processes, and one group."""
    devices = np.array(jax.devices())
    within, across = devices.reshape(2, 2), devices.reshape(2, 2).T
    return {
        "sizes": {"replica": 2, "model": 2},
        "within": Mesh(within, ("replica", "model")),
        "across": Mesh(across, ("replica", "model")),
        "one": {"replica": 1, "model": 4},
    }


def trained():
    """Returns losses, parameters and values of the host API for each mesh and policy."""
    generator = np.random.default_rng(0)
    start = {"up": generator.normal(size=(6, 8)), "down": generator.normal(size=(8, 2))}
    data = [generator.normal(size=(8, size)).astype(np.float32) for size in (6, 2)]
    results = {}
    for (mesh_name, mesh), (name, policy) in ((m, p) for m in meshes().items() for p in POLICIES.items()):
        strategy, optimizer = jdist.MultiWorkerMirroredStrategy(mesh=mesh, layout=LAYOUT), policy()

        def make(optimizer=optimizer):
            params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start)
            return params, optimizer.init(params)

        @strategy.step
        def step(state, x, y, optimizer=optimizer):
            params, opt_state = state
            loss_fn = lambda params: jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)
            loss, grads = jax.value_and_grad(loss_fn)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), jdist.all_reduce("mean", loss)

        state, losses = strategy.init(make), []
        for x, y in strategy.distribute_dataset(tuple(data), 8, epochs=3):
            state, loss = step(state, x, y)
            losses.append(float(loss))
        state, loss = step(state, *strategy.split(tuple(data)))
        params = jdist.read_values(state[0])
        replicated = jax.jit(lambda x: x, out_shardings=strategy.replicas.replicated_sharding)(params)
        ids = strategy.run(jdist.replica_id)
        results[f"{mesh_name}/{name}"] = {
            "losses": [*losses, float(loss)],
            "params": jax.tree.map(np.asarray, replicated),
            "ids": [int(np.asarray(i.addressable_data(0))) for i in ids.values],
            "total": int(strategy.reduce("sum", ids, axis=None)),
        }
    return results


def named_axis():
    """Returns the weights after a step that is written for `jax.pmap`, under each strategy of all processes."""
    strategies = {
        "multi_worker": jdist.MultiWorkerMirroredStrategy(axis_name="batch"),
        "automatic": jdist.auto_strategy(axis_name="batch"),
        "mirrored": jdist.MirroredStrategy(jax.devices(), axis_name="batch"),
        "groups": jdist.MultiWorkerMirroredStrategy(axis_name="batch", mesh={"batch": 2, "model": 2}),
        "central": jdist.CentralStorageStrategy(jax.devices(), axis_name="batch"),
        "sharded": jdist.ShardedStrategy(mesh=Mesh(np.array(jax.devices()), ("data",)), axis_name="batch"),
    }
    results = {}
    for name, strategy in strategies.items():

        def train_step(w, x):
            return w - 0.1 * jax.lax.pmean((x * w).mean(0), axis_name="batch"), None

        w = strategy.put(np.ones(3, np.float32))
        for x in strategy.distribute_dataset(np.arange(24, dtype=np.float32).reshape(8, 3), batch_size=8):
            w, _ = strategy.step(train_step)(w, x)
        results[name] = np.asarray(jdist.read_values(w).addressable_data(0))
    return results
