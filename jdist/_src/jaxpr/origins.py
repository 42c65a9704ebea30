"""The origins of each result of a replica function: the inputs and the collectives that it is computed from.

It is a graph of the program without the computation between the collectives, for explanations of the replication analysis.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.jaxpr.interpreter import (
    Function,
    Interpreter,
    ScanFunction,
    fixed_point,
    scan_to_fixed_point,
    uses_axes,
)
from jdist._src.jaxpr.primitives import PER_DEVICE, REPLICATING_COLLECTIVES, VARYING_CASTS

Origins: TypeAlias = frozenset[int]  # numbers: of the inputs, and after them of the equations
_NONE: Origins = frozenset()


class Origin(NamedTuple):
    """An equation whose result depends on other replicas, or on the replica that computes it.

    Attributes:
        equation: The equation: a collective, `axis_index`, or one with an effect.
        origins: The origins of its operands.
        replicates: Whether its result is the same on every replica.
    """

    equation: Equation
    origins: Origins
    replicates: bool


def find_origins(program: Jaxpr, axes: Sequence[str]) -> tuple[list[Origins], dict[int, Origin]]:
    """Returns the origins of each output of `program`, the body of a `shard_map`, and the equations among them by number.

    Args:
        program: The traced replica function. Its inputs have the numbers 0, 1, ...
        axes: The mesh axes of the replicas.
    """
    analysis = _Analysis(frozenset(axes), len(program.invars))
    inputs = [frozenset({number}) for number in range(len(program.invars))]
    outputs = analysis.run(program, [_NONE] * len(program.constvars), inputs)
    return outputs, analysis.equations


class _Analysis(Interpreter[Origins]):
    """Computes the origins of each value.

    Attributes:
        equations: The equations among the origins, by number.
    """

    def __init__(self, axes: frozenset[str], num_inputs: int):
        self._axes = axes
        self._num_inputs = num_inputs
        self._control: Origins = _NONE  # of the predicates above the current equation
        self._numbers: dict[int, int] = {}  # by the `id` of the equation
        self.equations: dict[int, Origin] = {}

    def constant(self, value: Any) -> Origins:
        return _NONE

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Origins]) -> list[Origins]:
        if equation.primitive.name == "optimization_barrier" or equation.primitive.name in VARYING_CASTS:
            return operands
        joined = self._control.union(*operands)
        is_effect = any(map(jax_compat.may_vary_between_replicas, equation.effects))
        if not (is_effect or equation.primitive.name in PER_DEVICE or uses_axes(equation, self._axes)):
            return [joined] * len(equation.outvars)
        number = self._numbers.setdefault(id(equation), self._num_inputs + len(self._numbers))
        before = self.equations[number].origins if number in self.equations else _NONE
        replicates = equation.primitive.name in REPLICATING_COLLECTIVES and not jax_compat.has_axis_index_groups(
            equation
        )
        self.equations[number] = Origin(equation, before | joined, replicates)
        return [frozenset({number})] * len(equation.outvars)

    def switch(
        self,
        equation: Equation,
        index: Origins,
        branches: Sequence[Function[Origins]],
        operands: Sequence[Origins],
    ) -> list[Origins]:
        with self._below(index):
            results = [branch(operands) for branch in branches]
        return [index.union(*alternatives) for alternatives in zip(*results, strict=True)]

    def while_loop(
        self,
        equation: Equation,
        test: Callable[[Sequence[Origins]], Origins],
        body: Function[Origins],
        carry: Sequence[Origins],
    ) -> list[Origins]:
        def step(carry: Sequence[Origins]) -> list[Origins]:
            predicate = test(carry)
            with self._below(predicate):
                return [predicate | value for value in body(carry)]

        return fixed_point(step, carry, frozenset.union)

    def scan(
        self, equation: Equation, body: ScanFunction[Origins], carry: Sequence[Origins], xs: Sequence[Origins]
    ) -> list[Origins]:
        last, ys = scan_to_fixed_point(body, carry, xs, frozenset.union)
        return last + ys

    @contextlib.contextmanager
    def _below(self, predicate: Origins) -> Iterator[None]:
        outer, self._control = self._control, predicate | self._control
        try:
            yield
        finally:
            self._control = outer
