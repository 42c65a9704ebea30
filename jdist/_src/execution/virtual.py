"""`VirtualView`: replicas whose number does not depend on the devices, each device running some of them in turn."""

from typing import Any, final

import jax

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.execution.backend import Backend, ReplicaFunction, ResultPlacements
from jdist._src.execution.shard_map import map_over_mesh, partition_specs
from jdist._src.jaxpr.virtual_replicas import run_virtual_replicas
from jdist._src.jaxpr.virtual_values import is_stacked, join_slots, replica_shapes, split_into_slots


@final
class VirtualBackend(Backend):
    """Every device runs the program of one replica once for each of its own."""

    def trace(self, one: ReplicaFunction) -> Any:
        """See `View.trace`."""
        (axis,) = self.replicas.axes
        shapes = [replica_shapes(item, self.replicas) for item in one.items]
        sizes = [(axis, self.replicas.size)]
        return jax_compat.lower_hi_primitives(jax.make_jaxpr(one.fn, axis_env=sizes)(*shapes), sizes)

    def run(self, one: ReplicaFunction, program: Any, results: ResultPlacements) -> list[PyTree]:
        """See `View.run`."""

        def run(*blocks: PyTree) -> list[PyTree]:
            pairs = zip(one.items, blocks, strict=True)
            arguments = [split_into_slots(item, block, self.replicas) for item, block in pairs]
            values = run_virtual_replicas(program, jax.tree.leaves(arguments, is_leaf=is_stacked), self.replicas)
            pairs = zip(results.placements, results.as_trees(values), strict=True)
            return [join_slots(placement, tree, self.replicas) for placement, tree in pairs]

        return map_over_mesh(run, self.replicas, one.items, partition_specs(results.placements, self.replicas))(
            *one.blocks
        )
