"""Processes that make different calls, or the same call with different arguments."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist


def error_of_different_calls(folder):
    """Returns the error of this process, of which process 0 makes another call than the others."""
    strategy = jdist.MultiWorkerMirroredStrategy()
    state = strategy.put(np.zeros(3, np.float32))
    checkpointer = jdist.Checkpointer(pathlib.Path(folder))
    try:
        if jax.process_index() == 0:
            checkpointer.save(1, state)
        else:
            strategy.run(lambda x: x + 1, (state,))
    except RuntimeError as error:
        return str(error)
    return None


def results_by_arguments(folder):
    """Returns the error of `fit`, `evaluate` or `predict` with different arguments on process 0, or the number of steps."""
    strategy, is_first = jdist.MultiWorkerMirroredStrategy(), jax.process_index() == 0
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    data = x, x.sum(-1)
    model = lambda key, x: jnp.zeros(4), lambda w, x: x @ w

    def trainer_with(**options):
        return jdist.Trainer(model, optax.sgd(0.1), optax.squared_error, strategy=strategy, **options)

    trainer, folder = trainer_with(), pathlib.Path(folder)
    state = trainer.init(x)
    logs = []

    def fit(trainer=trainer, **options):
        return trainer.fit(data, **{"batch_size": 8, "progress": "off", **options}).steps

    def user_callback(event):
        logs.append(event.step)

    both = {"validation_data": data}
    mean = jdist.callbacks.EMA
    stopping = jdist.callbacks.EarlyStopping
    checkpointer = jdist.Checkpointer(folder / f"run_{jax.process_index()}")
    cases = {
        "epochs": lambda: fit(epochs=2 if is_first else 3),
        "steps": lambda: fit(steps=2 if is_first else 3),
        "no steps": lambda: fit(**({} if is_first else {"steps": 2})),
        "batch_size": lambda: fit(batch_size=8 if is_first else 16),
        "shuffle": lambda: fit(shuffle=is_first),
        "validation": lambda: fit(**(both if is_first else {})),
        "validation sets": lambda: fit(validation_data={"a": data, **({"b": data} if is_first else {})}),
        "validate_every": lambda: fit(validate_every=2 if is_first else 3, **both),
        "resume": lambda: fit(**({"resume": folder / "none"} if is_first else {})),
        "state": lambda: fit(**({"state": state} if is_first else {})),
        "steps_per_call": lambda: fit(steps_per_call=2 if is_first else 1),
        "checkpoint": lambda: fit(callbacks=[jdist.callbacks.Checkpoint(checkpointer)] if is_first else []),
        "average": lambda: fit(callbacks=[mean(0.5)] if is_first else ()),
        "decay": lambda: fit(callbacks=[mean(0.5 if is_first else 0.75)]),
        "restore_best": lambda: fit(callbacks=[stopping("loss", restore_best=is_first)]),
        "metrics": lambda: fit(trainer_with(metrics={"a": jdist.metrics.Mean()} if is_first else None)),
        "non_finite": lambda: fit(trainer_with(non_finite="stop" if is_first else "skip")),
        "evaluate": lambda: trainer.evaluate(state, data, batch_size=8 if is_first else 16),
        "predict": lambda: trainer.predict(state, data, batch_size=8 if is_first else 16),
        "other call": lambda: fit() if is_first else trainer.evaluate(state, data, batch_size=8),
        "program": lambda: fit() if is_first else strategy.run(lambda x: x + 1, (state.params,)),
        "logs": lambda: fit(
            callbacks=[jdist.callbacks.CSVLog(folder / "log.csv"), user_callback] if is_first else [],
            progress="lines" if is_first else "off",
        ),
        "numpy": lambda: fit(epochs=np.int64(1) if is_first else 1),
    }
    return {name: _attempt(case) for name, case in cases.items()} | {"events": len(logs) > 0}


def _attempt(case):
    try:
        return case()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
