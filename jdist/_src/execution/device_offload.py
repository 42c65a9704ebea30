"""`DeviceOffloadBackend`: one replica per device, and a state that is stored on one device between steps."""

from collections.abc import Callable, Sequence
from typing import final

import jax
import numpy as np
from jax.sharding import NamedSharding

from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas, mesh_of_replicas, replicated_sharding
from jdist._src.execution.backend import ProgramSpec
from jdist._src.execution.cpu_stages import DonatedMemory
from jdist._src.execution.placement_stages import Storage
from jdist._src.execution.shard_map import ShardMapBackend
from jdist._src.execution.stage import Stage
from jdist._src.values.array_checks import is_device_array
from jdist._src.values.state_sharding import StateSharding


@final
class DeviceOffloadBackend(ShardMapBackend):
    """Copies the offloaded leaves of the state to all devices before a step, and one copy of them back after it.

    Args:
        replicas: The replicas.
        state_sharding: The rules that select the offloaded leaves.
        device: The device that stores them. It may compute too, and may be of another platform than the mesh.
    """

    def __init__(self, replicas: Replicas, state_sharding: StateSharding, device: jax.Device):
        super().__init__(replicas, state_sharding)
        self._rules = state_sharding
        self._storage = replicated_sharding(mesh_of_replicas(np.array([device]), ()))

    def state_shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """See `Backend.state_shardings`."""
        pairs = zip(self._rules.is_split(tree), self.input_shardings(tree), strict=True)
        return [self._storage if is_offloaded else on_mesh for is_offloaded, on_mesh in pairs]

    def call_shardings(self, state: PyTree) -> list[NamedSharding]:
        """See `Backend.call_shardings`."""
        return self.input_shardings(state)

    def accepts(self, array: jax.Array) -> bool:
        """See `Backend.accepts`."""
        return array.sharding == self._storage

    def stages(self, spec: ProgramSpec) -> Sequence[Stage]:
        """See `Backend.stages`."""
        storage = Storage(self.to_mesh, self._to_storage, spec.donates)
        return [DonatedMemory(checks_every_call=True), storage] if spec.donates else [storage]  # before the copies

    def to_mesh(self, tree: PyTree) -> PyTree:
        """Returns `tree` with the leaves that are stored on the device replicated on the mesh."""
        return copy_to_mesh(tree, self.accepts, self.replicas.replicated_sharding)

    def _to_storage(self, state: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(state)
        return treedef.unflatten(jax.device_put(leaves, self.state_shardings(state, is_state=False), donate=True))


def copy_to_mesh(tree: PyTree, is_offloaded: Callable[[jax.Array], bool], sharding: NamedSharding) -> PyTree:
    """Returns `tree` with its offloaded arrays copied to `sharding`, all by one `jax.device_put`."""
    leaves, treedef = jax.tree.flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if is_device_array(leaf) and is_offloaded(leaf)]
    copies = jax.device_put([leaves[i] for i in indices], sharding)
    for i, copy in zip(indices, copies, strict=True):
        leaves[i] = copy
    return treedef.unflatten(leaves)
