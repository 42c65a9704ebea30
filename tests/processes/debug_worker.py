"""Prints and checks in one process of several."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jdist


def lines():
    """Returns the lines that this process prints in two steps."""
    strategy = jdist.MultiWorkerMirroredStrategy()

    def step(state, x):
        def body(c, i):
            jdist.debug.print("{} {}", i, x)
            return c + jdist.all_reduce("sum", x), None

        return lax.scan(body, state, jnp.arange(2))[0], None

    step, state = strategy.step(step), strategy.init(lambda: jnp.float32(0))
    x = strategy.distribute_values_from_function(lambda context: np.float32(context.replica_id_in_sync_group))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for _ in range(2):
            state, _ = step(state, x)
    return output.getvalue().splitlines()


def error_of_check():
    """Returns the text of the error of a check that fails on the last replica, and the result of the call after it."""
    strategy = jdist.MultiWorkerMirroredStrategy()
    step = strategy.step(jdist.debug.checked(lambda w, x: (w + jdist.all_reduce("mean", jnp.sqrt(x)), None)))
    w = strategy.init(lambda: jnp.float32(1))
    last = strategy.num_replicas_in_sync - 1
    x = strategy.distribute_values_from_function(
        lambda context: np.float32(-1 if context.replica_id_in_sync_group == last else 1)
    )
    try:
        step(w, x)
    except jdist.debug.CheckError as error:
        text = [str(error), *map(str, error.replicas)]
    else:
        text = ["no error"]
    ones = strategy.distribute_values_from_function(lambda context: np.float32(1))
    w, _ = step(w, ones)
    return [*text, float(w.addressable_data(0)), jax.process_index()]
