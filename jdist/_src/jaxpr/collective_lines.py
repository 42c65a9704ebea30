"""Lists the collectives of a jaxpr with their source lines, for the report of a process that waits in them."""

from collections.abc import Sequence
from typing import Any

from jdist._src.core import jax_compat, source_lines
from jdist._src.jaxpr.interpreter import all_equations

_NAMES = {"psum": "all_reduce", "pmax": "all_reduce", "pmin": "all_reduce", "all_gather_invariant": "all_gather"}
_COLLECTIVES = frozenset((*_NAMES, "all_gather", "all_to_all", "ppermute", "reduce_scatter"))


def collective_lines(program: Any) -> Sequence[str]:
    """Returns the collectives of a closed jaxpr in order, each line once: `["all_reduce at train.py:41"]`.

    A collective that jdist adds, as in the step of a `Trainer`, has no line.
    """
    equations = [
        equation
        for equation in all_equations(jax_compat.open_jaxpr(program))
        if equation.primitive.name in _COLLECTIVES
    ]
    return list(dict.fromkeys(map(_line, equations)))


def collective_name(equation: jax_compat.Equation) -> str:
    """Returns the name of the function that a user calls for a collective: `all_reduce` for a `psum`."""
    return _NAMES.get(equation.primitive.name, equation.primitive.name)


def _line(equation: jax_compat.Equation) -> str:
    frame = source_lines.equation_frame(equation)
    has_line = frame is not None and not source_lines.is_in_jdist(frame)
    return collective_name(equation) + (f" at {frame}" if has_line else "")
