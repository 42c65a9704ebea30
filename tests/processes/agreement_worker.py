"""One of two processes, one of which makes other calls of a checkpointer than the other; prints the error of each.

python agreement_worker.py COORDINATOR COUNT NUMBER FOLDER WHO
"""

import pathlib
import sys

import jax
import numpy as np

address, count, number, folder, who = (
    *sys.argv[1:2],
    *map(int, sys.argv[2:4]),
    pathlib.Path(sys.argv[4]),
    int(sys.argv[5]),
)
jax.distributed.initialize(address, count, number, coordinator_bind_address=address)

import jax.numpy as jnp

import jdist
from jdist._src.checkpoint.checkpointer import newest_step

is_wrong = number == who
strategy = jdist.MirroredStrategy(jax.devices())


def make():
    return {"w": jnp.ones((8, 4)), "n": jdist.SyncOnRead(jnp.float32(jdist.replica_id()), "sum")}


state = strategy.init(make)
other = {**state, "w": np.ones((8, 5), np.float32)}


def hear(what, function):
    try:
        print(f"{what}: went well {function()}", flush=True)
    except Exception as error:
        text = str(error).replace("\n", " ")
        print(f"{what}: {type(error).__name__}: {text}", flush=True)


with jdist.Checkpointer(folder / "run") as checkpointer:

    def save(step, state=state, position=None, **options):
        return checkpointer.save(step, state, position, **options)

    hear("leaf", lambda: save(1, {**state, "w": "text"} if is_wrong else state))
    hear("position", lambda: save(1, position=object() if is_wrong else {"batch": 1}))
    hear("extra", lambda: save(1, extra={"f": len} if is_wrong else None))
    hear("step of a wrong kind", lambda: save("1" if is_wrong else 1))
    hear("first", lambda: save(1))
    hear("steps", lambda: save(3 if is_wrong else 2))
    hear("states", lambda: save(2, other if is_wrong else state))
    hear("positions", lambda: save(2, position={"batch": 8 if is_wrong else 7}))
    hear("second", lambda: save(2))
    hear("behind", lambda: save(1 if is_wrong else 3))
    hear("calls", lambda: checkpointer.restore(strategy) if is_wrong else save(3))
    hear("like", lambda: checkpointer.restore(strategy, other if is_wrong else state))
    hear("restored steps", lambda: checkpointer.restore(strategy, step=1 if is_wrong else 2))
    hear("no strategy", lambda: checkpointer.restore(None if is_wrong else strategy))
    hear("restored", lambda: float(jdist.read_values(checkpointer.restore(strategy, state).state["n"])))
    hear("calls the other way round", lambda: save(3) if is_wrong else checkpointer.restore(strategy))
    hear("last", lambda: save(3))
    checkpointer.wait()

# A state of one process, on its own devices.
alone = jdist.OneDeviceStrategy(jax.local_devices()[0])
local = alone.init(lambda key: {**make(), "key": key}, jax.random.key(0))
with jdist.Checkpointer(folder / "alone") as checkpointer:
    hear("alone", lambda: checkpointer.save(1, local))

# On one process the newest checkpoint is another one, as where each process has a disk of its own.
with jdist.Checkpointer(folder / ("own" if is_wrong else "run")) as own:
    hear("resume", lambda: newest_step(own))

# The process that holds the coordinator leaves last.
jax.distributed.shutdown()
