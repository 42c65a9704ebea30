"""Builds the programs of `Strategy.run`, `Strategy.init` and `Strategy.step`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from jdist._src.core.arguments import as_int, check_callable, function_name
from jdist._src.core.tree import PyTree, dtype_and_shape, one_line
from jdist._src.execution.backend import Backend, Equivalence, ProgramSpec
from jdist._src.execution.call_forms import CallForms, check_static_argnames
from jdist._src.execution.multi_step import StackedInputs, StepLoop
from jdist._src.execution.nn_module_stage import unpacked
from jdist._src.execution.program import Program
from jdist._src.execution.retraces import warn_of_many_programs
from jdist._src.execution.stage import Stage
from jdist._src.execution.stage_order import stages_of
from jdist._src.execution.state_stages import NewState, StateUpdate, StepPolicies
from jdist._src.execution.traced import Arguments, Results, UserCall
from jdist._src.replica.context import ReplicaContext
from jdist._src.replica.metric_sums import check_state_metrics
from jdist._src.replica.precision import Precision

View: TypeAlias = Literal["replica", "global"]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The options of `Strategy.step`.

    Attributes:
        precision: The dtypes of `jdist.value_and_grad` within the step.
        steps_per_call: The number of steps that one call runs, on lists of inputs; None for one step on its inputs.
        donate: Whether the new state reuses the memory of the old state.
        compiler_options: Options of XLA for the program.
        static_argnames: The names of the last parameters that are Python values at trace time.
        view: The batch that the function receives: the part of one replica, or the global batch.
        equivalence: Whether a step that does not compute the results of one device is an error, a warning or accepted.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: `steps_per_call` is less than 1, or `view` or `equivalence` is unknown.
    """

    precision: Precision | None = None
    steps_per_call: int | None = None
    donate: bool = True
    compiler_options: Mapping[str, Any] | None = None
    static_argnames: str | Sequence[str] = ()
    view: View = "replica"
    equivalence: Equivalence = "warn"

    def __post_init__(self) -> None:
        if not isinstance(self.precision, Precision | None):
            raise TypeError(
                "`precision` must be a `jdist.Precision`, such as `jdist.Precision(compute_dtype=jnp.bfloat16)`, got "
                f"{one_line(self.precision)}."
            )
        if self.steps_per_call is not None:
            object.__setattr__(self, "steps_per_call", as_int("`steps_per_call`", self.steps_per_call, 1))
        if not isinstance(self.donate, bool):
            raise TypeError(f"`donate` is True or False, got {one_line(self.donate)}.")
        check_compiler_options(self.compiler_options)
        names = (self.static_argnames,) if isinstance(self.static_argnames, str) else self.static_argnames
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"`static_argnames` must be the name of a parameter or a tuple of names, got {one_line(names)}."
            )
        object.__setattr__(self, "static_argnames", tuple(names))
        if self.view not in get_args(View):
            raise ValueError(
                '`view` is "replica", for a step of one replica, or "global", for a step of the global batch, got '
                f"{one_line(self.view)}."
            )
        if self.equivalence not in get_args(Equivalence):
            raise ValueError(
                '`equivalence` says what to do if the step does not compute what one device computes: "error", "warn" or '
                f'"ignore", got {one_line(self.equivalence)}.'
            )


def check_compiler_options(options: Any) -> None:
    """Raises TypeError if `options` is not a mapping from the names of XLA options to values, or None."""
    if not isinstance(options, Mapping | None):
        raise TypeError(
            f"`compiler_options` maps names to values, got {type(options).__name__}. Of XLA flags, pass "
            '`jdist.xla_flags("tpu").compiler_options`.'
        )
    for name, value in (options or {}).items():
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"The value of {one_line(name)} in `compiler_options` must be a number, a boolean or a string, got "
                f"{one_line(value)}."
            )


def run_program(fn: Callable[[], Callable[..., PyTree]], backend: Backend, context: ReplicaContext) -> Program:
    """Returns the program of `Strategy.run`: it takes `(args, kwargs)` and returns `((), outputs)`.

    Args:
        fn: Returns the replica function. The program does not keep the function alive.
        backend: Runs the function on the devices.
        context: The replica context of the strategy.
    """

    def user_call(args: Arguments) -> UserCall:
        return UserCall(fn(), *unpacked(args, has_state=False))

    def as_pair(outputs: PyTree) -> Results:
        # JAX does not partition a `shard_map` without results: callbacks in it would run on one device.
        return () if jax.tree.leaves(outputs) else jnp.int32(0), outputs

    warn_of_many_programs(fn(), backend)
    return _program(fn(), user_call, as_pair, backend, context)


def init_program(fn: Callable[[], Callable[..., PyTree]], backend: Backend, context: ReplicaContext) -> Program:
    """Returns the program of `Strategy.init`: it takes the arguments of `fn()` and returns `(state, ())`. As `run_program`."""

    def user_call(args: Arguments) -> UserCall:
        return UserCall(fn(), unpacked(args, has_state=False), {})

    def split(state: PyTree) -> tuple[PyTree, tuple[()]]:
        check_state_metrics(state)
        return state, ()

    return _program(fn(), user_call, split, backend, context, [NewState()])


def step_program(
    fn: Callable[..., tuple[PyTree, PyTree]], options: StepOptions, backend: Backend, context: ReplicaContext
) -> Program:
    """Returns the program of `Strategy.step`: it takes `(state, *inputs)` and returns the new state and the outputs.

    Several steps per call are one program that scans over them, if the backend supports it. On CPU devices a step with a
    convolution is called once per step. Virtual replicas run in a loop of their own in any case.

    Raises:
        ValueError: `static_argnames` are not the last parameters of `fn`.
    """
    check_callable(fn)
    check_static_argnames(fn, options.static_argnames)

    def user_call(args: Arguments) -> UserCall:
        if not args:
            raise TypeError(
                f"`{function_name(fn)}` is a step and was called without arguments. Pass its state: "
                "`step(state, *inputs)`."
            )
        args = unpacked(args, has_state=True)
        return UserCall(fn, [x.split() if isinstance(x, StackedInputs) else x for x in args], {})

    if options.view == "global":
        _check_global_view(fn, context)
    warn_of_many_programs(fn, backend)
    stages = [StepPolicies(options.precision), StateUpdate()]
    program = _program(fn, user_call, functools.partial(split_result, fn), backend, context, stages, options)
    functools.update_wrapper(program, fn, updated=())
    program.options, program._has_static = options, bool(options.static_argnames)

    def make(positional: Callable[..., Any]) -> Program:
        form = step_program(positional, dataclasses.replace(options, static_argnames=()), backend, context)
        form.on_trace.append(program._note_trace)
        return form

    program._forms = CallForms(fn, options.static_argnames, program, make)
    return program


def _check_global_view(fn: Any, context: ReplicaContext) -> None:
    """Raises ValueError if a step in the global view would compute something else in this context."""
    if context.num_replicas_in_sync == 1 and not context.is_asynchronous:
        return
    reason = (
        "workers update the state at different times, each from its own batch"
        if context.is_asynchronous
        else f"each of {context.num_replicas_in_sync} replicas would update its copy of the state from its part of the batch"
    )
    raise ValueError(
        f'`{function_name(fn)}` has `view="global"`, so it is a step of the global batch. Under '
        f"`{type(context.strategy).__name__}`, {reason}. `jdist.ShardedStrategy` runs it as it is. To run it here, leave "
        '`view` out, and add the line `grads = jdist.all_reduce("mean", grads)` before the update.'
    )


def _program(
    fn: Callable[..., Any],
    user_call: Callable[[Arguments], UserCall],
    as_pair: Callable[[Any], Results],
    backend: Backend,
    context: ReplicaContext,
    function_stages: Sequence[Stage] = (),
    options: StepOptions | None = None,
) -> Program:
    check_callable(fn)
    has_state, options = options is not None, options or StepOptions(donate=False)
    compiler_options, name = options.compiler_options, function_name(fn)
    user_stages: Sequence[Stage] = getattr(fn, "program_stages", list)()
    donates = options.donate and all(stage.donates for stage in user_stages)
    spec = ProgramSpec(
        name,
        user_call,
        as_pair,
        backend,
        context,
        function_stages,
        user_stages,
        has_state,
        donates,
        compiler_options,
        options.view == "global",
        options.equivalence,
    )
    loop = None if options.steps_per_call is None else StepLoop(spec, options.steps_per_call)
    return Program(spec, stages_of(spec, loop))


def split_result(fn: Callable[..., Any], result: Any) -> tuple[PyTree, PyTree]:
    """Returns the state and the outputs that a step returned.

    Raises:
        TypeError: The step did not return a pair.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    got = "None" if result is None else dtype_and_shape(result)
    got = f"a tuple of {len(result)}" if isinstance(result, tuple) else got
    advice = "A step without outputs returns `(state, None)`."
    parameters = inspect.signature(fn).parameters.values() if result is None else ()
    names = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(names) > 2 and "state" not in names:  # as of `nnx.jit`, whose functions change several objects
        objects = ", ".join(names[:-1])
        advice = (
            f"The state is the first argument, `{names[0]}`. A step that changes several arguments takes them as one tuple: "
            f"`def {function_name(fn)}(state, {names[-1]})` with `{objects} = state`, which returns `(({objects}), None)`."
        )
    raise TypeError(f"A step must return a pair `(state, outputs)`, and this one returned {got}. {advice}")
