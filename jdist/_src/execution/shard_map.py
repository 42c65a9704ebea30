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
from jdist._src.execution.backend import Backend, ProgramSpec, ReplicaFunction, ReplicaResults
from jdist._src.execution.placement_stages import PlacedResults, constrain
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Results
from jdist._src.jaxpr.single_replica import eliminate_collectives
from jdist._src.jaxpr.wide_reductions import evaluate_widened
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.sharded import Sharded
from jdist._src.values.state_sharding import StateSharding


class ShardMapBackend(Backend):
    """Each device runs the function of one replica on its own block of every argument that is not replicated.

    Args:
        replicas: The replicas and their mesh.
        state_sharding: The rules that partition the state of a replica over the model axes of the mesh, if it has any.
    """

    def __init__(self, replicas: Replicas, state_sharding: StateSharding | None = None):
        super().__init__(replicas)
        self.state_sharding = state_sharding

    def trace(self, function: ReplicaFunction) -> Any:
        """See `Backend.trace`."""
        program = map_over_mesh(function.fn, self.replicas, function.items, PartitionSpec())
        # Compiled by `jax.jit` in any case: JAX refuses to trace a `shard_map` with automatic axes outside it.
        traced = jax.make_jaxpr(program)(*function.unwrapped)
        return jax_compat.lower_hi_primitives(jax_compat.shard_map_body(traced), self.replicas.axis_sizes)

    def run(self, function: ReplicaFunction, program: Any, results: ReplicaResults) -> list[PyTree]:
        """See `Backend.run`."""
        out_specs = partition_specs(results.wrappers, self.replicas)
        run = results.evaluator(program, self._evaluator(program))
        return map_over_mesh(run, self.replicas, function.items, out_specs)(*function.unwrapped)

    def _evaluator(self, program: Any) -> Callable[..., list[Any]]:
        """Returns the closed jaxpr `program` as a function."""
        if not self.replicas.model_axes:
            return jax_compat.jaxpr_function(program)
        single = [axis for axis, size in self.replicas.axis_sizes if size == 1]
        if single:
            # XLA refuses to partition a computation with a collective over a manual axis of size 1: "Cross-partition allreduce
            # must be in (partial) manual partitioning mode" (jax 0.10 to 0.12).
            return lambda *arguments: eliminate_collectives(program, single, arguments)
        if self.replicas.mesh.devices.flat[0].platform == "cpu":
            return lambda *arguments: evaluate_widened(program, arguments)
        return jax_compat.jaxpr_function(program)

    def state_shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """See `Backend.state_shardings`."""
        return partitioned_state(self, tree, is_state)

    def stages(self, spec: ProgramSpec) -> Sequence[Stage]:
        """See `Backend.stages`."""
        return [place_results(self)] if self.state_sharding else []


def partitioned_state(backend: Backend, tree: PyTree, is_state: bool) -> list[NamedSharding]:
    """Returns the sharding of each leaf of a state: by replica, and within a replica by the rules of the backend, if any."""
    by_replica = backend.input_shardings(tree)
    if backend.state_sharding is None:
        return by_replica
    items = jax.tree.leaves(tree, is_leaf=is_distributed)
    # A batch, and one value that is split over the replicas, are not partitioned within a replica.
    is_split = [isinstance(item, (PerReplica, Sharded)) for item in items for _ in jax.tree.leaves(item)]
    rows = zip(is_split, by_replica, backend.state_sharding.shardings(tree, is_state), strict=True)
    return [own if split else partitioned for split, own, partitioned in rows]


def place_results(backend: Backend) -> Stage:
    """Returns the stage that fixes the sharding of the new state, and replicates outputs within a replica."""

    def place(state: PyTree, outputs: PyTree) -> Results:
        new_state = constrain(state, backend.state_shardings(state, bool(jax.tree.leaves(state))))
        return new_state, constrain(outputs, backend.input_shardings(outputs))

    return PlacedResults(place)


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
