"""Trains, saves and restores on one process of several."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jdist
from jdist._src.checkpoint.checkpointer import Checkpointer


def make(key):
    index = jdist.replica_id()
    return {
        "w": jax.random.normal(key, (8, 4)),
        "key": key,
        "total": jdist.SyncOnRead(1.0 + index, "sum"),
        "drift": jdist.SyncOnRead(jnp.arange(4.0) + index, "mean"),
    }


def count_up(state):
    return {name: leaf if name == "key" else leaf + 1 for name, leaf in state.items()}, None


def gathered(strategy, state):
    """Returns every leaf as a numpy array, on each process."""
    read = jdist.read_values({**state, "key": jax.random.key_data(state["key"])})
    return jax.tree.map(
        np.asarray, jax.jit(lambda tree: tree, out_shardings=strategy.replicas.replicated_sharding)(read)
    )


def restored_states(folder):
    """Returns the leaves of the restored states."""
    folder, count, devices = pathlib.Path(folder), jax.process_count(), jax.devices()
    strategies = {
        "mirrored": jdist.MirroredStrategy(devices),
        "all": jdist.ShardedStrategy("all", mesh=Mesh(np.array(devices), ("data",))),
    }

    results = {}
    for name, strategy in strategies.items():
        step = strategy.step(count_up)
        state = strategy.init(make, jax.random.key(0))
        with Checkpointer(folder / f"{name}_{count}", keep=2) as checkpointer:
            for at in range(1, 4):
                state, _ = step(state)
                extra = {"at": np.int64(at), "w": state["w"] if count == 1 or name == "mirrored" else None}
                assert checkpointer.save(at, state, {"batch": at}, extra=extra)
            assert not checkpointer.save(3, state)
            restored = checkpointer.restore(strategy, like=state)
            assert checkpointer.steps() == (2, 3) and restored.step == 3 and restored.data_position == {"batch": 3}
            assert restored.extra["at"] == 3
            shardings = [
                [leaf.sharding for leaf in jax.tree.leaves(tree)] for tree in (restored.state, strategy.put(state))
            ]
            assert shardings[0] == shardings[1]
            results |= {f"{name}/{key}": leaf for key, leaf in gathered(strategy, restored.state).items()}
            after, _ = step(restored.state)
            assert gathered(strategy, after)["drift"].tolist() == (gathered(strategy, state)["drift"] + 1).tolist()
        if count > 1:  # a checkpoint that a single process saved
            with Checkpointer(folder / f"{name}_1") as checkpointer:
                state = checkpointer.restore(
                    strategy, like=jax.eval_shape(functools.partial(strategy.init, make), jax.random.key(0))
                ).state
                results |= {f"of one process {name}/{key}": leaf for key, leaf in gathered(strategy, state).items()}
    return results
