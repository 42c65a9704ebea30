"""Processes that make different calls, or the same call with different arguments."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist._src.faults import watchdog

from laws import STATES


def error_of_different_calls(folder):
    """Returns the error of this process, of which process 0 makes another call than the others, and of the calls after it."""
    strategy = jdist.MultiWorkerMirroredStrategy()
    state = strategy.put(np.zeros(3, np.float32))
    checkpointer = jdist.Checkpointer(pathlib.Path(folder))
    try:
        if jax.process_index() == 0:
            checkpointer.save(1, state)
        else:
            strategy.run(lambda x: x + 1, (state,))
    except RuntimeError as error:
        later = lambda: checkpointer.save(1, state), lambda: float(strategy.run(lambda x: x + 2, (np.float32(1),)))
        results = [_attempt(call) for call in later]
        checkpointer.wait()
        return str(error), results
    return None


def errors_in_loops_over_streams():
    """Returns, for each kind of state, the error of a loop in which a host value differs, and of the next new program.

    Also for arrays and random keys on the devices of one process in place of the host value.
    """
    strategy, results = jdist.MultiWorkerMirroredStrategy(), {}
    watchdog._watchdog._board._compare_calls = lambda *_: (
        None
    )  # the agreements find it earlier, but not on a slow machine

    def rows():
        for number in range(100):
            yield np.full(4, number % 3, np.float32)

    def train(kind, scale_of=np.float32):
        make, replica_step = STATES[kind]()
        step = strategy.step(lambda state, batch, scale: replica_step(state, batch))
        state, number = strategy.init(make), 0
        for number, batch in enumerate(strategy.distribute_dataset(rows, batch_size=4, epochs=4)):
            state, _ = step(state, batch, scale_of(number > 30 and jax.process_index()))
        return number

    cases = {kind: lambda kind=kind: train(kind) for kind in STATES}
    cases |= {
        "array": lambda: train("dict", jnp.float32),
        "key": lambda: train("optax", lambda n: jax.random.key(int(n))),
    }
    for kind, case in cases.items():
        results[kind] = _attempt(case)
        results[f"{kind} later"] = _attempt(lambda: strategy.run(lambda x: x + 1, (np.float32(1),)))
    return results


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


def results_by_divergence(folder):
    """Returns the error of each case in which replicated values differ after the first call, and of cases without a difference."""
    strategy, is_first = jdist.MultiWorkerMirroredStrategy(), jax.process_index() == 0
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    data, model = (x, x.sum(-1)), (lambda key, x: jnp.zeros(4), lambda w, x: x @ w)
    trainer = jdist.Trainer(model, optax.sgd(0.1), optax.squared_error, strategy=strategy)
    checkpointer = jdist.Checkpointer(pathlib.Path(folder))

    def fit(*callbacks):
        options = {"batch_size": 8, "epochs": 2, "progress": "off", "callbacks": callbacks}
        return trainer.fit(data, validation_data=data, **options).steps

    def returning(moment, factor):
        def callback(event):
            if event.moment == moment and event.epoch == 0 or event.moment == moment == "end":
                return jdist.callbacks.CallbackResult(
                    state=dataclasses.replace(event.state, params=factor * event.state.params)
                )

        return callback

    def step_with(rate):
        def train(w, x, scale=1.0):
            return w - scale * rate * jdist.all_reduce("mean", x.mean()), None

        return strategy.step(train)

    first, second = step_with(0.1), step_with(0.01)
    batches = list(strategy.distribute_dataset(np.ones(32, np.float32), batch_size=8))

    def other_step():
        w = strategy.put(np.float32(0))
        w, _ = first(w, batches[0])
        w, _ = second(w, batches[1])
        w, _ = (first if is_first else second)(w, batches[2])
        return w

    def with_scales(*scales):
        w = strategy.put(np.float32(0))
        for batch, scale in zip(batches, scales, strict=False):
            w, _ = first(w, batch, scale)
        return fit()

    def unequal():
        device_values = [jax.device_put(np.full(3, is_first, np.float32), device) for device in jax.local_devices()]
        return jax.make_array_from_single_device_arrays((3,), strategy.put(np.float32(0)).sharding, device_values)

    cases = {
        "state of one": lambda: fit(*([returning("epoch", 2)] if is_first else [])),
        "last state of one": lambda: fit(*([returning("end", 2)] if is_first else [])),
        "other states": lambda: fit(returning("epoch", 2 if is_first else 3)),
        "host value": lambda: with_scales(np.float32(1), np.float32(1 if is_first else 2)),
        "host array": lambda: with_scales(np.float32(1), np.full((), 1 if is_first else 2, np.float32)),
        "step": lambda: other_step() is None or checkpointer.save(1, {"w": np.float32(0)}),
        "next call": lambda: fit(),
        "values": lambda: checkpointer.save(1, {"a": np.float32(1), "w": unequal()}),
        "same states": lambda: fit(returning("epoch", 2), jdist.callbacks.EarlyStopping()),
        "same values": lambda: with_scales(np.float32(1), np.float32(2)),
    }
    return {name: _attempt(case) for name, case in cases.items()}


def _attempt(case):
    try:
        return case()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
