"""`VirtualBackend`: virtual replicas, whose number does not depend on the devices; each device runs several of them."""

from collections.abc import Sequence
from typing import Any, final

import jax

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import num_replica_devices
from jdist._src.execution.backend import ProgramSpec, ReplicaFunction
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.shard_map import ReplicaBackend, map_over_mesh, partition_specs
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import CallFn, ReplicaResults, Results
from jdist._src.jaxpr.virtual_replicas import run_virtual_replicas
from jdist._src.jaxpr.virtual_values import Slots, is_stacked, join_slots, split_into_slots

_DISABLED_PASSES = "xla_disable_hlo_passes"


@final
class VirtualBackend(ReplicaBackend):
    """Each device runs the jaxpr of one replica once for each of its virtual replicas."""

    def stages(self, spec: ProgramSpec) -> Sequence[Stage]:
        """See `Backend.stages`."""
        return [_EqualBits(spec.name), *super().stages(spec)]

    def run(self, function: ReplicaFunction, program: Any, results: ReplicaResults) -> list[PyTree]:
        """See `Backend.run`."""
        mesh = self.replicas.mesh
        slots = Slots(self.replicas.mesh_axes, num_replica_devices(mesh), self.replicas.size)
        # XLA's convolutions on CPU take about ten times as long in a loop: https://github.com/jax-ml/jax/issues/12868
        unrolled = frozenset({"conv_general_dilated"} if mesh.devices.flat[0].platform == "cpu" else ())

        def run(*blocks: PyTree) -> list[PyTree]:
            arguments = [
                split_into_slots(block, slots) if varies else block
                for block, varies in zip(blocks, function.is_varying, strict=True)
            ]
            values = run_virtual_replicas(program, jax.tree.leaves(arguments, is_leaf=is_stacked), slots, unrolled)
            pairs = zip(results.wrappers, results.as_trees(values), strict=True)
            return [to_block(wrapper, tree) for wrapper, tree in pairs]

        def to_block(wrapper: Any, tree: PyTree) -> PyTree:
            if wrapper is not None and not wrapper._is_replicated:
                return join_slots(tree, wrapper._to_block, slots)
            assert not any(map(is_stacked, jax.tree.leaves(tree, is_leaf=is_stacked))), "proved replicated, but stacked"
            return tree

        out_specs = partition_specs(results.wrappers, self.replicas)
        return map_over_mesh(run, self.replicas, function.items, out_specs)(*function.unwrapped)


class _EqualBits(Stage):
    """Compiles a program with options of XLA, so that its bits are equal on any number of devices.

    JAX accepts options of the outermost `jax.jit` only. So inside a `jax.jit` of the user the program is traced, as by
    `jax.eval_shape`, and not compiled.
    """

    def __init__(self, name: str):
        self._message = (
            f"`{name}` is called inside a `jax.jit`, and has virtual replicas. Their results are equal on any number of "
            "devices only with options of XLA, which a `jax.jit` inside another one cannot have. Call it outside that "
            "`jax.jit`. A step with `steps_per_call` runs several steps in one call."
        )

    def compiler_options(self, options: dict[str, Any] | None) -> dict[str, Any]:
        """See `Stage`. Disables XLA's elimination of common subexpressions.

        XLA runs this pass before its algebraic simplifier if it compiles for several devices, and only after it for one device.
        The simplifier replaces a division by a product with the reciprocal only where a value has one use
        (https://github.com/openxla/xla/blob/main/xla/hlo/transforms/simplifiers/algebraic_simplifier.cc), so the gradient of
        a softmax would be rounded in one way on one device and in another on several.
        """
        options = dict(options or {})
        disabled = [options.get(_DISABLED_PASSES), "cse"]
        return options | {_DISABLED_PASSES: ",".join(filter(None, disabled))}

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""

        @jax.jit
        def inlined(*args: PyTree) -> Results:
            return jax_compat.refuse_to_compile(compiled.traced_pair(*args), self._message)

        return lambda args: inlined(*args) if jax_compat.is_tracing() else call(args)
