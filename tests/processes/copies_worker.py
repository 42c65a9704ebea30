"""Compares copies of values in one process of several, some of which differ."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist

from corruption import corrupt_leaf, flip

W = np.float32(range(12)).reshape(4, 3)


def _result(tree):
    """Returns the differences, or the text of another error."""
    try:
        jdist.debug.check_replicated(tree)
    except jdist.debug.CopiesDifferError as error:
        found = [
            [d.leaf, [jax.devices().index(device) for device in d.devices], d.processes, d.has_majority]
            for d in error.differences
        ]
        return repr(found)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "equal"


def _assertion(tree):
    """Returns the text of the error of `assert_replicated`."""
    try:
        jdist.testing.assert_replicated(tree)
    except AssertionError as error:
        return str(error)
    return "equal"


def results():
    """Returns what `check_replicated` finds, by the kind of tree."""
    strategy = jdist.MultiWorkerMirroredStrategy()
    process, last = jax.process_index(), strategy.devices[-1]
    bit = flip(3, 9) if process == last.process_index else (lambda block: None)
    state = strategy.put({"w": W, "b": jdist.Mirrored(W[0])})
    integers = strategy.put(W.astype(np.int32))
    hybrid = jdist.ShardedStrategy(mesh=jax.sharding.Mesh(np.array(jax.devices()), ("data",)))
    return {
        "equal": _result(state),
        "one bit": _result(corrupt_leaf(state, 1, last, bit)),
        "a local change on process 0": _result(
            corrupt_leaf(state, 0, jax.local_devices()[0], flip() if process == 0 else (lambda block: None))
        ),
        "after an error": _result(state),
        "assertion of equal copies": _assertion(state),
        "assertion": _assertion(corrupt_leaf(state, 1, last, bit)),
        "per replica": _result(strategy.put(jdist.PerReplica(np.float32(range(strategy.num_replicas_in_sync))))),
        "sharded": _result(hybrid.put({"w": W})),
        "equal numbers": _result({"rate": 0.1, "step": 10**30, "x": np.ones(3), "y": jnp.ones(2)}),
        "numbers": _result({"w": state["w"], "rate": 0.1 + process}),
        "arrays of the host": _result({"x": np.float32([0, -0.0 if process else 0.0])}),
        "arrays on one device": _result({"x": jnp.float32(process), "y": jnp.ones(2)}),
        "another leaf": _result({"w": state["w"], **({"v": state["w"]} if process else {})}),
        "no leaf": _result(state if process else {}),
        "another dtype": _result(state if process else {**state, "w": integers}),
        "a bad leaf": _result(state if process else {"w": state["w"], "b": "text"}),
        "again": _result(state),
        "of each process": _result(jdist.MirroredStrategy(jax.local_devices()).put({"w": W + process})),
    }


class _FlipBit(jdist.callbacks.Callback):
    is_collective = True
    identity = "flip"

    def __call__(self, event):
        if event.moment == "step" and event.step == 7:
            change = flip(2, 21) if jax.process_index() == 1 else (lambda block: None)
            params = corrupt_leaf(event.state.params, 0, jax.devices()[-1], change)
            return jdist.callbacks.CallbackResult(state=dataclasses.replace(event.state, params=params))


def fit_result(steps_per_call):
    """Returns the error of a `fit` in which the last device of process 1 has another parameter after step 7."""
    model = (lambda key, x: {"w": jnp.zeros(4)}), (lambda p, x: x @ p["w"])
    trainer = jdist.Trainer(
        model, optax.adam(0.1), lambda y, t: (y - t) ** 2, strategy=jdist.MultiWorkerMirroredStrategy()
    )
    data = np.random.default_rng(0).normal(size=(240, 4)).astype(np.float32), np.ones(240, np.float32)
    callbacks = [_FlipBit(), jdist.callbacks.CheckReplicated(every=5)]
    try:
        trainer.fit(data, batch_size=24, epochs=4, callbacks=callbacks, progress="off", steps_per_call=steps_per_call)
    except Exception as error:
        return [type(error.__cause__).__name__, str(error.__cause__ or error)]
    return ["no error", ""]
