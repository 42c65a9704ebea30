"""One process of several that export a state, save its weights, and load both.

python export_worker.py COORDINATOR COUNT NUMBER FOLDER
"""

import sys

import jax

address, count, number, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
jax.distributed.initialize(address, count, number, coordinator_bind_address=address)

import numpy as np

import jdist
from jdist import weights
from jdist._src.export.export import export
from jdist._src.export.load import load

x = np.arange(8, dtype=np.float32).reshape(2, 4)
for strategy in (
    jdist.MirroredStrategy(jax.devices()),
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
try:
    weights.save(f"{folder}/none/w", state)
except FileNotFoundError as error:
    print(f"FileNotFoundError: {error}")
except RuntimeError as error:
    print(f"RuntimeError: {error}")
