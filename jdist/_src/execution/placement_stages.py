"""Stages of programs that place results or store the state in another memory or on another device."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import HOST_MEMORY
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.interrupts import run_deferring_interrupts
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, Results, Traced, TraceFn
from jdist._src.values.array_checks import is_device_array
from jdist._src.values.array_copies import to_device_memory


class PlacedResults(Stage):
    """Fixes the shardings of the results while the program is traced.

    Args:
        place: From `(state, outputs)` to the same values with their shardings fixed.
        runs_one_step: See `Stage`.
    """

    def __init__(self, place: Callable[[PyTree, PyTree], Results], runs_one_step: bool = False):
        self._place, self.runs_one_step = place, runs_one_step

    def wrap_trace(self, trace: TraceFn) -> TraceFn:
        """See `Stage`."""

        def trace_placed(args: Arguments) -> Traced:
            traced = trace(args)
            return traced._replace(pair=self._place(*traced.pair))

        return trace_placed


class Storage(Stage):
    """Copies the arguments to the mesh before each call, and the new state to its storage after it.

    Args:
        to_mesh: From the arguments to the same values on the mesh.
        to_storage: From the new state to the state in its storage between programs.
        donates: Whether the memory of the old state is freed.
    """

    places_state = True

    def __init__(
        self, to_mesh: Callable[[Arguments], Arguments], to_storage: Callable[[PyTree], PyTree], donates: bool
    ):
        self._to_mesh, self._to_storage, self._donates = to_mesh, to_storage, donates

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""

        def call_on_mesh(args: Arguments) -> Results:
            copies = self._to_mesh(args)

            def call_and_store() -> Results:
                state, outputs = call(copies)
                # XLA donates the copy of an offloaded leaf, not the leaf itself.
                for leaf in jax.tree.leaves(args[: self._donates]):
                    if is_device_array(leaf) and not leaf.is_deleted():
                        leaf.delete()
                return self._to_storage(state), outputs

            return run_deferring_interrupts(call_and_store)

        return call_on_mesh


def constrain(tree: PyTree, shardings: list[NamedSharding]) -> PyTree:
    """Returns the traced `tree` with the sharding and the memory of each leaf fixed."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(map(_constrain_leaf, leaves, shardings))


def _constrain_leaf(x: Any, sharding: NamedSharding) -> Any:
    if sharding.memory_kind != HOST_MEMORY:
        return lax.with_sharding_constraint(to_device_memory(x), sharding)
    # First the sharding and then the memory, so that each device copies its part.
    return jax.device_put(
        lax.with_sharding_constraint(to_device_memory(x), sharding.with_memory_kind("device")), sharding
    )
