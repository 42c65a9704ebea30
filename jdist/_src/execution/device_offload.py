"""`StoredView`: one replica a device, and a state that lies on one device between steps."""

from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas, replicated_sharding
from jdist._src.execution.backend import Backend, ReplicaFunction, ResultPlacements
from jdist._src.execution.shard_map import ShardMapBackend
from jdist._src.values.arrays import is_device_array
from jdist._src.values.state_sharding import StateSharding


@final
class DeviceOffloadBackend(Backend):
    """One replica a device; before a step the central part of the state is sent to all of them, after it one copy is kept.

    Args:
        replicas: The replicas.
        layout: Which leaves are central.
        device: Where they lie. It may be one of those that compute, and of another platform.
    """

    def __init__(self, replicas: Replicas, layout: StateSharding, device: jax.Device):
        super().__init__(replicas)
        self.layout = layout
        self.home = self._storage = replicated_sharding(Mesh(np.array([device]), replicas.mesh.axis_names))
        self._backend = ShardMapBackend(replicas)

    def trace(self, one: ReplicaFunction) -> Any:
        """See `View.trace`."""
        return self._backend.trace(one)

    def run(self, one: ReplicaFunction, program: Any, results: ResultPlacements) -> list[PyTree]:
        """See `View.run`."""
        return self._backend.run(one, program, results)

    def shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """See `View.shardings`."""
        rules = zip(self.layout.is_split(tree), self.inputs(tree), strict=True)
        return [self._storage if is_central else plain for is_central, plain in rules]

    def fetched(self, tree: PyTree) -> PyTree:
        """See `View.fetched`."""
        return move_to_devices(tree, lambda leaf: leaf.sharding == self.home, self.replicas.whole)

    def stored(self, state: PyTree) -> PyTree:
        """See `View.stored`."""
        leaves, treedef = jax.tree.flatten(state)
        return treedef.unflatten(jax.device_put(leaves, self.shardings(state, is_state=False), donate=True))


def move_to_devices(tree: PyTree, lies_elsewhere: Callable[[jax.Array], bool], sharding: NamedSharding) -> PyTree:
    """`tree` with those of its arrays that lie elsewhere sent to where `sharding` says."""
    leaves, treedef = jax.tree.flatten(tree)
    central = [i for i, leaf in enumerate(leaves) if is_device_array(leaf) and lies_elsewhere(leaf)]
    for i, leaf in zip(central, jax.device_put([leaves[i] for i in central], sharding), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)
