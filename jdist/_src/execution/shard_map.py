"""`ReplicaView`: one replica a device, in the body of one `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
from jax.sharding import PartitionSpec

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.backend import Backend, ReplicaFunction, ResultPlacements
from jdist._src.values.base import is_distributed


@final
class ShardMapBackend(Backend):
    """Every device runs the function of one replica, on its own part of what is not mirrored."""

    def trace(self, one: ReplicaFunction) -> Any:
        """See `View.trace`."""
        traced = jax.make_jaxpr(map_over_mesh(one.fn, self.replicas, one.items, PartitionSpec()))(*one.blocks)
        return jax_compat.lower_hi_primitives(jax_compat.shard_map_body(traced), self.replicas.mesh.shape.items())

    def run(self, one: ReplicaFunction, program: Any, results: ResultPlacements) -> list[PyTree]:
        """See `View.run`. Runs the jaxpr that was analyzed: a second trace of the function could give another one."""
        evaluate = jax_compat.jaxpr_function(program)
        run = lambda *blocks: results.leave(results.as_trees(evaluate(*jax.tree.leaves(blocks))))
        return map_over_mesh(run, self.replicas, one.items, partition_specs(results.placements, self.replicas))(
            *one.blocks
        )


def map_over_mesh(
    fn: Callable[..., Any], replicas: Replicas, items: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """`fn` of what each device holds of `items`, on all devices."""
    specs = partition_specs([type(item) if is_distributed(item) else None for item in items], replicas)
    return jax.shard_map(fn, mesh=replicas.mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)


def partition_specs(wrappers: Sequence[Any], replicas: Replicas) -> list[PartitionSpec]:
    """How values in wrappers of these classes are split over the devices; None for what is in no wrapper."""
    return [wrapper.spec(replicas.per_replica_axes) if wrapper else PartitionSpec() for wrapper in wrappers]
