"""`ShardMapBackend`: one replica per device or group of devices, all in the body of one `jax.shard_map`.

The body is manual over the replica axes of the mesh. Over its model axes it is automatic: XLA partitions the computation of one
replica over the devices of its group, and the function may contain a `jax.shard_map` over these axes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.backend import Backend, ProgramSpec, ReplicaFunction
from jdist._src.execution.placement_stages import PlacedResults, constrain
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import ReplicaResults, Results
from jdist._src.jaxpr.single_replica import eliminate_collectives
from jdist._src.jaxpr.trace_errors import check_no_callback
from jdist._src.jaxpr.wide_reductions import widened
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.sharded import Sharded
from jdist._src.values.state_sharding import StateSharding


class ReplicaBackend(Backend):
    """A backend of replicas that are devices, or groups of devices along the model axes of the mesh.

    Args:
        replicas: The replicas and their mesh.
        state_sharding: The rules that partition the state of a replica over the model axes, if there are any.
    """

    def __init__(self, replicas: Replicas, state_sharding: StateSharding | None = None):
        super().__init__(replicas)
        self.state_sharding = state_sharding

    def state_shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """See `Backend.state_shardings`."""
        by_replica = self.input_shardings(tree)
        if self.state_sharding is None:
            return by_replica
        items = jax.tree.leaves(tree, is_leaf=is_distributed)
        # A batch, and one value that is split over the replicas, are not partitioned within a replica.
        is_split = [isinstance(item, (PerReplica, Sharded)) for item in items for _ in jax.tree.leaves(item)]
        rows = zip(is_split, by_replica, self.state_sharding.shardings(tree, is_state), strict=True)
        return [own if split else partitioned for split, own, partitioned in rows]

    def stages(self, spec: ProgramSpec) -> Sequence[Stage]:
        """See `Backend.stages`. Outputs are replicated within a replica."""
        return [PlacedResults(self._place_results)] if self.state_sharding else []

    def _place_results(self, state: PyTree, outputs: PyTree) -> Results:
        new_state = constrain(state, self.state_shardings(state, bool(jax.tree.leaves(state))))
        return new_state, constrain(outputs, self.input_shardings(outputs))


class ShardMapBackend(ReplicaBackend):
    """Each device runs the function of one replica on its own block of every argument that is not replicated."""

    def trace(self, function: ReplicaFunction) -> Any:
        """See `Backend.trace`."""
        program = map_over_mesh(function.fn, self.replicas, function.items, PartitionSpec())
        traced = jax.make_jaxpr(program)(*function.unwrapped)
        return jax_compat.lower_hi_primitives(jax_compat.shard_map_body(traced), self.replicas.axis_sizes)

    def run(self, function: ReplicaFunction, program: Any, results: ReplicaResults) -> list[PyTree]:
        """See `Backend.run`."""
        evaluate = None
        if self.replicas.model_axes:
            evaluate = lambda *arguments: evaluate_partitioned(program, self.replicas, arguments)
        out_specs = partition_specs(results.wrappers, self.replicas)
        run = results.evaluator(program, evaluate)
        return map_over_mesh(run, self.replicas, function.items, out_specs)(*function.unwrapped)


def evaluate_partitioned(program: Any, replicas: Replicas, arguments: Sequence[Any]) -> list[Any]:
    """Returns the results of a closed jaxpr that XLA partitions within a replica, without what XLA refuses there.

    Raises:
        NotImplementedError: It contains a callback, which JAX cannot partition.
    """
    check_no_callback(jax_compat.open_jaxpr(program), replicas.model_axes)
    if replicas.mesh.devices.flat[0].platform == "cpu":
        program = widened(program, arguments)
    # XLA refuses to partition a computation with a collective over a manual axis of size 1: "Cross-partition allreduce must be
    # in (partial) manual partitioning mode" (jax 0.10 to 0.12).
    single = [axis for axis, size in replicas.axis_sizes if size == 1]
    return (
        eliminate_collectives(program, single, arguments) if single else jax_compat.jaxpr_function(program)(*arguments)
    )


def map_over_mesh(
    fn: Callable[..., Any], replicas: Replicas, items: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """Returns `fn` of the block of each item that one device holds, mapped over all replicas of the mesh."""
    specs = partition_specs([type(item) if is_distributed(item) else None for item in items], replicas)
    return jax.shard_map(
        fn,
        mesh=replicas.mesh,
        in_specs=tuple(specs),
        out_specs=out_specs,
        axis_names=set(replicas.mesh_axes),
        check_vma=False,
    )


def partition_specs(wrappers: Sequence[Any], replicas: Replicas) -> list[PartitionSpec]:
    """Returns the `PartitionSpec` of values in wrappers of these classes; None means a replicated value."""
    return [wrapper._partition_spec(replicas.per_replica_axes) if wrapper else PartitionSpec() for wrapper in wrappers]
