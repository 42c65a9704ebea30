"""`Processes`: a program of several processes, which compare it when they trace it, and record their calls."""

from collections.abc import Callable, Sequence
from typing import Any

from jdist._src.core import activity, jax_compat
from jdist._src.execution.backend import ProgramSpec
from jdist._src.execution.compiled_function import CompiledFunction, ResultStructure
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, LowerFn, Results, Traced, TraceFn
from jdist._src.jaxpr.collective_lines import collective_lines
from jdist._src.values.process_calls import (
    is_of_all_processes,
    launches_on,
    local_arrays,
    record_host_values,
    record_local_arrays,
)
from jdist._src.values.same_program import check_same_program


class Processes(Stage):
    """Compares the programs that the processes of a mesh trace, and records the calls for the report of a job that hangs.

    Mutable: it stores the arguments of the call that may be tracing, and whether inputs are arrays of one process.

    Args:
        spec: The program.
        num_steps: Returns the number of steps per launch, when the program is traced; 0 if it is not a step.
    """

    def __init__(self, spec: ProgramSpec, num_steps: Callable[[], int]):
        mesh = spec.backend.replicas.mesh
        self._spec = spec
        self._is_of_all_processes = is_of_all_processes(mesh)
        self._launches = launches_on(mesh)
        self._label = activity.Label(spec.name, launches=self._launches)
        self._num_steps = num_steps
        self._text = f"`{spec.name}`"
        self._arguments: Arguments | None = None
        self._records_arrays = False

    def record_host_values(self, values: Sequence[Any]) -> None:
        """Records host values among the arguments of a call, which have to be equal on all processes."""
        if self._is_of_all_processes and not jax_compat.is_tracing():
            record_host_values(self._spec.name, values)

    def wrap_trace(self, trace: TraceFn) -> TraceFn:
        """See `Stage`. All processes must make the comparison."""

        def trace_compared(args: Arguments) -> Traced:
            spec, arguments = self._spec, self._arguments
            if arguments is None:
                return trace(args)
            try:
                traced = trace(args)
            except Exception as error:
                check_same_program(spec.name, None, [], spec.backend.replicas, failure=error)
                raise
            self._label.steps = self._num_steps()
            self._label.collectives = collective_lines(traced.jaxpr)
            self._label.is_collective = bool(self._label.collectives)
            leaves = spec.user_call(arguments).leaves()
            self._label.checksum = check_same_program(spec.name, traced.jaxpr, leaves, spec.backend.replicas)
            return traced

        return trace_compared

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""
        compiled.on_results.append(self._note_results)
        compiled.on_new_signature.append(self._note_local_arrays)

        def call_together(args: Arguments) -> Results:
            if jax_compat.is_tracing():  # inside a `jax.jit` of the user nothing runs yet
                return call(args)
            calls = activity.calls
            if self._records_arrays:
                record_local_arrays(self._spec.name, args[1:])
            self._arguments = args
            self._launches.count += 1
            calls.running = self._label
            if self._is_of_all_processes:
                calls.record(self._text, self._label.checksum)
            try:
                return call(args)
            except BaseException:  # as where the processes compare the program: the others do not launch it
                self._launches.count -= 1
                raise
            finally:
                self._arguments = calls.running = None

        return call_together

    def wrap_lower(self, lower: LowerFn, compiled: CompiledFunction) -> LowerFn:
        """See `Stage`. Processes compare a program when they call it, and a call would not trace again after `lower`."""
        compiled.lowers_apart = True
        return lower

    def _note_results(self, pair: Results, leaves: list[Any], structure: ResultStructure) -> None:
        if not jax_compat.is_tracing():
            smallest = leaves[structure.smallest] if leaves else None
            outputs = leaves[structure.num_state :]
            activity.calls.last = [outputs if structure.has_small_outputs else smallest, self._label]

    def _note_local_arrays(self, args: Arguments) -> None:
        self._records_arrays |= self._is_of_all_processes and bool(local_arrays(args[1:]))
