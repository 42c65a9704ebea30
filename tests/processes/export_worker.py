"""Exports a state, saves its weights and loads both, on one process of several."""

import jax
import numpy as np

import jdist
from jdist import weights
from jdist._src.export.export import export
from jdist._src.export.load import load


def error_of_saving(folder):
    """Returns the error of a folder that does not exist."""
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for strategy in (
        jdist.MultiWorkerMirroredStrategy(),
        jdist.ShardedStrategy(mesh=jax.sharding.Mesh(jax.devices(), ("data",))),
    ):
        state = strategy.put(
            {"w": jdist.Sharded(np.arange(12, dtype=np.float32).reshape(4, 3)), "b": np.ones(3, np.float32)}
        )
        export(f"{folder}/x", lambda state, x: x @ state["w"] + state["b"], state, (x,))
        np.testing.assert_allclose(load(f"{folder}/x")(x), x @ np.arange(12).reshape(4, 3) + 1)
        weights.save(f"{folder}/w", state)
        loaded = weights.load(f"{folder}/w", like=state, strategy=strategy)
        assert [x.sharding for x in jax.tree.leaves(loaded)] == [x.sharding for x in jax.tree.leaves(state)]
    one_refuses = {**state, "text": "x"} if jax.process_index() == 1 else state
    one_differs = {**state, "b": state["b"][: 3 - jax.process_index()]}
    export_sum = lambda path, state: export(path, lambda state, x: x, state, (x,))
    for write in (weights.save, export_sum):
        for tree, expected in ((one_refuses, "text is str"), (one_differs, r"The processes differ in `tree`")):
            try:
                write(f"{folder}/refused", tree)
            except (TypeError, jdist.CheckpointError) as error:
                assert expected.replace("`tree`", "`state`" if write is export_sum else "`tree`") in str(error), error
            else:
                raise AssertionError("not refused")
    try:
        weights.save(f"{folder}/none/w", state)
    except (FileNotFoundError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def errors_of_one_process(folder):
    """Returns the error of each call that only process 1 refuses, and the results of calls that all make."""
    strategy, is_first = jdist.MultiWorkerMirroredStrategy(), jax.process_index() == 0
    path, own_path = f"{folder}/w", f"{folder}/{jax.process_index()}"
    state = strategy.put({"w": np.ones(3, np.float32)})
    weights.save(path, state)
    with open(own_path, "wb") as file, open(path, "rb") as saved:
        file.write(saved.read()[: None if is_first else 40])
    deleted = strategy.put(np.ones(4, np.float32))
    if not is_first:
        deleted.delete()
    other_names = state if is_first else {"v": state["w"]}
    cases = {
        "missing": lambda: weights.load(path if is_first else f"{folder}/none", strategy=strategy),
        "damaged": lambda: weights.load(own_path, strategy=strategy),
        "names": lambda: weights.load(path, strategy=strategy, like=other_names),
        "put": lambda: strategy.put({"w": deleted}),
        "split": lambda: strategy.split(deleted),
    }
    results = {name: _error_of(call) for name, call in cases.items()}
    if is_first:  # without a strategy, one process may load
        assert weights.load(path).keys() == {"w"}
    loaded = weights.load(path, strategy=strategy)
    return results | {"later": np.asarray(loaded["w"]).tolist()}


def _error_of(call):
    try:
        return call()
    except (ValueError, RuntimeError, FileNotFoundError, jdist.CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
