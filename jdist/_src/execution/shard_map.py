"""`ReplicaView`: one replica a device, in the body of one `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
from jax.sharding import PartitionSpec

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.backend import OneReplica, Results, View
from jdist._src.values.base import is_distributed


@final
class ReplicaView(View):
    """Every device runs the function of one replica, on its own part of what is not mirrored."""

    def trace(self, one: OneReplica) -> Any:
        """See `View.trace`."""
        traced = jax.make_jaxpr(over_mesh(one.fn, self.replicas, one.items, PartitionSpec()))(*one.blocks)
        return jax_compat.lowered(jax_compat.shard_map_body(traced), self.replicas.mesh.shape.items())

    def run(self, one: OneReplica, program: Any, results: Results) -> list[PyTree]:
        """See `View.run`. Runs the jaxpr that was analyzed: a second trace of the function could give another one."""
        evaluate = jax_compat.function_of(program)
        run = lambda *blocks: results.leave(results.as_trees(evaluate(*jax.tree.leaves(blocks))))
        return over_mesh(run, self.replicas, one.items, specs_of(results.placements, self.replicas))(*one.blocks)


def over_mesh(fn: Callable[..., Any], replicas: Replicas, items: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
    """`fn` of what each device holds of `items`, on all devices."""
    specs = specs_of([type(item) if is_distributed(item) else None for item in items], replicas)
    return jax.shard_map(fn, mesh=replicas.mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)


def specs_of(wrappers: Sequence[Any], replicas: Replicas) -> list[PartitionSpec]:
    """How values in wrappers of these classes are split over the devices; None for what is in no wrapper."""
    return [wrapper.spec(replicas.row_axes) if wrapper else PartitionSpec() for wrapper in wrappers]
