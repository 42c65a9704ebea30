"""`HostCalls`: the host functions that replicas call, as `jdist.debug.print` does, run in the order of the program."""

from typing import Any

import jax
import numpy as np

from jdist._src.core import jax_compat
from jdist._src.devices.dispatch import wait_for_results
from jdist._src.execution.backend import ProgramSpec
from jdist._src.execution.compiled_function import CompiledFunction, ResultStructure
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, LowerFn, Results
from jdist._src.jaxpr.ordered_calls import HostFunction, has_host_functions, with_positions


class HostCalls(Stage):
    """Runs the host functions of a launch after it, sorted by their positions and replicas.

    A program without host functions is not changed, and nothing is added to its calls. With them, a call waits for the program.
    Where the host does not see the launch (the program is inside a `jax.jit`, or was lowered and compiled by the user), host
    functions run when they are called.

    Mutable: threads of XLA append calls to a list.

    Args:
        spec: The program.
    """

    def __init__(self, spec: ProgramSpec):
        self._axis_sizes = spec.backend.replicas.axis_sizes
        self._compiled: CompiledFunction | None = None
        self._calls: list[tuple[HostFunction, Any, tuple[Any, ...]]] = []
        self._is_used = self._runs_immediately = False

    def wrap_program(self, program: Any) -> Any:
        """See `Stage`."""
        if not has_host_functions(jax_compat.open_jaxpr(program)):
            return program
        if not self._is_used and self._compiled is not None:
            self._compiled.on_results.append(self._run_calls)
        self._is_used = True
        if self._runs_immediately:
            return program
        return with_positions(program, self._axis_sizes, self._deliver)

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""
        self._compiled = compiled
        return call

    def wrap_lower(self, lower: LowerFn, compiled: CompiledFunction) -> LowerFn:
        """See `Stage`."""

        def lower_any(args: Arguments) -> jax.stages.Lowered:
            lowered = lower(args)
            if not self._is_used:
                return lowered
            before = self._runs_immediately, compiled.lowers_apart
            self._runs_immediately = compiled.lowers_apart = True
            try:
                return lower(args)
            finally:
                self._runs_immediately, compiled.lowers_apart = before

        return lower_any

    def _deliver(self, function: HostFunction, position: jax.Array, *operands: jax.Array) -> None:
        """Called by threads of XLA. It reads no values: a read could wait for a thread that runs a collective."""
        if self._runs_immediately:
            function(*operands)
        else:
            self._calls.append((function, position, operands))

    def _run_calls(self, pair: Results, leaves: list[Any], structure: ResultStructure) -> None:
        if jax_compat.is_tracing():
            self._runs_immediately = True
            return
        try:
            wait_for_results(leaves)  # not `jax.effects_barrier`, which raises the errors of other programs
        finally:  # also those before an error of the program
            calls, self._calls = self._calls, []
            for function, _, operands in sorted(calls, key=_order):
                function(*operands)


def _order(call: tuple[HostFunction, Any, tuple[Any, ...]]) -> tuple[list[int], int]:
    _, position, (replica_id, *_) = call
    return np.asarray(position).tolist(), int(replica_id)
