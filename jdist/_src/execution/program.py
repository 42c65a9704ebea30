"""`Program`: a replica function compiled for a mesh, and the call of it.

A call of a program is a call of `jax.jit`, through the stages of the program (`stage_order`).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import jax

from jdist._src.core import jax_compat
from jdist._src.core.trace_key import is_keyed, outside_mesh, unkeyed
from jdist._src.core.tree import PyTree
from jdist._src.core.uncopied import Uncopied
from jdist._src.execution.backend import ProgramSpec
from jdist._src.execution.call_forms import CallForms
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.equivalence import SingleReplicaTrace, compares, trace_single_replica
from jdist._src.execution.interrupts import defer_interrupt, handle_signals, raise_pending
from jdist._src.execution.replicate import TracedReplica, replicate, retracer, trace_replica
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, LowerFn, Proof, Results, Traced, TraceFn
from jdist._src.replica.context import in_replica_function

StateT = TypeVar("StateT")
InputsT = ParamSpec("InputsT")
OutputsT = TypeVar("OutputsT")


class Program(Uncopied, Generic[StateT, InputsT, OutputsT]):
    """A replica function compiled for the devices of a strategy: the result of `Strategy.step`.

    `step(state, *inputs)` returns the new state and the outputs, with inputs by position or by name. `step.proof` reports which
    results are replicated, and `step.__wrapped__` is the function.

    Args:
        spec: The function, the backend and the options.
        stages: Its concerns, from the nearest to the user to the nearest to the devices.
    """

    __wrapped__: Callable[Concatenate[StateT, InputsT], tuple[Any, OutputsT]]
    options: Any  # of a step, its `StepOptions`
    _forms: CallForms  # of a step, its programs for inputs by name and static values
    _has_static = False
    _last_form: "Program | None" = None  # the program of the last call, if it had inputs by name or static values

    def __init__(self, spec: ProgramSpec, stages: Sequence[Stage]):
        self.backend, self._name, self._spec, self._stages = spec.backend, spec.name, spec, stages
        trace: TraceFn = lambda args: replicate(spec.user_call(args), spec, stages)
        for stage in reversed(stages):
            trace = stage.wrap_trace(trace)
        options = self.compiler_options(spec.compiler_options)
        self._compiled = compiled = CompiledFunction(trace, spec.name, spec.donates, options, spec.shardings)
        self._call, self._lower = compiled.call, self._wrapped_lower(compiled.lower)
        for stage in reversed(stages):
            self._call = stage.wrap_call(self._call, compiled)

    if TYPE_CHECKING:

        def __call__(
            self, state: StateT, /, *inputs: InputsT.args, **named: InputsT.kwargs
        ) -> tuple[StateT, OutputsT]: ...

    else:

        def __call__(self, *args: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
            """Returns the new state and the outputs, as global values."""
            if named or self._has_static:
                program, args = self._forms.bind(args, named)
                self._last_form = program
                return program.call(args)
            self._last_form = None
            return self.call(args)

    def call(self, args: Arguments) -> Results:
        """Returns `self(*args)`. Where a Python function calls it, no Ctrl-C is handled before the result has a name."""
        raise_pending()
        pair = None
        try:
            if is_keyed() or not jax.sharding.get_abstract_mesh().empty:
                with self._outside_contexts():
                    pair = self._call(args)
            else:
                pair = self._call(args)
            handle_signals()  # the last time before the caller has the result
            return pair
        except KeyboardInterrupt:
            if pair is None:
                jax_compat.end_interrupted_trace()
                raise
            defer_interrupt()
            return pair

    def lower(self, *args: PyTree, **named: PyTree) -> jax.stages.Lowered:
        """Returns the program lowered for arguments of these shapes: `lower(...).compile().as_text()`."""
        program, args = self._forms.bind(args, named) if named or self._has_static else (self, args)
        self._last_form = program
        return program._lower(args)

    def _trace_replica(self, *args: PyTree) -> tuple[TracedReplica, SingleReplicaTrace | None]:
        """Returns the traced program of one replica for arguments of these shapes, and the one of the only replica.

        The results may vary. The second is None where a program is not compared with one replica.
        """
        traced: list[tuple[TracedReplica, SingleReplicaTrace | None]] = []

        def trace(*args: PyTree) -> None:
            call = self._spec.user_call(args)
            local = trace_replica(call, self._spec, self._stages)
            single = (
                trace_single_replica(call, self._spec, retracer(self._stages)) if compares(call, self._spec) else None
            )
            traced.append((local, single))

        def trace_shapes(args: Arguments) -> Any:
            jax.eval_shape(trace, *self._compiled.shapes(args))

        with unkeyed():
            self._wrapped_lower(trace_shapes)(args)
        return traced[0]

    def compiler_options(self, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Returns the options of XLA for this program, from the options of its user."""
        merged = None if options is None else dict(options)
        for stage in reversed(self._stages):
            merged = stage.compiler_options(merged)
        return merged

    @property
    def on_trace(self) -> list[Callable[[Traced], None]]:
        """The functions that are called with each trace of the program, while JAX traces it."""
        return self._compiled.on_trace

    def _note_trace(self, traced: Traced) -> None:
        """Notes the trace of a program of the same step, for other inputs by name or static values."""
        for note in self.on_trace:
            note(traced)

    @property
    def proof(self) -> Proof:
        """The proof of the program that was traced last for the inputs by name and the static values of the last call.

        Raises:
            RuntimeError: The program was not traced yet.
        """
        proof = (self._last_form or self)._compiled.proof
        if proof is None:
            raise RuntimeError("Nothing is proved yet: a step is traced when it is called for the first time.")
        return proof

    def __repr__(self) -> str:
        mesh = self.backend.replicas.mesh
        return f"Program({self._name}, on {mesh.size} {mesh.devices.flat[0].platform} devices)"

    def __dir__(self) -> list[str]:
        internal = {"backend", "call", "forget_arguments", "on_trace", "options"}  # of other packages of jdist
        return [name for name in super().__dir__() if name not in internal]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A step cannot be pickled: it is compiled for devices of this process. Pickle its function, `step.__wrapped__`, "
            "and the strategy, and call `strategy.step(fn)` again. `jdist.export` saves a function with its weights."
        )

    def forget_arguments(self) -> None:
        """Lets later calls have other arguments than earlier ones, without a `RetraceWarning`."""
        for program in self._forms.programs:
            for stage in program._stages:
                stage.forget_arguments()

    def _wrapped_lower(self, lower: LowerFn) -> LowerFn:
        for stage in reversed(self._stages):
            lower = stage.wrap_lower(lower, self._compiled)
        return lower

    def _outside_contexts(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context without the host's contexts: in `scope()` or `jax.set_mesh` a program would be compiled again."""
        if in_replica_function():
            raise RuntimeError(
                "`strategy.run`, `strategy.init` or a step is called inside a replica function. Call the inner function "
                "directly, of a step `step.__wrapped__`: inside a replica function the values are one replica's plain "
                "arrays."
            )
        context_mesh = jax.sharding.get_abstract_mesh()
        if context_mesh.empty:
            return unkeyed()
        mesh = self.backend.replicas.mesh
        if not jax_compat.is_tracing():
            return outside_mesh()
        if context_mesh != mesh.abstract_mesh:
            raise ValueError(
                f"This program runs on the mesh {dict(mesh.shape)} of its strategy, and `jax.set_mesh` has set the mesh "
                f"{dict(context_mesh.shape)} around the `jax.jit` that calls it. Call it outside that `jax.jit`, or outside "
                "`jax.set_mesh`."
            )
        return unkeyed()
