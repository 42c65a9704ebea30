"""One process of several that trace different programs; prints the error of each case.

python same_program_worker.py COORDINATOR COUNT NUMBER
"""

import functools
import sys

import jax
import numpy as np

address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, count, number, coordinator_bind_address=address)

import jax.numpy as jnp
import optax

import jdist
from jdist._src.values import same_program

strategy = jdist.MirroredStrategy(jax.devices())
rng = np.random.default_rng(number)
other = np.random.default_rng(number)  # another seed on each process


def attempt(case, fn):
    try:
        fn()
        print(f"{case}: ran", flush=True)
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"{case}: {type(error).__name__}: {' '.join(str(error).split())}", flush=True)


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
attempt("argument", lambda: strategy.step(train)(strategy.put(state), np.float32(number)))
attempt("python", lambda: strategy.run(lambda x: x + 1, (float(number),)))
attempt("shape", lambda: strategy.run(lambda x: x + 1, (np.ones(2 + number, np.float32),)))
attempt("literal", lambda: strategy.step(with_rate(0.1 + number))(strategy.put(np.float32(1))))
attempt("branch", lambda: strategy.step(by_process)(strategy.put(np.float32(1))))
attempt("function", lambda: strategy.run(second if number else first, (1.0,)))
try:
    strategy.step(failing)(strategy.put(np.float32(1)))
except (KeyError, RuntimeError) as error:
    print(f"failing: {type(error).__name__}: {error}", flush=True)

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
print(f"same: {np.asarray(moved['w']).tolist()}", flush=True)
captured = jnp.arange(3.0)
print("captured:", np.asarray(strategy.run(functools.partial(lambda x: x + captured), (1.0,))).tolist(), flush=True)

# One process traces a program that the other does not call.
same_program._TIME_LIMIT, same_program._WARNING_INTERVAL = 4.0, 1.0
if number == 0:
    attempt("alone", lambda: strategy.run(lambda x: x + 2, (1.0,)))

# The process that hosts the coordinator exits last.
jax.distributed.shutdown()
