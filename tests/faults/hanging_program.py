"""A loop on two processes in which one process does not take part any more, in one of several ways.

jdist run -n 2 hanging_program.py CASE FOLDER
"""

import atexit
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import jdist

case, folder = sys.argv[1:]
limit = float(os.environ.get("LIMIT", "2.5"))
strategy = jdist.MultiWorkerMirroredStrategy(communication_options=jdist.CommunicationOptions(timeout_seconds=limit))
process = jax.process_index()


@strategy.step
def train(w, x):
    return w + jdist.all_reduce("mean", x.mean()), None


@strategy.step
def other(w, x):
    gathered = jdist.all_gather(x, axis=0)
    return w + jdist.all_reduce("max", gathered.sum()), None


class Examples:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if (
            case == "loader" and process == 1 and index >= 24 and is_training
        ):  # not where the processes compare examples
            sleep_in_loader()
        return np.float32(index)


def sleep_in_loader():
    time.sleep(1000)


def hold_lock():
    """Holds Python's lock in a C call, on Linux."""
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


def wait_until_all_have_a_batch():
    """Waits until both processes have their batch: a stopped process cannot answer the other one."""
    pathlib.Path(f"{folder}_{process}").touch()
    while not pathlib.Path(f"{folder}_{1 - process}").exists():
        time.sleep(0.01)


checkpointer = jdist.Checkpointer(folder)
ids = strategy.run(jdist.replica_id)
w = strategy.init(lambda: jnp.float32(0))
is_training = False
batches = iter(strategy.distribute_dataset(Examples(), batch_size=2 * jax.process_count()))
is_training = True
if case == "branch":
    w, _ = other(w, next(batches))
for number, batch in enumerate(batches):
    if number == 3:
        if case == "early" and process == 1:
            break
        if case in ("stop_0", "stop_1"):
            wait_until_all_have_a_batch()
        if case in ("stop_0", "stop_1", "stop_0_first") and process == int(case[5]):
            os.kill(os.getpid(), signal.SIGSTOP)
        if case == "kill":
            atexit.register(print, "at exit", file=sys.stderr)
            if process == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if case == "trace" and process == 1:
            jax.jit(lambda x: (sleep_in_loader(), x)[1])(w)
        if case == "stop_0_first":
            time.sleep(1)  # then process 0, which stores the messages, is stopped
            checkpointer.save(number, w)
        if case == "lock" and process == 1:
            hold_lock()
        if case == "reduce" and process == 0:
            strategy.reduce("sum", ids, axis=None).block_until_ready()
        if case in ("reduce", "checkpoint", "agreement") and process == 1:
            threading.Event().wait()
        if case == "error" and process == 1:
            raise OSError("the file is damaged")
        if case == "checkpoint" or (case == "chief" and process == 0):
            checkpointer.save(number, w)
        if case == "agreement":
            strategy.put(1.0)
    step = other if case == "branch" and number == 3 and process == 1 else train
    w, _ = step(w, batch)
    float(w)
if case == "after" and process == 0:
    checkpointer.save(number, w)
print(f"process {process} is at its end", flush=True)
