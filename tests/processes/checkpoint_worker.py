"""One process of several that train, save and restore together; writes what it restored, as far as it can read it.

python checkpoint_worker.py COORDINATOR COUNT NUMBER FOLDER
"""

import functools
import pathlib
import sys

import jax
import numpy as np

address, count, number, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
if count > 1:
    jax.distributed.initialize(address, count, number, coordinator_bind_address=address)

import jax.numpy as jnp
from jax.sharding import Mesh

import jdist
from jdist._src.checkpoint.checkpointer import Checkpointer

devices = jax.devices()
STRATEGIES = {
    "mirrored": jdist.MirroredStrategy(devices),
    "all": jdist.ShardedStrategy("all", Mesh(np.array(devices), ("data",))),
}


def make(key):
    mine = jdist.replica_id()
    return {
        "w": jax.random.normal(key, (8, 4)),
        "key": key,
        "total": jdist.SyncOnRead(1.0 + mine, "sum"),
        "drift": jdist.SyncOnRead(jnp.arange(4.0) + mine, "mean"),
    }


def count_up(state):
    return {name: leaf if name == "key" else leaf + 1 for name, leaf in state.items()}, None


def whole(strategy, state):
    """Every leaf as each process can read it."""
    read = jdist.read_values({**state, "key": jax.random.key_data(state["key"])})
    return jax.tree.map(np.asarray, jax.jit(lambda tree: tree, out_shardings=strategy.replicas.whole)(read))


results = {}
for name, strategy in STRATEGIES.items():
    step = strategy.step(count_up)
    state = strategy.init(make, jax.random.key(0))
    with Checkpointer(folder / f"{name}_{count}", keep=2) as checkpointer:
        for at in range(1, 4):
            state, _ = step(state)
            extra = {"at": np.int64(at), "w": state["w"] if count == 1 or name == "mirrored" else None}
            assert checkpointer.save(at, state, {"batch": at}, extra=extra)
        assert not checkpointer.save(3, state)
        found = checkpointer.restore(strategy, state)
        assert checkpointer.steps() == (2, 3) and found.step == 3 and found.data_position == {"batch": 3}
        assert found.extra["at"] == 3
        shardings = [[leaf.sharding for leaf in jax.tree.leaves(tree)] for tree in (found.state, strategy.put(state))]
        assert shardings[0] == shardings[1]
        results |= {f"{name}/{key}": leaf for key, leaf in whole(strategy, found.state).items()}
        after, _ = step(found.state)
        assert whole(strategy, after)["drift"].tolist() == (whole(strategy, state)["drift"] + 1).tolist()
    if count > 1:  # what one process saved alone
        with Checkpointer(folder / f"{name}_1") as checkpointer:
            state = checkpointer.restore(
                strategy, jax.eval_shape(functools.partial(strategy.init, make), jax.random.key(0))
            ).state
            results |= {f"from one on {name}/{key}": leaf for key, leaf in whole(strategy, state).items()}
np.savez(folder / f"{count}_{number}.npz", **results)

# The process that holds the coordinator leaves last.
if count > 1:
    jax.distributed.shutdown()
