"""Several steps per call (`steps_per_call`): one program that scans over them, or one call of a program per step.

XLA's CPU convolutions are about 9 times slower in a loop (https://github.com/jax-ml/jax/issues/12868), so there a step with a
convolution is called once per step.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef

from jdist._src.core.tree import PyTree, describe_type, dtype_and_shape, named_leaves
from jdist._src.execution.backend import ProgramSpec
from jdist._src.execution.compiled_function import CompiledFunction
from jdist._src.execution.interrupts import run_deferring_interrupts
from jdist._src.execution.replicate import trace_replica
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, CallFn, LowerFn, ReplicaFn, Results, TraceFn, UserCall
from jdist._src.jaxpr.interpreter import contains_outside_loops
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica, unread_rows
from jdist._src.values.unread_rows import StackedRows


class StepLoop:
    """How a program runs several steps per call: as a scan, or by one call of the program per step.

    Mutable: if it depends on the step, the first call sets it.

    Args:
        spec: The program.
        num_steps: The number of steps per call.

    Attributes:
        num_steps: The number of steps per call.
        scans: Whether it is a scan; None if it depends on the step.
        stages: The stages of the program.
    """

    def __init__(self, spec: ProgramSpec, num_steps: int):
        self._spec, self.num_steps = spec, num_steps
        replicas = spec.backend.replicas
        on_cpu = replicas.mesh.devices.flat[0].platform == "cpu" and not replicas.virtual
        runs_one_step = any(stage.runs_one_step for stage in spec.backend.stages(spec))
        self.scans: bool | None = False if runs_one_step else None if on_cpu else True
        self.stages: Sequence[Stage] = ()

    def decide(self, args: Arguments) -> bool:
        """Returns whether it is a scan."""
        if self.scans is None:
            self.scans = not self._contains_convolution(args)
        return self.scans

    def _contains_convolution(self, args: Arguments) -> bool:
        programs: list[Any] = []

        def trace_one_step(*args: PyTree) -> None:
            fn, (state, *inputs), _ = self._spec.user_call(args)
            call = UserCall(fn, [state, *inputs_per_step(inputs, self.num_steps)[0]], {})
            programs.append(trace_replica(call, self._spec, self.stages).program)

        try:
            jax.eval_shape(trace_one_step, *args)
        except Exception:  # raised again where the program is traced
            return False
        return contains_outside_loops(programs[0].jaxpr, "conv_general_dilated")


class StackedSteps(Stage):
    """Scans over the steps of a call, with the unread batches of all steps as one array."""

    def __init__(self, loop: StepLoop):
        self._loop = loop

    def wrap_function(self, fn: ReplicaFn, call: UserCall) -> ReplicaFn:
        """See `Stage`."""
        return functools.partial(scan_steps, fn, self._loop.num_steps) if self._loop.scans else fn

    def wrap_trace(self, trace: TraceFn) -> TraceFn:
        """See `Stage`."""
        return lambda args: trace(args)._replace(num_steps=self._loop.num_steps if self._loop.scans else 1)

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""

        def call_stacked(args: Arguments) -> Results:
            stacked = (*args[:1], *map(StackedInputs.of, args[1:]))
            return call(stacked if self._loop.decide(stacked) else args)

        return call_stacked

    def wrap_lower(self, lower: LowerFn, compiled: CompiledFunction) -> LowerFn:
        """See `Stage`."""

        def lower_steps(args: Arguments) -> jax.stages.Lowered:
            if self._loop.decide(args):
                return lower(args)
            return lower((args[0], *inputs_per_step(args[1:], self._loop.num_steps)[0]))

        return lower_steps


class RepeatedSteps(Stage):
    """Calls the program of one step once per step, where the steps of a call are not a scan."""

    def __init__(self, loop: StepLoop):
        self._loop = loop

    def wrap_call(self, call: CallFn, compiled: CompiledFunction) -> CallFn:
        """See `Stage`."""
        return lambda args: call(args) if self._loop.scans else run_sequentially(call, self._loop.num_steps, args)


def scan_steps(step: Callable[..., Results], num_steps: int, state: PyTree, *inputs: PyTree) -> Any:
    """Returns the state after `num_steps` steps and their outputs, leaves `[step, ...]`. Called in a replica function.

    Args:
        step: From the state and the inputs of a step to the new state and the outputs.
        num_steps: The number of steps.
        state: The state before the first step.
        inputs: The inputs, each a list with one element per step.
    """
    stacked = _stack(inputs_per_step(inputs, num_steps))
    return lax.scan(lambda state, inputs: step(state, *inputs), jax.tree.map(jnp.asarray, state), stacked, num_steps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedInputs:
    """An input of several steps, as an argument of their program.

    Attributes:
        columns: Each leaf of an element for all steps: `StackedRows`, or a list of a `PerReplica` or leaf per step.
        treedef: The structure of the list of elements.
    """

    columns: list[Any]
    treedef: PyTreeDef = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(steps: Any) -> Any:
        """Returns the input `steps` of a call with its unread batches stacked; `steps` itself without any."""
        if type(steps) is not list or not steps:
            return steps
        leaves, treedef = jax.tree.flatten(steps, is_leaf=_is_per_replica)
        num_columns, remainder = divmod(len(leaves), len(steps))
        if remainder:  # the elements have different structures, which the trace refuses
            return steps
        columns = [leaves[column::num_columns] for column in range(num_columns)]
        stacked = [_stacked_rows(values) or values for values in columns]
        return steps if all(map(operator.is_, stacked, columns)) else StackedInputs(stacked, treedef)

    def split(self) -> list[PyTree]:
        """Returns the list of the elements."""
        num_steps = self.treedef.num_leaves // len(self.columns)
        columns = [
            list(map(PerReplica, column.split(num_steps))) if isinstance(column, StackedRows) else column
            for column in self.columns
        ]
        return self.treedef.unflatten(itertools.chain.from_iterable(zip(*columns, strict=True)))


def _is_per_replica(node: Any) -> bool:
    return type(node) is PerReplica


def _stacked_rows(values: list[Any]) -> StackedRows | None:
    """Returns the same leaf of each step as one array, if none was read."""
    rows: list[Any] = list(map(unread_rows, values))
    return None if None in rows else rows[0].group.stacked(rows)


def _stack(values: Sequence[PyTree]) -> PyTree:
    """Returns the values stacked, `[step, ...]`.

    By way of `[1, step, ...]`: XLA replaces concatenated slices of one array by a part of the array, but not if a dimension was
    removed in between, and `StackedRows.split` slices arrays `[replica, batch, ...]`.
    """
    return jax.tree.map(lambda *leaves: jnp.concatenate([leaf[None, None] for leaf in leaves], axis=1)[0], *values)


def run_sequentially(call: CallFn, num_steps: int, args: Arguments) -> Results:
    """Returns the same as `scan_steps` for the program of one step, which the host calls once per step."""
    state, *inputs = args
    outputs_per_step, steps = [], inputs_per_step(inputs, num_steps)

    def run() -> Results:
        new_state = state
        for step_inputs in steps:
            new_state, outputs = call((new_state, *step_inputs))
            outputs_per_step.append(outputs)
        return new_state, _stack_outputs(outputs_per_step)

    return run_deferring_interrupts(run)  # the first call donates the caller's state


def inputs_per_step(inputs: Sequence[Any], num_steps: int) -> list[tuple[PyTree, ...]]:
    """Returns the inputs of each step, from inputs that are lists with one element per step.

    Raises:
        ValueError: An input is not a list of `num_steps` elements, or its elements differ in structure or shapes.
    """
    for number, values in enumerate(inputs, start=1):
        # A tuple is one batch `(x, y)`. Accepted as two steps, it would be scanned silently.
        if not isinstance(values, list) or len(values) != num_steps:
            got = f"a list of {len(values)}" if isinstance(values, list) else describe_type(values)
            raise ValueError(
                f"With `steps_per_call={num_steps}` each input is a list of {num_steps} elements, one per step, and input "
                f"{number} is {got}. Write `step(state, [batch, ...])`."
            )
        for step, value in enumerate(values):
            _check_same_shapes(f"inputs[{number - 1}]", values[0], step, value)
    return list(zip(*inputs, strict=True)) if inputs else [()] * num_steps


def _check_same_shapes(name: str, first: PyTree, step: int, other: PyTree) -> None:
    if jax.tree.structure(first) != jax.tree.structure(other):
        raise ValueError(
            f"{name}[{step}] and {name}[0] have different structures. All steps of a call take inputs of the same structure."
        )
    for (leaf_name, a), (_, b) in zip(named_leaves(f"{name}[{step}]", other), named_leaves(name, first), strict=True):
        if np.shape(a) != np.shape(b):
            raise ValueError(
                f"{leaf_name} is {dtype_and_shape(a)}, and {dtype_and_shape(b)} in the first step. All steps of a call take "
                "inputs of the same shapes."
            )


@jax.jit
def _stack_outputs(outputs_per_step: list[PyTree]) -> PyTree:
    def stack(*items: Any) -> Any:
        axis = 1 if isinstance(items[0], PerReplica) else 0
        return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=axis), *items)

    return jax.tree.map(stack, *outputs_per_step, is_leaf=is_distributed)
