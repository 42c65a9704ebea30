"""`Stage`: one concern of a program, beside the program.

A program is `jax.jit` of a trace, from arguments to results and their proof. A stage wraps the function of one replica, the
trace, the call or the lowering of a program, each by default not at all. The first stage is the nearest one to the user: it
gets the arguments of a call as the user passes them, and calls the user's function. Trace, call and lowering are composed once,
when the program is built.
"""

from typing import Any

from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.traced import CallFn, LowerFn, ReplicaFn, TraceFn, UserCall


class Stage:
    """One concern of a program. Each method returns its argument unless the stage adds something to it.

    Attributes:
        runs_one_step: Whether a program with this stage contains one step. Several steps per call are then several calls.
        places_state: Whether it places each leaf of a state by its path and the class of its container.
        donates: Whether the memory of the state may be reused for the new state.
    """

    runs_one_step: bool = False
    places_state: bool = False
    donates: bool = True

    def compiler_options(self, options: dict[str, Any] | None) -> dict[str, Any] | None:
        """Returns the options of XLA for the program."""
        return options

    def wrap_function(self, fn: ReplicaFn, call: UserCall) -> ReplicaFn:
        """Returns the function of one replica, on values without wrappers. It runs while the program is traced.

        Args:
            fn: From the arguments of one replica to `(state, outputs)`, with the stages before this one.
            call: The call of the user's function, on global values in their wrappers.
        """
        return fn

    def wrap_program(self, program: Any) -> Any:
        """Returns the closed jaxpr that the backend runs for one replica. It runs while JAX traces, after the analysis."""
        return program

    def wrap_trace(self, trace: TraceFn) -> TraceFn:
        """Returns what runs while JAX traces the program, on tracers."""
        return trace

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """Returns what runs on the host in each call of the program.

        Args:
            call: The call, without this stage and those before it.
            compiled: The compiled function of the program.
        """
        return call

    def forget_arguments(self) -> None:
        """Forgets the arguments of earlier calls, as before calls with another data set."""

    def wrap_lower(self, lower: LowerFn, compiled: CompiledFunction) -> LowerFn:
        """Returns what `Program.lower` runs, on arguments or their shapes."""
        return lower
