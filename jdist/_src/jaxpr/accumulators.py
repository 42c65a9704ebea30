"""Whether a program adds to its accumulators: each new accumulator is the old one plus a value of the other inputs.

Such a program can run on parts of the data from zero, and the accumulators can be added.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.jaxpr.interpreter import Function, Interpreter, ScanFunction, fixed_point, scan_to_fixed_point
from jdist._src.jaxpr.primitives import IDENTITIES

_INDEPENDENT, _OTHER = "independent", "other"
# The number of an accumulator stands for this accumulator plus a value that does not depend on any accumulator.
_Value: TypeAlias = int | str


def not_accumulated(jaxpr: Jaxpr, count: int) -> dict[int, str]:
    """Returns the accumulators of `jaxpr` to which it does more than to add, each with the reason.

    A sum that this analysis does not recognize is in the result.

    Args:
        jaxpr: Its first `count` inputs are the accumulators, and its outputs the new ones.
        count: The number of accumulators.
    """
    others = [_INDEPENDENT] * (len(jaxpr.invars) - count)
    values = _Accumulators().run(jaxpr, [_INDEPENDENT] * len(jaxpr.constvars), [*range(count), *others])
    reasons = {_INDEPENDENT: "replaces it", _OTHER: "does more than to add to it"}
    return {i: reasons.get(value, "replaces it") for i, value in enumerate(values) if value != i}  # type: ignore[arg-type]


class _Accumulators(Interpreter[_Value]):
    def constant(self, value: Any) -> _Value:
        return _INDEPENDENT

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[_Value]) -> list[_Value]:
        if all(value == _INDEPENDENT for value in operands):
            return [_INDEPENDENT] * len(equation.outvars)
        name, (first, *others) = equation.primitive.name, operands
        is_added = all(value == _INDEPENDENT for value in others)
        if name in IDENTITIES or (name == "convert_element_type" and _is_exact(equation)):
            return operands
        if name in ("add", "add_any") and first == _INDEPENDENT:
            return others
        if name in ("add", "add_any", "sub", "scatter-add", "scatter_add") and is_added:
            return [first]
        if name == "select_n" and first == _INDEPENDENT and len(set(others)) == 1:
            return others[:1]
        return [_OTHER] * len(equation.outvars)

    def call(self, equation: Equation, body: Function[_Value], operands: list[_Value]) -> list[_Value]:
        if equation.primitive.name != "shard_map":
            return body(operands)
        is_independent = all(value == _INDEPENDENT for value in operands)
        return [_INDEPENDENT if is_independent else _OTHER] * len(equation.outvars)

    def switch(
        self, equation: Equation, index: _Value, branches: Sequence[Function[_Value]], operands: Sequence[_Value]
    ) -> list[_Value]:
        columns = zip(*[branch(operands) for branch in branches], strict=True)
        return [column[0] if index == _INDEPENDENT and len(set(column)) == 1 else _OTHER for column in columns]

    def while_loop(
        self,
        equation: Equation,
        test: Callable[[Sequence[_Value]], _Value],
        body: Function[_Value],
        carry: Sequence[_Value],
    ) -> list[_Value]:
        last = fixed_point(body, carry, _join)
        return last if test(last) == _INDEPENDENT else [_OTHER] * len(last)

    def scan(
        self, equation: Equation, body: ScanFunction[_Value], carry: Sequence[_Value], xs: Sequence[_Value]
    ) -> list[_Value]:
        slices = [value if value == _INDEPENDENT else _OTHER for value in xs]
        last, ys = scan_to_fixed_point(body, carry, slices, _join)
        return last + [y if y == _INDEPENDENT else _OTHER for y in ys]


def _is_exact(equation: Equation) -> bool:
    """Whether a conversion changes no number by more than rounding."""
    old, new = jax_compat.dtype_of(equation.invars[0]), jax_compat.dtype_of(equation.outvars[0])
    return jnp.issubdtype(new, jnp.inexact) or jnp.promote_types(old, new) == new


def _join(value: _Value, other: _Value) -> _Value:
    return value if value == other else _OTHER
