"""Trains with slow steps, saves a checkpoint after SIGTERM, and continues from it when it starts again.

jdist run -n N preempted_program.py KIND FOLDER
"""

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist.callbacks import Checkpoint, Preemption

kind, folder = sys.argv[1:]
strategy = jdist.MultiWorkerMirroredStrategy()
process = jax.process_index()
rows = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)
targets = rows @ np.float32([1, -2, 3])
checkpointer = jdist.Checkpointer(folder, every=7)


def report_id():
    """Prints the id of this process. In `loop` SIGTERM is handled from then on; before, it would end the process."""
    print(f"process {process} has the id {os.getpid()}", flush=True)


def report(step):
    print(f"process {process} took step {step}", flush=True)
    time.sleep(0.05)  # JAX needs up to a second to notice a signal


def loop():
    optimizer = optax.adam(1e-2)

    @strategy.step
    def step(state, x, y):
        w, opt_state = state
        grads = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        updates, opt_state = optimizer.update(jdist.all_reduce("mean", grads), opt_state)
        return (optax.apply_updates(w, updates), opt_state), None

    def make():
        return jnp.zeros(3), optimizer.init(jnp.zeros(3))

    batches = iter(strategy.distribute_dataset((rows, targets), batch_size=8, shuffle=True, epochs=6))
    state = strategy.init(make)
    if checkpointer.latest is not None:
        restored = checkpointer.restore(strategy, like=state)
        state = restored.state
        batches.set_state(restored.data_position)
    with jdist.PreemptionCheckpointHandler(checkpointer, data=batches) as handler:
        report_id()
        for x, y in batches:
            state, _ = handler.run(step, state, x, y)
            checkpointer.save(handler.total_run_calls, state, batches.get_state())
            report(handler.total_run_calls)
    return state[0]


def fit():
    model = (lambda key, x: {"w": jnp.zeros(x.shape[-1])}, lambda params, x: x @ params["w"])
    trainer = jdist.Trainer(model, optax.adam(1e-2), optax.squared_error, strategy=strategy)

    def log(event):
        match event.moment:
            case "start":
                report_id()
            case "step":
                report(event.step)

    callbacks = [log, Checkpoint(checkpointer), Preemption(checkpointer)]
    options = {"batch_size": 8, "epochs": 6, "callbacks": callbacks, "resume": checkpointer, "progress": "off"}
    return trainer.fit((rows, targets), **options).state.params["w"]


w = np.asarray({"loop": loop, "fit": fit}[kind]())
checkpointer.close()
print(f"process {process} ends with {w.tobytes().hex()}", flush=True)
