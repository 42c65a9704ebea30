"""`ShardMapBackend`: one replica per device, all in the body of one `jax.shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.backend import Backend, ReplicaFunction, ReplicaResults
from jdist._src.values.base import is_distributed


class ShardMapBackend(Backend):
    """Each device runs the function of one replica on its own block of every argument that is not replicated."""

    def trace(self, function: ReplicaFunction) -> Any:
        """See `Backend.trace`."""
        program = map_over_mesh(function.fn, self.replicas, function.items, PartitionSpec())
        traced = jax.make_jaxpr(program)(*function.unwrapped)
        return jax_compat.lower_hi_primitives(jax_compat.shard_map_body(traced), self.replicas.mesh.shape.items())

    def run(self, function: ReplicaFunction, program: Any, results: ReplicaResults) -> list[PyTree]:
        """See `Backend.run`."""
        out_specs = partition_specs(results.wrappers, self.replicas)
        return map_over_mesh(results.evaluator(program), self.replicas, function.items, out_specs)(*function.unwrapped)


def map_over_mesh(
    fn: Callable[..., Any], replicas: Replicas, items: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """Returns `fn` of the block of each item that one device holds, mapped over all devices of the mesh."""
    specs = partition_specs([type(item) if is_distributed(item) else None for item in items], replicas)
    return jax.shard_map(fn, mesh=replicas.mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)


def partition_specs(wrappers: Sequence[Any], replicas: Replicas) -> list[PartitionSpec]:
    """Returns the `PartitionSpec` of values in wrappers of these classes; None means a replicated value."""
    return [wrapper._partition_spec(replicas.per_replica_axes) if wrapper else PartitionSpec() for wrapper in wrappers]
