"""One of two processes that save and restore together, where the disk of one of them fails; prints what it hears.

python failures_worker.py COORDINATOR COUNT NUMBER FOLDER WHO
"""

import contextlib
import os
import pathlib
import resource
import signal
import sys
import time

import jax
import numpy as np
import optax

address, count, number, folder, who = (
    *sys.argv[1:2],
    *map(int, sys.argv[2:4]),
    pathlib.Path(sys.argv[4]),
    int(sys.argv[5]),
)
jax.distributed.initialize(address, count, number, coordinator_bind_address=address)

from jax.sharding import Mesh

import jdist
from jdist._src.checkpoint.process_sync import ProcessGroup
from jdist._src.core.jax_compat import key_value_store

strategy = jdist.ShardedStrategy("all", Mesh(np.array(jax.devices()), ("data",)))
state = strategy.init(lambda key: {"w": jax.random.normal(key, (1024, 512))}, jax.random.key(0))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that grows too large is an error then, as on a full disk


@contextlib.contextmanager
def disk_takes(bytes_a_file):
    """On process `who`."""
    if number == who:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_a_file, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def hear(what, function):
    try:
        print(what, "went well", function(), flush=True)
    except jdist.CheckpointError as error:
        print(what, str(error).replace("\n", " "), flush=True)


def trained():
    """Trains with a checkpoint every second step, none of which can be written."""
    model = (lambda key, x: {"w": jax.random.normal(key, (1024, 512))}, lambda params, x: x @ params["w"])
    trainer = jdist.Trainer(model, optax.sgd(0.1), lambda y, _: (y**2).mean(-1), strategy=strategy)
    data = (np.ones((24, 1024), np.float32), np.zeros(24, np.float32))
    checkpointer = jdist.Checkpointer(folder / "run", every=2)
    try:
        trainer.fit(data, batch_size=4, callbacks=[jdist.callbacks.Checkpoint(checkpointer)], progress="off")
    except jdist.FitError as error:
        read = float(jax.jit(lambda w: w.sum(), out_shardings=strategy.replicas.whole)(error.fit.state.params["w"]))
        return type(error.__cause__).__name__, error.fit.steps, int(error.fit.state.step), read == read


with jdist.Checkpointer(folder / "checkpoints") as checkpointer:

    def saved(step):
        checkpointer.save(step, state)
        checkpointer.wait()
        return checkpointer.steps()

    hear("before:", lambda: saved(1))
    with disk_takes(300_000):
        hear("in the background:", lambda: saved(2))
    with disk_takes(30_000):
        hear("before it begins:", lambda: saved(2))
    try:
        raise ValueError("one of the caller's, which is none of the disk's")
    except ValueError:
        hear("after:", lambda: saved(3))

    with disk_takes(300_000):
        hear("training:", trained)

    if number == 0:  # a file of one of the parts that process `who` reads
        part = "ocdbt.process_1" if who else "ocdbt.process_0"
        largest = max(
            (folder / "checkpoints" / "3" / "arrays" / part).glob("d/*"), key=lambda file: file.stat().st_size
        )
        os.truncate(largest, 100_000)
    strategy.put(1)  # all are here
    hear("damaged:", lambda: checkpointer.restore(strategy).step)
    found = checkpointer.restore(strategy, step=1).state["w"]
    mine, saved_by_me = ([np.asarray(part.data) for part in x.addressable_shards] for x in (found, state["w"]))
    print("whole:", np.array_equal(mine, saved_by_me), flush=True)

    counts = []
    for often in (1, 5):
        for _ in range(often):
            checkpointer.restore(strategy, step=1)
        strategy.put(1)
        counts.append(len(key_value_store().key_value_dir_get("jdist/checkpoint")))
        strategy.put(1)
    print("keys:", counts, flush=True)

    group = ProcessGroup()
    strategy.put(1)
    if number == who:
        time.sleep(1.5)
    else:
        hear("late:", lambda: group.meet(0.3))
    strategy.put(1)
    group.leave()

# The process that holds the coordinator leaves last.
jax.distributed.shutdown()
