"""One process of several that train on the digits together; writes the final state and results.

python digits_worker.py COORDINATOR COUNT NUMBER FOLDER
"""

import pathlib
import sys

import jax
import numpy as np

address, count, number, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
if count > 1:
    jax.distributed.initialize(address, count, number, coordinator_bind_address=address)

from digits import count_correct, make_state, make_step
from sklearn.datasets import load_digits

import jdist

digits = load_digits()
data = (digits.images / 16).astype(np.float32)[:100, ..., None], digits.target.astype(np.int32)[:100]

strategy = jdist.MirroredStrategy(jax.devices())
local = len(jax.local_devices())
batches = strategy.distribute_dataset(data, batch_size=32, shuffle=True, seed=3, epochs=2, remainder="pad")
state = strategy.init(lambda key: make_state(key, len(batches)), jax.random.key(1))
step = strategy.step(make_step(len(batches)))
losses = []
for batch, weights in batches:
    assert len(strategy.local_results(batch)) == local
    state, loss = step(state, batch, weights)
    losses.append(float(loss))
correct, examples = strategy.run(count_correct, (state["params"], batch, weights))

ids = strategy.run(jdist.replica_id)
numbers = strategy.distribute_values_from_function(lambda context: np.float32(context.replica_id_in_sync_group))
results = {
    "losses": losses,
    "examples": float(examples),
    "correct": float(correct),
    "replicas": strategy.num_replicas_in_sync,
    "local_ids": [int(i) for i in strategy.local_results(ids)],
    "sum": float(strategy.reduce("sum", numbers, axis=None)),
    "gathered": np.asarray(strategy.gather(strategy.run(lambda i: i[None], (ids,)), axis=0)),
    "put": np.asarray(strategy.put(np.arange(3.0))),
}
for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    results["state" + jax.tree_util.keystr(path)] = np.asarray(leaf.addressable_shards[-1].data)
np.savez(folder / f"{count}_{number}.npz", **results)

# The process that hosts the coordinator exits last.
if count > 1:
    jax.distributed.shutdown()
