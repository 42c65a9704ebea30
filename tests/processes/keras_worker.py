"""Trains and evaluates a Keras model on one process of several."""

import os
import warnings

import jax
import numpy as np
import optax

import jdist


def results_of_training():
    """Returns the number of replicas, the weights after training, the loss and metric before it, and two errors.

    The errors are those of Keras' `fit`, and of a model that is built without a seed.
    """
    os.environ["KERAS_BACKEND"] = "jax"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import keras

    strategy = jdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    loss = lambda outputs, targets: (outputs - targets) ** 2
    metrics = {"mae": jdist.metrics.MeanAbsoluteError()}
    trainer = jdist.Trainer(model, optax.sgd(0.01), loss, metrics=metrics, strategy=strategy)
    x = np.arange(9, dtype=np.float32)[:, None]
    before = trainer.evaluate(trainer.init(x), (x, 2 * x), batch_size=4)
    fit = trainer.fit((x, 2 * x), batch_size=4, epochs=1, shuffle=False, progress="off")
    weights = [float(leaf.ravel()[0]) for leaf in jax.tree.leaves(jax.device_get(fit.state.params))]
    with strategy.scope():
        model.compile("sgd", "mse")
        try:
            model.fit(x, 2 * x, batch_size=3, verbose=0)
        except RuntimeError as error:
            refused = str(error)
    unseeded = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="head")])
    try:
        jdist.Trainer(unseeded, optax.sgd(0.01), loss, strategy=strategy).init(x)
        error = None
    except ValueError as unseeded_error:
        error = str(unseeded_error)
    return strategy.num_replicas_in_sync, sorted(weights), before["loss"], before["mae"], refused, error
