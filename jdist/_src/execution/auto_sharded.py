"""`AutoShardedBackend`: one replica over all devices, in the global view; XLA partitions its computation.

The step is traced with an axis `"replica"` of size one, so that the replication analysis applies to it as under the other
backends. The collectives over this axis are then removed (`jdist._src.jaxpr.single_replica`), because XLA does not have this
axis. Sharding constraints on the arguments, the state and the results determine how XLA splits the work, and XLA inserts the
collectives.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, final

import jax
from jax.sharding import NamedSharding

from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.backend import Backend, ProgramSpec, ReplicaFunction
from jdist._src.execution.device_offload import copy_to_mesh
from jdist._src.execution.placement_stages import PlacedResults, constrain
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import ReplicaResults, Results
from jdist._src.jaxpr.single_replica import eliminate_collectives
from jdist._src.values.array_checks import is_in_host_memory
from jdist._src.values.array_copies import to_device_memory
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.state_sharding import StateSharding


@final
class AutoShardedBackend(Backend):
    """One replica over all devices.

    Args:
        replicas: The one replica and its mesh.
        state_sharding: The rules that split the leaves of a state, and select the leaves that are stored in host memory
            between programs. A program copies these to the devices first.
    """

    def __init__(self, replicas: Replicas, state_sharding: StateSharding):
        super().__init__(replicas)
        self._rules = self.state_sharding = state_sharding

    def trace(self, function: ReplicaFunction) -> Any:
        """See `Backend.trace`. As under `jax.set_mesh`: sharding annotations and `jax.shard_map` use the mesh."""
        with self._mesh_in_context():
            return super().trace(function)

    def run(self, function: ReplicaFunction, program: Any, results: ReplicaResults) -> list[PyTree]:
        """See `Backend.run`."""
        state, inputs = function.unwrapped[: function.num_state], function.items[function.num_state :]
        arguments = jax.tree.leaves(jax.tree.map(to_device_memory, [*state, *map(self._constrain_batch, inputs)]))
        with self._mesh_in_context():
            leaves = eliminate_collectives(program, self.replicas.axes, arguments)
        return results.to_blocks(results.as_trees(leaves))

    def state_shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """See `Backend.state_shardings`."""
        items = jax.tree.leaves(tree, is_leaf=is_distributed)
        is_batch = [isinstance(item, PerReplica) for item in items for _ in jax.tree.leaves(item)]
        rows = zip(is_batch, self.input_shardings(tree), self._rules.shardings(tree, is_state), strict=True)
        return [batch if per_replica else split for per_replica, batch, split in rows]

    def to_mesh(self, tree: PyTree) -> PyTree:
        """Returns `tree` with the leaves that are stored in host memory replicated on the mesh."""
        return copy_to_mesh(tree, is_in_host_memory, self.replicas.replicated_sharding)

    def stages(self, spec: ProgramSpec) -> Sequence[Stage]:
        """See `Backend.stages`."""
        return [PlacedResults(self._place_results)]

    def _place_results(self, state: PyTree, outputs: PyTree) -> Results:
        is_state = bool(jax.tree.leaves(state))
        new_state = constrain(state, self.state_shardings(state, is_state))
        return new_state, constrain(outputs, self.input_shardings(outputs))

    def _mesh_in_context(self) -> contextlib.AbstractContextManager[Any]:
        # `jax.set_mesh` cannot be called while JAX traces.
        return jax.sharding.use_abstract_mesh(self.replicas.mesh.abstract_mesh)

    def _constrain_batch(self, item: Any) -> PyTree:
        if isinstance(item, PerReplica):
            return constrain(item, self.input_shardings(item))
        return getattr(item, "tree", item)
