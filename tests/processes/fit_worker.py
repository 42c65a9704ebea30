"""Trains, stops, resumes, evaluates and predicts on one process of several."""

import copy
import pathlib

import jax
import numpy as np
import optax
from flax import nnx

import jdist
from jdist.callbacks import CallbackResult, Moment

from digits_data import load_digits

IMAGES, LABELS = load_digits()
DIGITS = IMAGES.reshape(-1, 64), LABELS
MODEL = (
    lambda key, x: {"w": 0.1 * jax.random.normal(key, (64, 10))},
    lambda params, x: x @ params["w"],
)
OPTIMIZERS = {"adam": optax.adam(1e-2), "top_k": optax.chain(jdist.sync.top_k(0.2), optax.sgd(0.5))}


def results_by_optimizer(folder):
    """Returns the parameters, numbers of steps, losses and predictions."""
    folder, count, number = pathlib.Path(folder), jax.process_count(), jax.process_index()

    def stop_on_last_process(event):
        """Requests a stop on one process only; all processes stop at the same step."""
        if event.moment is Moment.STEP and event.step >= 5 and number == count - 1:
            return CallbackResult(stop_reason="Enough.")

    results = {}
    for name, optimizer in OPTIMIZERS.items():
        trainer = jdist.Trainer(
            MODEL,
            optimizer,
            optax.softmax_cross_entropy_with_integer_labels,
            metrics={"accuracy": jdist.metrics.Accuracy(), "nnx": nnx.metrics.Accuracy()},
            strategy=jdist.MultiWorkerMirroredStrategy(),
        )

        def fit(*callbacks, place=None, epochs=2, trainer=trainer):
            options = dict(batch_size=240, epochs=epochs, callbacks=callbacks, progress="off", validation_data=DIGITS)
            return trainer.fit(DIGITS, resume=place, **options)

        path = folder / f"{name}_{count}"
        with jdist.Checkpointer(path, every=3) as checkpointer:
            first = fit(jdist.callbacks.Checkpoint(checkpointer), stop_on_last_process, place=checkpointer)
            log = jdist.callbacks.JSONLog(path.with_suffix(".jsonl"), every=2)
            resumed = fit(jdist.callbacks.Checkpoint(checkpointer), log, place=checkpointer)
        uninterrupted = fit()
        best = copy.deepcopy(fit(jdist.callbacks.EarlyStopping("val_loss", restore_best=True)))
        assert best.state.params["w"].sharding == uninterrupted.state.params["w"].sharding
        for one, other in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(uninterrupted.state), strict=True):
            if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
                continue
            for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
                assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        resumed.report(path.with_suffix(f".{number}.html"))
        evaluated = trainer.evaluate(resumed.state, DIGITS, batch_size=200)
        assert evaluated["examples"] == 1797 and evaluated["nnx"] == evaluated["accuracy"]
        assert resumed.history["nnx"] == resumed.history["accuracy"]
        results |= {
            f"{name}/w": np.asarray(resumed.state.params["w"]),
            f"{name}/steps": np.array([first.steps, resumed.steps]),
            f"{name}/losses": np.array(list(uninterrupted.history.losses.values())),
            f"{name}/evaluated": np.array([evaluated["loss"], evaluated["accuracy"]]),
            f"{name}/predicted": trainer.predict(resumed.state, DIGITS[0], batch_size=200),
        }
    return results
