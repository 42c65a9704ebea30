"""Checks on values with one entry per example: random numbers that all replicas share, and clipping of averaged gradients.

An abstract interpretation of the traced function (`interpreter`) follows two sets of dims. A varying value has the dims that
index the examples of a replica, from the data on. A replicated value has the dims of its random numbers. Where both
occur in one dim of a result, each replica combines its own examples with the same random numbers: one dropout mask, or
one noise, for different examples. A sum over the examples removes the dim, so noise on gradients and on parameters is not
reported: it has to be the same on all replicas.

The interpretation is a lint. A primitive without a rule loses the dims, and then nothing is reported.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.errors import SharedRandomnessWarning
from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.jaxpr.clip_check import clips_per_example
from jdist._src.jaxpr.dims import NO_DIMS, Dims, result_dims, same_dims, scan_with_dims
from jdist._src.jaxpr.interpreter import Function, Interpreter, ScanFunction, all_equations, fixed_point
from jdist._src.jaxpr.marks import GRADIENT_MARK, mark_of
from jdist._src.jaxpr.primitives import RANDOM_BITS, REPLICATING_COLLECTIVES
from jdist._src.jaxpr.replication import Input, warn_once


@dataclasses.dataclass(frozen=True)
class _Labels:
    """The labels of a value.

    Attributes:
        axes: The mesh axes along which it varies.
        dims: Of a varying value, the dims that index examples; of a replicated value, the dims of its random numbers.
        place: The line that drew a replicated value at random.
        is_reduced: Whether it was computed from gradients that were reduced over the replicas.
    """

    axes: frozenset[str] = frozenset()
    dims: Dims = NO_DIMS
    place: source_lines.Frame | None = None
    is_reduced: bool = False


_CONSTANT = _Labels()


def check_examples(
    program: Jaxpr, inputs: Sequence[Input], num_state_leaves: int, axes: Sequence[str], num_replicas: int
) -> None:
    """Checks the traced function of one replica.

    Args:
        program: The traced function. Each input that varies is `[1, batch, ...]`.
        inputs: For each input, its name and the axes along which it may vary.
        num_state_leaves: The number of inputs, from the first, that are leaves of the state.
        axes: The mesh axes of the replicas.
        num_replicas: The number of replicas.

    Raises:
        ValueError: Gradients per example are clipped after they were reduced over the replicas.

    Warns:
        SharedRandomnessWarning: Each replica combines its own examples with the same random numbers.
    """
    data = [i >= num_state_leaves and bool(one.axes) for i, one in enumerate(inputs)]
    if not any(data):  # environments may be in the state
        data = [bool(one.axes) for one in inputs]
    if not any(data) or not any(map(_is_checked, all_equations(program))):
        return
    labels = [
        _Labels(frozenset(one.axes), frozenset({1}) if is_data and len(jax_compat.shape_of(var)) > 1 else NO_DIMS)
        for one, is_data, var in zip(inputs, data, program.invars, strict=True)
    ]
    analysis = _ExampleAnalysis(frozenset(axes))
    analysis.run(program, [_CONSTANT] * len(program.constvars), labels)
    if analysis.clipped:
        raise ValueError(
            f"{analysis.clipped} in {analysis.clipped.function} clips gradients per example, and they are reduced over the "
            "replicas already: one row is the mean of examples of different replicas. Clip first, and reduce the result: "
            "`optax.chain(optax.contrib.differentially_private_aggregate(...), jdist.sync.mean(), optax.sgd(...))`."
        )
    if analysis.shared_draw and num_replicas > 1:
        drawn, used = analysis.shared_draw
        warn_once(
            f"These random numbers are the same on each of the {num_replicas} replicas, and {used} combines them with the "
            "replica's own examples: every replica uses the same dropout mask or noise. Draw them from "
            "`jdist.replica_key(key)`, or per example from `jdist.example_key(key, index)`. Store `key` in the state, not the "
            "derived key. For nnx modules: `with jdist.replica_rngs(model):`.",
            SharedRandomnessWarning,
            drawn,
        )


def _is_checked(equation: Equation) -> bool:
    return equation.primitive.name in RANDOM_BITS or _is_norm_per_example(equation)


def _is_norm_per_example(equation: Equation) -> bool:
    """Whether an equation computes the norm of each gradient `[example, ...]`, in a function that clips them."""
    is_norm = equation.primitive.name == "sqrt" and len(jax_compat.shape_of(equation.outvars[0])) == 1
    return is_norm and clips_per_example(equation)


class _ExampleAnalysis(Interpreter[_Labels]):
    """Computes the labels of each value.

    Attributes:
        shared_draw: The line that drew random numbers on all replicas alike, and the line that combines them with examples.
        clipped: The line that clips reduced gradients per example.
    """

    def __init__(self, axes: frozenset[str]):
        self._axes = axes
        self.shared_draw: tuple[source_lines.Frame, source_lines.Frame] | None = None
        self.clipped: source_lines.Frame | None = None

    def constant(self, value: Any) -> _Labels:
        return _CONSTANT

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[_Labels]) -> list[_Labels]:
        name = equation.primitive.name
        if operands and operands[0].is_reduced and not operands[0].axes and _is_norm_per_example(equation):
            self.clipped = self.clipped or source_lines.equation_frame(equation)
        if name in REPLICATING_COLLECTIVES and not jax_compat.has_axis_index_groups(equation):
            return [self._reduced(equation, i, value) for i, value in enumerate(operands)]
        result = self._joined(equation, operands)
        if name in RANDOM_BITS and not result.axes:
            place = source_lines.call_frame(equation, self.calls)
            return [dataclasses.replace(result, dims=_all_dims(var), place=place) for var in equation.outvars]
        if mark_of(equation) == GRADIENT_MARK:
            return [dataclasses.replace(operands[0], is_reduced=True)]
        return [dataclasses.replace(result, dims=dims) for dims in self._result_dims(equation, operands)]

    def switch(
        self,
        equation: Equation,
        index: _Labels,
        branches: Sequence[Function[_Labels]],
        operands: Sequence[_Labels],
    ) -> list[_Labels]:
        results = [branch(operands) for branch in branches]
        return [_join(_Labels(index.axes), *alternatives) for alternatives in zip(*results, strict=True)]

    def while_loop(
        self,
        equation: Equation,
        test: Callable[[Sequence[_Labels]], _Labels],
        body: Function[_Labels],
        carry: Sequence[_Labels],
    ) -> list[_Labels]:
        def step(carry: Sequence[_Labels]) -> list[_Labels]:
            predicate = _Labels(test(carry).axes)
            return [_join(predicate, value) for value in body(carry)]

        return fixed_point(step, carry, _join)

    def scan(
        self, equation: Equation, body: ScanFunction[_Labels], carry: Sequence[_Labels], xs: Sequence[_Labels]
    ) -> list[_Labels]:
        return scan_with_dims(body, carry, xs, _join)

    def _joined(self, equation: Equation, operands: Sequence[_Labels]) -> _Labels:
        """Returns the labels of a result without its dims."""
        contents = jax_compat.contents(equation)
        axes = frozenset().union(self._axes & contents.names, *(value.axes for value in operands))
        if contents.opaque or any(map(jax_compat.may_vary_between_replicas, equation.effects)):
            axes = self._axes
        place = None if axes else next((value.place for value in operands if value.place), None)
        return _Labels(axes, NO_DIMS, place, any(value.is_reduced for value in operands))

    def _reduced(self, equation: Equation, i: int, value: _Labels) -> _Labels:
        """Returns the labels of result `i` of a collective with the same result on every replica, from operand `i`."""
        dims = same_dims(equation, i, value.dims, equation.outvars[i])
        if not value.axes:
            return dataclasses.replace(value, dims=dims)
        axes = value.axes - jax_compat.contents(equation).names
        is_gather = equation.primitive.name.startswith("all_gather")
        return _Labels(axes, dims if axes else NO_DIMS, None, value.is_reduced or not is_gather)

    def _result_dims(self, equation: Equation, operands: Sequence[_Labels]) -> list[Dims]:
        """Returns the dims of each result, after looking for examples and shared random numbers in one dim."""
        varies = any(value.axes for value in operands)
        results = []
        for var in equation.outvars:
            mapped = [result_dims(equation, i, value.dims, var) for i, value in enumerate(operands)]
            pairs = list(zip(operands, mapped, strict=True))
            examples = NO_DIMS.union(*(dims for value, dims in pairs if value.axes))
            drawn = [(value, dims) for value, dims in pairs if not value.axes]
            shared = next((value.place for value, dims in drawn if dims & examples), None)
            if shared and not self.shared_draw and equation.primitive.name != "sort":  # shuffling examples is harmless
                self.shared_draw = shared, source_lines.call_frame(equation, self.calls) or shared
            results.append(examples if varies else NO_DIMS.union(*mapped))
        return results


def _join(*values: _Labels) -> _Labels:
    """Returns the labels of a value that is one of `values`. If one varies, the dims of the varying values count."""
    axes = frozenset().union(*(value.axes for value in values))
    dims = NO_DIMS.union(*(value.dims for value in values if bool(value.axes) == bool(axes)))
    place = None if axes else next((value.place for value in values if value.place), None)
    return _Labels(axes, dims, place, any(value.is_reduced for value in values))


def _all_dims(var: Any) -> Dims:
    return frozenset(range(len(jax_compat.shape_of(var))))
