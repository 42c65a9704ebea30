"""`HostOffloadBackend`: one replica per device, and a state that is stored, and updated, in another memory.

A step runs in two parts (`jdist._src.jaxpr.update_partition`). Up to the last collective, each replica runs on its own device,
and the offloaded leaves that it reads are copied there. The update runs once, on the parts in which the state is stored. Its
elementwise equations run on the host's processors if the platform supports host computation. Its other equations, such as a
norm, run on the devices, and each device computes its own part.

Source:
    J. Ren et al., "ZeRO-Offload: democratizing billion-scale model training", arXiv:2101.06840.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Literal
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import HOST_MEMORY, Replicas
from jdist._src.execution.backend import Backend, ProgramSpec, ReplicaFunction
from jdist._src.execution.device_offload import copy_to_mesh
from jdist._src.execution.placement_stages import PlacedResults
from jdist._src.execution.shard_map import partition_specs
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import ReplicaResults, Results
from jdist._src.jaxpr import update_partition
from jdist._src.jaxpr.replication import Input
from jdist._src.jaxpr.update_partition import JaxprPart
from jdist._src.values.array_checks import is_in_host_memory
from jdist._src.values.base import is_distributed
from jdist._src.values.state_sharding import StateSharding


class _Operand(NamedTuple):
    """A leaf of the arguments of a program, or a constant of its jaxpr.

    Attributes:
        value: Its global value.
        wrapper: The class of the wrapper that contains it, or None.
        is_state: Whether it is a leaf of the state.
    """

    value: Any
    wrapper: Any = None
    is_state: bool = False


@final
class HostOffloadBackend(Backend):
    """One replica per device, and leaves of the state in host memory, split equally over the hosts' devices.

    Args:
        replicas: The replicas.
        state_sharding: The rules that select the offloaded leaves and split them.
        host_computes: Whether a program for these devices can contain parts that the host computes.
    """

    def __init__(self, replicas: Replicas, state_sharding: StateSharding, host_computes: bool):
        super().__init__(replicas)
        self._rules = self.state_sharding = state_sharding
        self._host_computes = host_computes

    def run(self, function: ReplicaFunction, program: Any, results: ReplicaResults) -> list[PyTree]:
        """See `Backend.run`."""
        flat = update_partition.inline_calls(program, self.replicas.axis_sizes)
        jaxpr = jax_compat.consts_as_inputs(flat)
        operands = dict(zip(jaxpr.invars, [*map(_Operand, flat.consts), *_argument_leaves(function)], strict=True))
        wrappers = [w for tree, w in zip(results.trees, results.wrappers, strict=True) for _ in jax.tree.leaves(tree)]
        before, elementwise, rest, numbers = update_partition.split_update(
            jaxpr,
            [Input("", self.replicas.axes if _is_varying(operand.wrapper) else ()) for operand in operands.values()],
            self.replicas.axes,
            remote=[var for var, operand in operands.items() if operand.is_state and is_in_host_memory(operand.value)],
            per_replica=[atom for atom, wrapper in zip(jaxpr.outvars, wrappers, strict=True) if _is_varying(wrapper)],
            num_state=sum(operand.is_state for operand in operands.values()),
        )
        updated, crossing = {*elementwise.outputs, *rest.outputs}, {*elementwise.inputs, *rest.inputs}
        is_updated = [not isinstance(atom, Literal) and atom in updated for atom in jaxpr.outvars]
        flags = zip(jaxpr.outvars, wrappers, is_updated, strict=True)
        replica_outputs = [(atom, wrapper) for atom, wrapper, late in flags if not late]
        cut = [var for var in before.outputs if var in crossing]
        unchanged = [atom for atom, _ in replica_outputs if not isinstance(atom, Literal) and atom in operands]
        read = list(dict.fromkeys([*before.inputs, *unchanged]))

        def replica(*blocks: jax.Array) -> tuple[list[PyTree], list[jax.Array]]:
            env = dict(zip(read, blocks, strict=True))
            env.update(before.run(env))
            values = [atom.val if isinstance(atom, Literal) else env.get(atom, 0) for atom in jaxpr.outvars]
            leaves = jax.tree.leaves(results.to_blocks(results.as_trees(list(map(jnp.asarray, values)))))
            return [x for x, late in zip(leaves, is_updated, strict=True) if not late], [env[var] for var in cut]

        over_mesh = jax.shard_map(
            replica,
            mesh=self.replicas.mesh,
            in_specs=tuple(partition_specs([operands[var].wrapper for var in read], self.replicas)),
            out_specs=(partition_specs([wrapper for _, wrapper in replica_outputs], self.replicas), PartitionSpec()),
            check_vma=False,
        )
        values, cut_values = over_mesh(*(self._replicated(operands[var].value) for var in read))
        env = {var: operand.value for var, operand in operands.items()} | dict(zip(cut, cut_values, strict=True))
        env.update({var: jnp.asarray(number) for var, number in numbers.items()})
        env.update(self._run_elementwise(elementwise, env))
        env.update(rest.run({var: self._split(env[var], "device") for var in rest.inputs}))
        remaining = iter(values)
        pairs = zip(jaxpr.outvars, is_updated, strict=True)
        return results.as_trees([env[atom] if late else next(remaining) for atom, late in pairs])

    def state_shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """See `Backend.state_shardings`."""
        is_offloaded, parts = self._rules.is_split(tree), self._rules.shardings(tree, is_state)
        rows = zip(is_offloaded, parts, self.input_shardings(tree), strict=True)
        return [part.with_memory_kind(HOST_MEMORY) if offloaded else on_mesh for offloaded, part, on_mesh in rows]

    def to_mesh(self, tree: PyTree) -> PyTree:
        """Returns `tree` with the leaves that are stored in host memory replicated on the mesh."""
        return copy_to_mesh(tree, is_in_host_memory, self.replicas.replicated_sharding)

    def stages(self, spec: ProgramSpec) -> Sequence[Stage]:
        """See `Backend.stages`. The update starts after the last collective, so a program contains one step."""
        return [PlacedResults(self._place_results, runs_one_step=True)]

    def _place_results(self, state: PyTree, outputs: PyTree) -> Results:
        new_state = self._constrain(state, self.state_shardings(state))
        return new_state, self._constrain(outputs, self.input_shardings(outputs))

    def _run_elementwise(self, part: JaxprPart, env: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns the values that the elementwise equations of the update compute, on the host if it can compute."""
        if not self._host_computes:
            return part.run({var: self._split(env[var], "device") for var in part.inputs})
        computed: dict[Any, Any] = {}
        values: list[Any] = []
        for piece in part.split_by_array():
            # Sequentially: otherwise all pieces would be in transfer, and in device memory, at the same time.
            operands = [self._split(env[var], HOST_MEMORY) for var in piece.inputs]
            operands, _ = lax.optimization_barrier((operands, values))
            run = lambda *values, piece=piece: list(piece.run(dict(zip(piece.inputs, values, strict=True))).values())
            values = jax_compat.compute_on_host(run)(*operands)
            computed.update(zip(piece.outputs, values, strict=True))
        return computed

    def _split(self, x: Any, memory: str) -> Any:
        """Returns `x` in that memory, split as an offloaded leaf. A copy between host and device moves each device's part."""
        part = self._rules.array_sharding(x)
        x = x if is_in_host_memory(x) else lax.with_sharding_constraint(x, part)
        return jax.device_put(x, part.with_memory_kind(memory)) if is_in_host_memory(x) or memory == HOST_MEMORY else x

    def _replicated(self, x: Any) -> Any:
        """Returns `x` replicated on the devices if it is in host memory, else `x`."""
        if not is_in_host_memory(x):
            return x
        return lax.with_sharding_constraint(self._split(x, "device"), self.replicas.replicated_sharding)

    def _constrain(self, tree: PyTree, shardings: list[NamedSharding]) -> PyTree:
        def constrain_leaf(x: Any, sharding: NamedSharding) -> Any:
            if sharding.memory_kind == HOST_MEMORY:
                return self._split(x, HOST_MEMORY)
            return lax.with_sharding_constraint(self._split(x, "device") if is_in_host_memory(x) else x, sharding)

        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(map(constrain_leaf, leaves, shardings))


def _argument_leaves(function: ReplicaFunction) -> list[_Operand]:
    return [
        _Operand(leaf, type(item) if is_distributed(item) else None, number < function.num_state)
        for number, item in enumerate(function.items)
        for leaf in jax.tree.leaves(item)
    ]


def _is_varying(wrapper: Any) -> bool:
    return wrapper is not None and not wrapper._is_replicated
