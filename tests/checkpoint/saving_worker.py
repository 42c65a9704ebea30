"""Saves checkpoints until it is killed. Every leaf of step n is n; the `PerReplica` leaf is n plus the replica index.

python saving_worker.py FOLDER LAST
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax
import jax.numpy as jnp

import jdist
from jdist._src.checkpoint.checkpointer import Checkpointer

folder, last = sys.argv[1], int(sys.argv[2])
strategy = jdist.MirroredStrategy()


@strategy.step
def count(state):
    return jax.tree.map(lambda x: x + 1, state), None


def make():
    leaves = {f"w{i}": jnp.zeros((200, 100)) for i in range(8)}
    return {**leaves, "n": jnp.int32(0), "per_replica": jdist.PerReplica(jdist.replica_id())}


with Checkpointer(folder, keep=2) as checkpointer:
    if checkpointer.latest is None:
        state, step = strategy.init(make), 0
    else:
        restored = checkpointer.restore(strategy, like=jax.eval_shape(lambda: strategy.init(make)))
        state, step = restored.state, restored.step
        assert restored.data_position == {"batch": step} and int(state["n"]) == step
    print("begins", step, flush=True)
    while step < last:
        state, _ = count(state)
        step += 1
        checkpointer.save(step, state, {"batch": step})
        print("saves", step, flush=True)
