"""Reads batches that are split along other dimensions than the first, on one process of several."""

import itertools

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdist

SOURCE = {"x": np.arange(12 * 8 * 3, dtype=np.float32).reshape(12, 8, 3), "y": np.arange(12, dtype=np.int32)}


def strategies():
    devices = np.array(jax.devices())
    grids = {"rows": devices.reshape(2, 2), "columns": devices.reshape(2, 2).T}
    sharded = {
        name: jdist.ShardedStrategy(mesh=Mesh(grid, ("data", "model")), model_axis=model_axis)
        for model_axis in ("model", None)
        for name, grid in ((f"{name}/{model_axis}", grid) for name, grid in grids.items())
    }
    return {**sharded, "mirrored": jdist.MirroredStrategy(jax.devices())}


LAYOUTS = {
    "both": P("data", "model"),
    "swapped": P("model", "data"),
    "sequence": P(None, ("data", "model")),
    "per_leaf": {"x": P(None, "model"), "y": P("data")},
    "replicas": P("replica"),
    "blocks": P(None, "replica"),
}


def cases():
    for (name, strategy), layout in itertools.product(strategies().items(), LAYOUTS):
        if (name == "mirrored") == (layout in ("replicas", "blocks")):
            yield f"{name}/{layout}", strategy, LAYOUTS[layout]


def replicated(strategy, tree):
    sharding = strategy.replicas.replicated_sharding
    return jax.tree.map(np.asarray, jax.jit(lambda tree: tree, out_shardings=sharding)(jax.tree.map(lambda x: x, tree)))


def batches():
    """Returns the leaves of all batches of each case, after a step that takes them."""
    results = {}
    for name, strategy, layout in cases():
        step = strategy.step(lambda w, batch: (w + jdist.all_reduce("mean", batch["x"].mean()), None))
        state = strategy.put(np.float32(0))
        dataset = strategy.distribute_dataset(SOURCE, 4, shuffle=True, layout=layout)
        for number, batch in enumerate(dataset):
            state, _ = step(state, batch)
            for i, leaf in enumerate(jax.tree.leaves(replicated(strategy, batch))):
                results[f"{name}/{number}/{i}"] = leaf
            whole = strategy.split(jax.tree.map(lambda x: x[:4], SOURCE), layout=layout)
            assert jax.tree.structure(whole) == jax.tree.structure(batch), name
            for one, other in zip(*map(jax.tree.leaves, (whole, batch)), strict=True):
                assert (one.shape, one.sharding) == (other.shape, other.sharding), name
        results[f"{name}/state"] = np.asarray(state)
    return results


def refusal():
    """Returns the error of a layout that needs the examples of other processes."""
    strategy = strategies()["mirrored"]
    own = {name: leaf[: len(leaf) // 2] for name, leaf in SOURCE.items()}
    try:
        strategy.distribute_dataset(own, 4, auto_shard="off", layout=P(None, "replica"))
    except ValueError as error:
        return str(error)
    return ""
