"""Several steps per call (`steps_per_call`): one program that scans over them, or one call of a program per step.

XLA's CPU convolutions are about 9 times slower in a loop, so there a step with a convolution is called once per step.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree, describe_type, dtype_and_shape, named_leaves
from jdist._src.execution.interrupts import run_held_back
from jdist._src.jaxpr.interpreter import contains_outside_loops
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica, unread_rows
from jdist._src.values.unread_rows import StackedRows


class SlowLoopError(Exception):
    """A loop over the steps would be slower than one call per step. Raised while the loop is traced; `Program` handles it."""


def scan_steps(
    step: Callable[..., tuple[PyTree, PyTree]], num_steps: int, on_cpu: bool, state: PyTree, *inputs: PyTree
) -> Any:
    """Returns the state after `num_steps` steps and their outputs, leaves `[step, ...]`. Called in a replica function.

    Args:
        step: From the state and the inputs of a step to the new state and the outputs.
        num_steps: The number of steps.
        on_cpu: Whether the program runs on CPU devices.
        state: The state before the first step.
        inputs: The inputs, each a list with one element per step.

    Raises:
        SlowLoopError: A step contains a convolution, and runs on CPU devices.
    """
    stacked = _stack(inputs_per_step(inputs, num_steps))

    def checked_step(state: PyTree, inputs: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        if not on_cpu:
            return step(state, *inputs)
        program, shapes = jax.make_jaxpr(step, return_shape=True)(state, *inputs)
        if contains_outside_loops(program.jaxpr, "conv_general_dilated"):
            raise SlowLoopError
        leaves = jax_compat.jaxpr_function(program)(*jax.tree.leaves((state, inputs)))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return lax.scan(checked_step, jax.tree.map(jnp.asarray, state), stacked, num_steps)


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


def run_sequentially(
    launch: Callable[[tuple[PyTree, ...]], tuple[PyTree, PyTree]], num_steps: int, args: tuple[PyTree, ...]
) -> tuple[PyTree, PyTree]:
    """Returns the same as `scan_steps` for the program of one step, which the host calls once per step."""
    state, *inputs = args
    outputs_per_step, steps = [], inputs_per_step(inputs, num_steps)

    def run() -> tuple[PyTree, PyTree]:
        new_state = state
        for step_inputs in steps:
            new_state, outputs = launch((new_state, *step_inputs))
            outputs_per_step.append(outputs)
        return new_state, _stack_outputs(outputs_per_step)

    return run_held_back(run)  # the first call donates the caller's state


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
