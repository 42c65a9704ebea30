"""`VirtualView`: replicas whose number does not depend on the devices, each device running some of them in turn."""

from typing import Any, final

import jax

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.execution.backend import Backend, ReplicaFunction, ResultPlacements, replica_shapes
from jdist._src.execution.shard_map import map_over_mesh, partition_specs
from jdist._src.jaxpr.virtual_replicas import run_virtual_replicas
from jdist._src.jaxpr.virtual_values import Slots, is_stacked, join_slots, split_into_slots
from jdist._src.values.base import is_distributed


@final
class VirtualBackend(Backend):
    """Every device runs the program of one replica once for each of its own."""

    def trace(self, one: ReplicaFunction) -> Any:
        """See `View.trace`."""
        (axis,) = self.replicas.axes
        shapes = [replica_shapes(item, self.replicas.size) for item in one.items]
        sizes = [(axis, self.replicas.size)]
        return jax_compat.lower_hi_primitives(jax.make_jaxpr(one.fn, axis_env=sizes)(*shapes), sizes)

    def run(self, one: ReplicaFunction, program: Any, results: ResultPlacements) -> list[PyTree]:
        """See `View.run`."""
        mesh = self.replicas.mesh
        slots = Slots(mesh.axis_names, mesh.size, self.replicas.size)

        def run(*blocks: PyTree) -> list[PyTree]:
            arguments = [
                split_into_slots(block, slots) if is_distributed(item) and not item._is_replicated else block
                for item, block in zip(one.items, blocks, strict=True)
            ]
            values = run_virtual_replicas(program, jax.tree.leaves(arguments, is_leaf=is_stacked), slots)
            pairs = zip(results.placements, results.as_trees(values), strict=True)
            return [to_block(placement, tree) for placement, tree in pairs]

        def to_block(placement: Any, tree: PyTree) -> PyTree:
            if placement is not None and not placement._is_replicated:
                return join_slots(tree, placement._to_block, slots)
            assert not any(map(is_stacked, jax.tree.leaves(tree, is_leaf=is_stacked))), "proved replicated, but stacked"
            return tree

        return map_over_mesh(run, self.replicas, one.items, partition_specs(results.placements, self.replicas))(
            *one.blocks
        )
