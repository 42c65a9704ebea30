"""Trains on the digits, on one process of several."""

import pathlib
import sys

import jax
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
from digits import evaluate, make_state, train_step
from sklearn.datasets import load_digits

import jdist


def results_of_training():
    """Returns the final state and the results."""
    digits = load_digits()
    data = (digits.images / 16).astype(np.float32)[:100, ..., None], digits.target.astype(np.int32)[:100]

    strategy = jdist.MultiWorkerMirroredStrategy()
    local = len(jax.local_devices())
    batches = strategy.distribute_dataset(data, batch_size=32, shuffle=True, seed=3, epochs=2, remainder="pad")
    state = strategy.init(lambda key: make_state(key, len(batches)), jax.random.key(1))
    step = train_step.on(strategy, steps=len(batches))
    losses = []
    for batch, weights in batches:
        assert len(strategy.local_results(batch)) == local
        state, loss = step(state, batch, weights)
        losses.append(float(loss))
    with strategy.scope():
        metrics = evaluate(state["params"], batch, weights)
        assert evaluate.over(state["params"], batches.repeated(1))["examples"] == 100

    ids = strategy.run(jdist.replica_id)
    numbers = strategy.distribute_values_from_function(lambda context: np.float32(context.replica_id_in_sync_group))
    results = {
        "losses": losses,
        "examples": float(metrics["examples"].compute()),
        "correct": float(metrics["accuracy"].correct.total),
        "replicas": strategy.num_replicas_in_sync,
        "local_ids": [int(i) for i in strategy.local_results(ids)],
        "sum": float(strategy.reduce("sum", numbers, axis=None)),
        "gathered": np.asarray(strategy.gather(strategy.run(lambda i: i[None], (ids,)), axis=0)),
        "put": np.asarray(strategy.put(np.arange(3.0))),
    }
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        results["state" + jax.tree_util.keystr(path)] = np.asarray(leaf.addressable_shards[-1].data)
    return results
