"""`DebugStrategy`: all replicas on one device, one operation at a time, for `breakpoint()` with the values of all replicas.

The page "Extending jdist" of the documentation shows these classes as an example of a backend that is written outside jdist.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax

from jdist._src.core.jax_compat import map_linear_calls
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas, replica_mesh
from jdist._src.execution.backend import Backend, ProgramSpec, ReplicaFunction
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, ReplicaResults, Results
from jdist._src.strategies.base import Strategy


class DebugBackend(Backend):
    """Runs all replicas on one device, as the axis of a `jax.vmap`."""

    def stages(self, spec: ProgramSpec) -> Sequence[Stage]:
        """Returns the stage that runs the function without `jax.jit`."""
        return [OperationByOperation(self)]

    def trace(self, function: ReplicaFunction) -> Any:
        """Returns the jaxpr of one replica, for the proof. A `breakpoint()` has no effect here: the values are tracers."""
        hook, sys.breakpointhook = sys.breakpointhook, lambda *args, **kwargs: None
        try:
            with jax.disable_jit(False):
                return super().trace(function)
        finally:
            sys.breakpointhook = hook

    def run(self, function: ReplicaFunction, program: Any, results: ReplicaResults) -> list[PyTree]:
        """Returns the global value of each result: of the function itself, or of its jaxpr where the program is lowered."""
        (axis,), size = self.replicas.axes, self.replicas.size
        evaluate = results.evaluator(program)
        if jax.config.jax_disable_jit:
            evaluate = lambda *blocks: results.to_blocks(function.fn(*blocks))
        split = lambda leaf: leaf.reshape(size, leaf.shape[0] // size, *leaf.shape[1:])
        join = lambda leaf: leaf.reshape(size * leaf.shape[1], *leaf.shape[2:])
        arguments = zip(function.unwrapped, function.is_varying, strict=True)
        blocks = [jax.tree.map(split, tree) if varies else tree for tree, varies in arguments]
        in_axes = [0 if varies else None for varies in function.is_varying]
        values = jax.vmap(evaluate, in_axes, axis_name=axis, axis_size=size)(*blocks)
        pairs = zip(values, results.is_varying, strict=True)
        return [jax.tree.map(join if varies else lambda leaf: leaf[0], tree) for tree, varies in pairs]


class OperationByOperation(Stage):
    """Runs each call in Python, one operation after the other, as `jax.disable_jit` does."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """Returns a call of the traced function with the values of the arguments."""

        def call_in_python(args: Arguments) -> Results:
            with jax.disable_jit():
                pair = compiled.traced_pair(*args)
            leaves, treedef = jax.tree.flatten(pair)
            return treedef.unflatten(jax.device_put(leaves, self._backend.input_shardings(pair)))

        return call_in_python


class DebugStrategy(Strategy):
    """Runs all replicas on one device, one operation at a time.

    A `breakpoint()` in a replica function stops with the values of all replicas. In pdb, `p x.val` prints an array that
    varies, for all replicas, `[replica, ...]`. Proof, errors and, up to rounding, results equal those of a
    `jdist.MirroredStrategy`. The state is not donated.

    Args:
        replicas: The number of replicas.

    Example:
        >>> strategy = jdist.testing.DebugStrategy(replicas=4)
        >>> strategy.run(lambda: jdist.all_reduce("sum", jdist.replica_id())).tolist()
        6
    """

    def __init__(self, replicas: int = 2):
        map_linear_calls()  # `jdist.global_loss` contains one
        mesh = replica_mesh(jax.local_devices()[:1])
        super().__init__(DebugBackend(Replicas.from_mesh(mesh, replicas)), arguments={"replicas": replicas})
