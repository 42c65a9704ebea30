"""Builds the programs of `Strategy.run`, `Strategy.init` and `Strategy.step`, and updates the state of a step.

A step returns a new value for each leaf of its state, and changes nothing else about it: `apply_writes` checks structure,
shapes and dtypes, and aggregates the writes to `Mirrored` leaves.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core.arguments import as_int
from jdist._src.core.modules import from_array_tree, leaves_with_path, to_array_tree
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, one_line, short_line
from jdist._src.execution.backend import Backend, ProgramSpec
from jdist._src.execution.module_changes import (
    changed_attribute,
    check_returned,
    check_state_returned,
    variables_before,
)
from jdist._src.execution.module_stage import unpacked
from jdist._src.execution.multi_step import StackedInputs, StepLoop, inputs_per_step, scan_steps
from jdist._src.execution.program import Program
from jdist._src.execution.replicate import replicate, trace_replica
from jdist._src.execution.stage_order import stages_of
from jdist._src.execution.traced import Arguments, Traced, UserCall
from jdist._src.jaxpr.interpreter import contains_outside_loops
from jdist._src.replica import leaf_annotations, precision
from jdist._src.replica.context import ReplicaContext, all_reduce, broadcast
from jdist._src.replica.precision import Precision
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.arrays import check_value
from jdist._src.values.base import is_distributed, named_values
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.reduce_op import ReduceOp, check_reducible


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The options of `Strategy.step`.

    Attributes:
        precision: The dtypes of `jdist.value_and_grad` within the step.
        steps_per_call: The number of steps that one call runs, on lists of inputs; None for one step on its inputs.
        donate: Whether the new state reuses the memory of the old state.
        compiler_options: Options of XLA for the program.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: `steps_per_call` is less than 1.
    """

    precision: Precision | None = None
    steps_per_call: int | None = None
    donate: bool = True
    compiler_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.precision, Precision | None):
            raise TypeError(
                "`precision` must be a `jdist.Precision(param_dtype, compute_dtype, output_dtype)`, got "
                f"{one_line(self.precision)}."
            )
        if self.steps_per_call is not None:
            object.__setattr__(self, "steps_per_call", as_int("`steps_per_call`", self.steps_per_call, 1))
        if not isinstance(self.donate, bool):
            raise TypeError(f"`donate` is True or False, got {one_line(self.donate)}.")
        check_compiler_options(self.compiler_options)


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
    check_callable(fn())

    def user_call(args: Arguments) -> UserCall:
        return UserCall(fn(), *unpacked(args, has_state=False))

    def trace(args: Arguments) -> Traced:
        call = user_call(args)

        def body(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
            args, kwargs = from_array_tree((args, kwargs))
            before = variables_before(call.with_arguments(args, kwargs).named_arguments())
            outputs = call.fn(*args, **kwargs)
            check_returned(before, outputs)
            return (), to_array_tree(outputs)

        return replicate(call, body, backend, context)

    spec = ProgramSpec(function_name(fn()), user_call, backend)
    return Program(spec, trace, stages_of(spec))


def init_program(fn: Callable[[], Callable[..., PyTree]], backend: Backend, context: ReplicaContext) -> Program:
    """Returns the program of `Strategy.init`: it takes the arguments of `fn()` and returns `(state, ())`. As `run_program`."""
    check_callable(fn())

    def user_call(args: Arguments) -> UserCall:
        return UserCall(fn(), unpacked(args, has_state=False), {})

    def trace(args: Arguments) -> Traced:
        call = user_call(args)

        def body(*args: PyTree) -> tuple[PyTree, PyTree]:
            with leaf_annotations.collect_local_leaves() as local_leaves:
                state = to_array_tree(call.fn(*from_array_tree(args)))
            return strongly_typed(leaf_annotations.wrap_local_leaves(state, local_leaves)), ()

        return replicate(call, body, backend, context)

    spec = ProgramSpec(function_name(fn()), user_call, backend)
    return Program(spec, trace, stages_of(spec))


def step_program(
    fn: Callable[..., tuple[PyTree, PyTree]], options: StepOptions, backend: Backend, context: ReplicaContext
) -> Program:
    """Returns the program of `Strategy.step`: it takes `(state, *inputs)` and returns the new state and the outputs.

    Several steps per call are one program that scans over them, if the backend supports it. On CPU devices a step with a
    convolution is called once per step. Virtual replicas run in a loop of their own in any case.
    """
    check_callable(fn)
    name = function_name(fn)

    def user_call(args: Arguments) -> UserCall:
        if not args:
            raise TypeError(
                f"`{name}` is a step and was called without arguments. Pass its state: `step(state, *inputs)`."
            )
        args = unpacked(args, has_state=True)
        return UserCall(fn, [x.split() if isinstance(x, StackedInputs) else x for x in args], {})

    def one_step(call: UserCall) -> Callable[..., tuple[PyTree, PyTree]]:
        """Returns the step of one replica, on values without wrappers."""
        wrapped_state = call.args[0]

        def step(before: PyTree, *inputs: PyTree) -> tuple[PyTree, PyTree]:
            # `fn` gets copies of the containers, so that a change in place is seen as a change.
            args = (from_array_tree(jax.tree.map(lambda x: x, before)), *map(from_array_tree, inputs))
            (_, state), *named_inputs = call.with_arguments(args, {}).named_arguments()
            state_variables, input_variables = variables_before([("state", state)]), variables_before(named_inputs)
            with leaf_annotations.collect_sync_targets() as targets, precision.use_precision(options.precision, before):
                after, outputs = split_result(fn(*args))
            check_returned(input_variables, (after, outputs))
            after, outputs = to_array_tree(after), to_array_tree(outputs)
            check_state_returned(state_variables, after)
            after = leaf_annotations.apply_sync_targets(before, after, targets)
            return apply_writes(wrapped_state, before, after), outputs

        return step

    def trace(args: Arguments) -> Traced:
        call = user_call(args)
        step = one_step(call)

        def body(before: PyTree, *inputs: PyTree) -> tuple[PyTree, PyTree]:
            if loop is not None and loop.scans:
                after, outputs = scan_steps(step, loop.num_steps, before, *inputs)
            else:
                after, outputs = step(before, *inputs)
            return rewrap(call.args[0], after), outputs

        return replicate(call, body, backend, context, has_state=True)

    def contains_convolution(args: Arguments) -> bool:
        programs: list[Any] = []

        def trace_one_step(*args: PyTree) -> None:
            assert loop is not None
            state, *inputs = user_call(args).args
            call = UserCall(fn, [state, *inputs_per_step(inputs, loop.num_steps)[0]], {})
            step = one_step(call)
            body = lambda *args: (lambda after, outputs: (rewrap(state, after), outputs))(*step(*args))
            programs.append(trace_replica(call, body, backend, context, has_state=True).program)

        try:
            jax.eval_shape(trace_one_step, *args)
        except Exception:  # raised again where the program is traced
            return False
        return contains_outside_loops(programs[0].jaxpr, "conv_general_dilated")

    spec = ProgramSpec(
        name, user_call, backend, has_state=True, donates=options.donate, compiler_options=options.compiler_options
    )
    loop = None
    if options.steps_per_call is not None:
        on_cpu = backend.replicas.mesh.devices.flat[0].platform == "cpu" and not backend.replicas.virtual
        runs_one_step = any(stage.runs_one_step for stage in backend.stages(spec))
        loop = StepLoop(
            options.steps_per_call, False if runs_one_step else None if on_cpu else True, contains_convolution
        )
    program = Program(spec, trace, stages_of(spec, loop))
    functools.update_wrapper(program, fn, updated=())
    return program


def strongly_typed(state: PyTree) -> PyTree:
    """Returns `state` with array leaves that are not weakly typed, so that the next step cannot change their dtypes.

    Raises:
        TypeError: A leaf is not a number or an array of numbers.
        ValueError: An integer does not fit the dtype that JAX gives it.
    """
    for name, leaf in named_values("state", state):
        check_value(name, leaf)
    return jax.tree.map(_strongly_typed_leaf, state)


def split_result(result: Any) -> tuple[PyTree, PyTree]:
    """Returns the state and the outputs that a step returned.

    Raises:
        TypeError: The step did not return a pair.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    got = f"a tuple of {len(result)}" if isinstance(result, tuple) else dtype_and_shape(result)
    raise TypeError(
        f"A step must return a pair `(state, outputs)`, and this one returned {got}. A step without outputs returns "
        "`(state, None)`."
    )


def apply_writes(wrapped_state: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Returns the new state, without wrappers, with the writes to `Mirrored` leaves aggregated.

    Args:
        wrapped_state: The state that was passed to the step, with wrappers.
        before: The same state without wrappers, as the replica function receives it.
        after: The state that the replica function returned.

    Raises:
        TypeError: The structure, or the shape or dtype of a leaf, changed; or a leaf cannot be aggregated. The message names
            it.
        ValueError: A host number is to be summed over the replicas.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(_structure_change(before, after))
    for name, leaf in named_leaves("state", after):
        check_value(name, leaf)
    for number, (was, now) in enumerate(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)):
        old, new = jax.typeof(was), jax.typeof(now)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            name, _ = named_leaves("state", before)[number]
            raise TypeError(
                f"The step changes {name} from {dtype_and_shape(was)} to {dtype_and_shape(now)}. A state keeps its shapes and "
                "dtypes, otherwise every step would be compiled again: cast the new value (`.astype`), or start with "
                "this shape."
            )
    return strongly_typed(_aggregate_writes(jax.tree.leaves(wrapped_state, is_leaf=is_distributed), before, after))


def rewrap(wrapped_state: PyTree, state: PyTree) -> PyTree:
    """Returns `state`, a state without wrappers, in the wrappers of `wrapped_state`."""
    items, treedef = jax.tree.flatten(wrapped_state, is_leaf=is_distributed)
    pairs = zip(items, treedef.flatten_up_to(state), strict=True)
    return treedef.unflatten([item._with_tree(part) if is_distributed(item) else part for item, part in pairs])


def _aggregate_writes(items: Sequence[Any], before: PyTree, after: PyTree) -> PyTree:
    """Returns `after` with the writes to `Mirrored` leaves aggregated, by one collective per aggregation."""
    aggregations = [
        item.aggregation if isinstance(item, Mirrored) else VariableAggregation.NONE
        for item in items
        for _ in jax.tree.leaves(item)
    ]
    names = [name for name, _ in named_leaves("state", before)]
    olds, (news, treedef) = jax.tree.leaves(before), jax.tree.flatten(after)
    for aggregation, collective in _AGGREGATIONS.items():
        # A leaf that is the same object was not written, and a sum would multiply it.
        written = [i for i, kind in enumerate(aggregations) if kind is aggregation and news[i] is not olds[i]]
        for i in written:
            _check_write(aggregation, names[i], news[i])
        if written:
            for i, value in zip(written, collective([news[i] for i in written]), strict=True):
                news[i] = value
    return treedef.unflatten(news)


_AGGREGATIONS = {
    VariableAggregation.SUM: functools.partial(all_reduce, ReduceOp.SUM),
    VariableAggregation.MEAN: functools.partial(all_reduce, ReduceOp.MEAN),
    VariableAggregation.ONLY_FIRST_REPLICA: broadcast,
}


def _check_write(aggregation: VariableAggregation, name: str, leaf: Any) -> None:
    if aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
        check_reducible(ReduceOp.of(aggregation.name), name, leaf)
    if aggregation is VariableAggregation.SUM and not isinstance(leaf, jax.Array):
        raise ValueError(
            f"{name} is aggregated by SUM, and the replicas wrote {dtype_and_shape(leaf)}, a host value, which is not one "
            "value per replica. Write an array (`jnp.asarray`) to sum it over the replicas, or aggregate by MEAN."
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact):
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}, which cannot hold the MEAN of the values that the replicas write. Make it a "
            "float, or aggregate by SUM or ONLY_FIRST_REPLICA."
        )


def _structure_change(before: PyTree, after: PyTree) -> str:
    for path, node in leaves_with_path(after, is_leaf=is_distributed):
        if is_distributed(node):
            return (
                f"The step returned state{jax.tree_util.keystr(path)} as {type(node).__name__}: inside a replica function "
                "values are plain. Return the array; the strategy puts it back into its wrapper."
            )
    if change := changed_attribute("state", before, after):
        return (
            f"The step changes {change}. The modules of a state keep their attributes, otherwise the next step would be "
            "compiled again. Set attributes before the step, as in `model.train()`, or compute with another view of the "
            "module, as in `nnx.view(model, deterministic=True)`."
        )
    old, new = (dict(named_leaves("state", tree)) for tree in (before, after))
    missing, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    changes = [
        f"{', '.join(names[:4])} {'is' if len(names) == 1 else 'are'} {change}"
        for names, change in ((missing, "missing"), (added, "new"))
        if names
    ]
    change = (
        "; ".join(changes) or f"{short_line(jax.tree.structure(before))} became {short_line(jax.tree.structure(after))}"
    )
    return (
        f"The step changes the structure of the state: {change}. A state keeps its structure: start with every leaf "
        "that it will have, and return other values in the outputs."
    )


def _strongly_typed_leaf(leaf: Any) -> jax.Array:
    return lax.convert_element_type(leaf, jax.typeof(leaf).dtype) if jax.typeof(leaf).weak_type else jnp.asarray(leaf)


def check_callable(fn: Any) -> None:
    """Raises TypeError if `fn` is not callable."""
    if not callable(fn):
        raise TypeError(f"`fn` must be a function, got {type(fn).__name__}.")


def function_name(fn: Callable[..., Any]) -> str:
    """Returns the name of a function for messages and profiles; for other callables the name of their class."""
    name = getattr(fn, "__name__", None)
    return name or (function_name(fn.func) if isinstance(fn, functools.partial) else type(fn).__name__)
