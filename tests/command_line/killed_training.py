"""Trains a small network on the digits with checkpoints. The tests kill its processes.

    killed_training.py FOLDER [exact] [saves] [short] [slow]

Process 0 writes the parameters to the file `FOLDER/result` at the end. With `saves`, it resumes from the newest checkpoint in
`FOLDER`; after SIGTERM, all processes save a checkpoint of one step and end with status 42. With `slow`, training takes at least 25
seconds.
"""

import os
import pathlib
import sys
import time

import jax
import numpy as np
import optax

import jdist

from digits_data import load_digits

FOLDER, IS_EXACT, SAVES = pathlib.Path(sys.argv[1]), "exact" in sys.argv, "saves" in sys.argv
EPOCHS = 2 if "short" in sys.argv else 16  # of 8 steps
print("pid", os.getpid(), "of attempt", os.environ["JDIST_RESTARTS"], flush=True)

strategy = jdist.MultiWorkerMirroredStrategy(virtual_replicas=6 if IS_EXACT else None)
images, labels = load_digits()
data = images.reshape(-1, 64), labels


def init(key, x):
    del x
    return {
        "w": 0.1 * jax.random.normal(key, (64, 32)),
        "v": 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (32, 10)),
    }


def apply(params, x):
    return jax.nn.tanh(x @ params["w"]) @ params["v"]


def report(event):
    """Prints the first step of an attempt."""
    if event.moment is jdist.callbacks.Moment.STEP:
        report.number += 1
        time.sleep(0.2 * ("slow" in sys.argv))
        if report.number == 1:
            print("trains from step", event.step, flush=True)


report.number = 0
trainer = jdist.Trainer(
    (init, apply),
    optax.chain(jdist.sync.exact(), optax.adam(1e-2)) if IS_EXACT else optax.adam(1e-2),
    optax.softmax_cross_entropy_with_integer_labels,
    strategy=strategy,
    seed=1,
)
arguments = {"batch_size": 250, "epochs": EPOCHS, "progress": "off", "shuffle": True}
if SAVES:
    with jdist.Checkpointer(FOLDER / "checkpoints", every=4) as checkpointer:
        saving = [jdist.callbacks.Checkpoint(checkpointer), jdist.callbacks.Preemption(checkpointer)]
        fit = trainer.fit(data, callbacks=[*saving, report], resume=checkpointer, **arguments)
else:
    fit = trainer.fit(data, **arguments)
if jax.process_index() == 0:
    (FOLDER / "result").write_bytes(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(fit.state.params)))
