"""`VirtualView`: replicas whose number does not depend on the devices, each device running some of them in turn."""

from typing import Any, final

import jax

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.execution.backend import OneReplica, Results, View
from jdist._src.execution.shard_map import over_mesh, specs_of
from jdist._src.jaxpr.virtual_replicas import run_in_turn
from jdist._src.values.virtual import given, is_rows, one_of, taken


@final
class VirtualView(View):
    """Every device runs the program of one replica once for each of its own."""

    def trace(self, one: OneReplica) -> Any:
        """See `View.trace`."""
        (axis,) = self.replicas.axes
        shapes = [one_of(item, self.replicas) for item in one.items]
        sizes = [(axis, self.replicas.size)]
        return jax_compat.lowered(jax.make_jaxpr(one.fn, axis_env=sizes)(*shapes), sizes)

    def run(self, one: OneReplica, program: Any, results: Results) -> list[PyTree]:
        """See `View.run`."""

        def run(*blocks: PyTree) -> list[PyTree]:
            pairs = zip(one.items, blocks, strict=True)
            arguments = [taken(item, block, self.replicas) for item, block in pairs]
            values = run_in_turn(program, jax.tree.leaves(arguments, is_leaf=is_rows), self.replicas)
            pairs = zip(results.placements, results.as_trees(values), strict=True)
            return [given(placement, tree, self.replicas) for placement, tree in pairs]

        return over_mesh(run, self.replicas, one.items, specs_of(results.placements, self.replicas))(*one.blocks)
