"""Two processes, of which one calls a checkpointer with other arguments."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import jdist
from jdist._src.checkpoint.checkpointer import latest_step


def results_by_case(folder, wrong_process):
    """Returns the result of each call as text."""
    folder, results = pathlib.Path(folder), {}
    is_wrong = jax.process_index() == wrong_process
    strategy = jdist.MultiWorkerMirroredStrategy()

    def make():
        return {"w": jnp.ones((8, 4)), "n": jdist.SyncOnRead(jnp.float32(jdist.replica_id()), "sum")}

    state = strategy.init(make)
    other = {**state, "w": np.ones((8, 5), np.float32)}

    def attempt(case, function):
        try:
            results[case] = f"returned {function()}"
        except Exception as error:
            text = str(error).replace("\n", " ")
            results[case] = f"{type(error).__name__}: {text}"

    with jdist.Checkpointer(folder / "run") as checkpointer:

        def save(step, state=state, position=None, **options):
            return checkpointer.save(step, state, position, **options)

        attempt("leaf", lambda: save(1, {**state, "w": "text"} if is_wrong else state))
        attempt("position", lambda: save(1, position=object() if is_wrong else {"batch": 1}))
        attempt("extra", lambda: save(1, extra={"f": len} if is_wrong else None))
        attempt("step of a wrong kind", lambda: save("1" if is_wrong else 1))
        attempt("first", lambda: save(1))
        attempt("steps", lambda: save(3 if is_wrong else 2))
        attempt("states", lambda: save(2, other if is_wrong else state))
        attempt("positions", lambda: save(2, position={"batch": 8 if is_wrong else 7}))
        attempt("second", lambda: save(2))
        attempt("earlier step", lambda: save(1 if is_wrong else 3))
        attempt("calls", lambda: checkpointer.restore(strategy) if is_wrong else save(3))
        attempt("like", lambda: checkpointer.restore(strategy, like=other if is_wrong else state))
        attempt("restored steps", lambda: checkpointer.restore(strategy, step=1 if is_wrong else 2))
        attempt("no strategy", lambda: checkpointer.restore(None if is_wrong else strategy))
        attempt("restored", lambda: float(jdist.read_values(checkpointer.restore(strategy, like=state).state["n"])))
        attempt("calls exchanged", lambda: save(3) if is_wrong else checkpointer.restore(strategy))
        attempt("last", lambda: save(3))
        checkpointer.wait()

    # A state of one process, on its own devices.
    local_strategy = jdist.OneDeviceStrategy(jax.local_devices()[0])
    local_state = local_strategy.init(lambda key: {**make(), "key": key}, jax.random.key(0))
    with jdist.Checkpointer(folder / "local") as checkpointer:
        attempt("one process", lambda: checkpointer.save(1, local_state))

    # One process sees another newest checkpoint, as if each process had its own disk.
    with jdist.Checkpointer(folder / ("other" if is_wrong else "run")) as checkpointer:
        attempt("resume", lambda: latest_step(checkpointer))
    return results
