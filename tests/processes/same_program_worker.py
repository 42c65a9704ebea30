"""Processes that trace different programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist._src.jaxpr.program_fingerprint import named_constant
from jdist._src.values import process_calls


def results_by_case():
    """Returns the result or the error of each case as text. Afterwards the processes cannot compare programs any more."""
    count, number, results = jax.process_count(), jax.process_index(), {}
    strategy = jdist.MultiWorkerMirroredStrategy()
    rng = np.random.default_rng(number)
    other = np.random.default_rng(number)  # another seed on each process

    def attempt(case, fn):
        try:
            fn()
            results[case] = "ran"
        except (ValueError, TypeError, RuntimeError) as error:
            results[case] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    def make():
        return {"w": jnp.asarray(rng.normal(size=3).astype(np.float32))}

    def train(state, rate):
        return jax.tree.map(lambda w: w - rate, state), None

    def with_rate(rate):
        return lambda state: (state * rate, None)

    def by_process(state):
        return (jnp.sin(state) if jax.process_index() else jnp.cos(state)), None

    def failing(state):
        if jax.process_index():
            raise KeyError("no such layer")
        return state, None

    def first(x):
        return x

    def second(x):
        return x

    state = {"w": jnp.ones(3)}
    attempt("init", lambda: strategy.init(make))
    attempt("init_shape", lambda: strategy.init(lambda: {"w": jnp.zeros(3 + number)}))
    weight = jnp.asarray(np.full(3, number, np.float32))
    attempt("named", lambda: strategy.init(lambda: {"w": named_constant("the weight `head`", weight)}))
    attempt("argument", lambda: strategy.step(train)(strategy.put(state), np.float32(number)))
    attempt("python", lambda: strategy.run(lambda x: x + 1, (float(number),)))
    attempt("shape", lambda: strategy.run(lambda x: x + 1, (np.ones(2 + number, np.float32),)))
    attempt("literal", lambda: strategy.step(with_rate(0.1 + number))(strategy.put(np.float32(1))))
    attempt("branch", lambda: strategy.step(by_process)(strategy.put(np.float32(1))))
    attempt("function", lambda: strategy.run(second if number else first, (1.0,)))
    try:
        strategy.step(failing)(strategy.put(np.float32(1)))
    except (KeyError, RuntimeError) as error:
        results["failing"] = f"{type(error).__name__}: {error}"

    model = (lambda key, x: {"w": jnp.asarray(other.normal(size=3).astype(np.float32))}, lambda p, x: x @ p["w"])
    trainer = jdist.Trainer(model, optax.sgd(0.1), optax.squared_error, strategy=strategy)
    data = np.ones((8, 3), np.float32), np.ones(8, np.float32)
    attempt("trainer", lambda: trainer.fit(data, batch_size=4, epochs=1, progress="off"))

    # The same program on all processes: traced, lowered on one process only, called again with other values.
    step = strategy.step(train)
    if number == 0:
        step.lower(strategy.put(state) if count == 1 else jax.tree.map(np.asarray, state), np.float32(1))
        assert "all-reduce" not in step.lower(state, np.float32(1)).as_text()
    moved = strategy.put(state)
    for rate in (np.float32(0.5), np.float32(0.25)):
        moved, _ = step(moved, rate)
    results["same"] = np.asarray(moved["w"]).tolist()
    captured = jnp.arange(3.0)
    results["captured"] = np.asarray(strategy.run(functools.partial(lambda x: x + captured), (1.0,))).tolist()

    # One process traces a program that the other does not call.
    process_calls._TIME_LIMIT = 4.0
    if number == 0:
        attempt("alone", lambda: strategy.run(lambda x: x + 2, (1.0,)))
    return results
