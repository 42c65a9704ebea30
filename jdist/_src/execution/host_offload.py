"""`CentralView`: one replica a device, and a state that lies in another memory, where it is updated.

A step is run in two parts (`jdist._src.jaxpr.update_partition`). Up to its last collective, each replica runs on its own device: what it needs of
the central state is sent there. The rest is done once, in the parts in which the state is kept: what makes each element of
the same elements only by the processors of the host, if the platform can be told to use them; what needs more, such as a
norm, by the devices, each one its part.

Source:
    J. Ren et al., "ZeRO-Offload: democratizing billion-scale model training", arXiv:2101.06840.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Literal
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import HOST_MEMORY, Replicas
from jdist._src.execution.backend import Backend, ReplicaFunction, ResultPlacements
from jdist._src.execution.device_offload import move_to_devices
from jdist._src.jaxpr import update_partition
from jdist._src.jaxpr.replication import Input
from jdist._src.jaxpr.update_partition import JaxprPart
from jdist._src.jaxpr.virtual_values import replica_shapes
from jdist._src.values.base import is_distributed
from jdist._src.values.state_sharding import StateSharding


class _Given(NamedTuple):
    """A leaf of the arguments, or a constant.

    Attributes:
        value: As the host sees it.
        wrapper: Of which class the wrapper is that it is in.
        is_state: Whether it belongs to the state.
    """

    value: Any
    wrapper: Any = None
    is_state: bool = False

    @property
    def is_central(self) -> bool:
        return self.is_state and _is_on_host(self.value)


@final
class HostOffloadBackend(Backend):
    """One replica a device, and leaves of the state in the memory of the host: of each device's host an equal part.

    Args:
        replicas: The replicas.
        layout: Which leaves are central, and how they are split into parts.
        host_computes: Whether programs for these devices can have parts that the host computes.
    """

    scans = False  # the update is found behind the last collective of the one step in a program

    def __init__(self, replicas: Replicas, layout: StateSharding, host_computes: bool):
        super().__init__(replicas)
        self.layout = layout
        self._host_computes = host_computes

    def trace(self, one: ReplicaFunction) -> Any:
        """See `View.trace`."""
        shapes = [replica_shapes(item, self.replicas) for item in one.items]
        return jax_compat.lower_hi_primitives(
            jax.make_jaxpr(one.fn, axis_env=self._axis_sizes)(*shapes), self._axis_sizes
        )

    def run(self, one: ReplicaFunction, program: Any, results: ResultPlacements) -> list[PyTree]:
        """See `View.run`."""
        flat = update_partition.inline_calls(program, self._axis_sizes)
        jaxpr = jax_compat.consts_as_inputs(flat)
        given = dict(zip(jaxpr.invars, [*map(_Given, flat.consts), *_leaves_given(one)], strict=True))
        wrappers = [w for tree, w in zip(results.trees, results.placements, strict=True) for _ in jax.tree.leaves(tree)]
        before, by_element, rest, numbers = update_partition.split_update(
            jaxpr,
            [Input("", self.replicas.axes if _differs(item.wrapper) else ()) for item in given.values()],
            self.replicas.axes,
            apart=[var for var, item in given.items() if item.is_central],
            own=[atom for atom, wrapper in zip(jaxpr.outvars, wrappers, strict=True) if _differs(wrapper)],
            num_state=sum(item.is_state for item in given.values()),
        )
        updated, crossing = {*by_element.gives, *rest.gives}, {*by_element.needs, *rest.needs}
        is_late = [not isinstance(atom, Literal) and atom in updated for atom in jaxpr.outvars]
        results_of = zip(jaxpr.outvars, wrappers, is_late, strict=True)
        early = [(atom, wrapper) for atom, wrapper, late in results_of if not late]
        cut = [var for var in before.gives if var in crossing]
        handed_on = [atom for atom, _ in early if not isinstance(atom, Literal) and atom in given]
        read = list(dict.fromkeys([*before.needs, *handed_on]))

        def replica(*blocks: jax.Array) -> tuple[list[PyTree], list[jax.Array]]:
            known = dict(zip(read, blocks, strict=True))
            known.update(before.run(known))
            values = [atom.val if isinstance(atom, Literal) else known.get(atom, 0) for atom in jaxpr.outvars]
            left = jax.tree.leaves(results.leave(results.as_trees(list(map(jnp.asarray, values)))))
            return [x for x, late in zip(left, is_late, strict=True) if not late], [known[var] for var in cut]

        over_mesh = jax.shard_map(
            replica,
            mesh=self.replicas.mesh,
            in_specs=tuple(self._spec(given[var].wrapper) for var in read),
            out_specs=([self._spec(wrapper) for _, wrapper in early], PartitionSpec()),
            check_vma=False,
        )
        values, handed_over = over_mesh(*(self._on_devices(given[var].value) for var in read))
        known = {var: item.value for var, item in given.items()} | dict(zip(cut, handed_over, strict=True))
        known.update({var: jnp.asarray(number) for var, number in numbers.items()})
        known.update(self._by_element(by_element, known))
        known.update(rest.run({var: self._in_parts(known[var], "device") for var in rest.needs}))
        left = iter(values)
        pairs = zip(jaxpr.outvars, is_late, strict=True)
        return results.as_trees([known[atom] if late else next(left) for atom, late in pairs])

    def shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """See `View.shardings`."""
        rules = zip(self.layout.is_split(tree), self.layout.shardings(tree, is_state), self.inputs(tree), strict=True)
        return [part.with_memory_kind(HOST_MEMORY) if is_central else plain for is_central, part, plain in rules]

    def fetched(self, tree: PyTree) -> PyTree:
        """See `View.fetched`."""
        return move_to_devices(tree, lambda leaf: leaf.sharding.memory_kind == HOST_MEMORY, self.replicas.whole)

    def arranged(self, state: PyTree, outputs: PyTree) -> tuple[PyTree, PyTree]:
        """See `View.arranged`."""
        return self._moved(state, self.shardings(state)), self._moved(outputs, self.inputs(outputs))

    @property
    def _axis_sizes(self) -> list[tuple[str, int]]:
        return list(self.replicas.mesh.shape.items())

    def _spec(self, wrapper: Any) -> PartitionSpec:
        return wrapper.spec(self.replicas.per_replica_axes) if wrapper else PartitionSpec()

    def _by_element(self, part: JaxprPart, known: Mapping[Any, Any]) -> dict[Any, Any]:
        """The update of each element, by the host if it can."""
        if not self._host_computes:
            return part.run({var: self._in_parts(known[var], "device") for var in part.needs})
        made: dict[Any, Any] = {}
        last: list[Any] = []
        for piece in part.pieces():
            # One after the other: all at once would be on their way between the memories, and on the devices, at once.
            needs = [self._in_parts(known[var], HOST_MEMORY) for var in piece.needs]
            needs, _ = lax.optimization_barrier((needs, last))
            run = lambda *values, piece=piece: list(piece.run(dict(zip(piece.needs, values, strict=True))).values())
            last = jax_compat.compute_on_host(run)(*needs)
            made.update(zip(piece.gives, last, strict=True))
        return made

    def _in_parts(self, x: Any, memory: str) -> Any:
        """`x` in the parts in which the state is kept, in that memory. Between devices, it travels as their own."""
        part = self.layout.part(x)
        x = x if _is_on_host(x) else lax.with_sharding_constraint(x, part)
        return jax.device_put(x, part.with_memory_kind(memory)) if _is_on_host(x) or memory == HOST_MEMORY else x

    def _on_devices(self, x: Any) -> Any:
        """`x` whole on every device, if it is on the host."""
        if not _is_on_host(x):
            return x
        return lax.with_sharding_constraint(self._in_parts(x, "device"), self.replicas.whole)

    def _moved(self, tree: PyTree, shardings: list[NamedSharding]) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(map(self._moved_leaf, leaves, shardings))

    def _moved_leaf(self, x: Any, sharding: NamedSharding) -> Any:
        if sharding.memory_kind == HOST_MEMORY:
            return self._in_parts(x, HOST_MEMORY)
        return lax.with_sharding_constraint(self._in_parts(x, "device") if _is_on_host(x) else x, sharding)


def _leaves_given(one: ReplicaFunction) -> list[_Given]:
    return [
        _Given(leaf, type(item) if is_distributed(item) else None, number < one.num_state)
        for number, item in enumerate(one.items)
        for leaf in jax.tree.leaves(item)
    ]


def _differs(wrapper: Any) -> bool:
    return wrapper is not None and not wrapper.agrees


def _is_on_host(x: Any) -> bool:
    return getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host
