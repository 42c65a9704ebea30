"""Reductions over replicas of 16-bit floats as reductions of float32.

XLA's CPU compiler ends the process ("Invalid binary instruction opcode copy", jax 0.10 to 0.12) where a computation that it
partitions contains a reduction of bfloat16 over a manual axis. Without partitioning it widens the operands to float32 itself,
so the bits are the same.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.jaxpr.interpreter import Evaluator, all_equations, nested_equations

_REDUCTIONS = frozenset(("psum", "pmax", "pmin", "reduce_scatter"))
_NARROW = (jnp.bfloat16, jnp.float16)


def evaluate_widened(program: Any, arguments: Sequence[Any]) -> list[Any]:
    """Returns the results of a closed jaxpr for `arguments`, with the reductions of 16-bit floats computed in float32."""
    if not any(map(_is_narrow, all_equations(program.jaxpr))):
        return jax_compat.jaxpr_function(program)(*arguments)
    return _Widened().run(program.jaxpr, program.consts, list(arguments))


class _Widened(Evaluator):
    """Evaluates jaxprs with the reductions of 16-bit floats in float32."""

    def enters(self, equation: Equation) -> bool:
        # In the body of a `shard_map` all axes may be manual, and then XLA does not partition.
        return equation.primitive.name != "shard_map" and any(
            _is_narrow(inner) for inner, _ in nested_equations(equation)
        )

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        if not _is_narrow(equation):
            return super().primitive(jaxpr, equation, operands)
        narrow = [jax_compat.dtype_of(var) in _NARROW for var in equation.invars]
        wide = [
            lax.convert_element_type(x, jnp.float32) if is_narrow else x
            for x, is_narrow in zip(operands, narrow, strict=True)
        ]
        results = jax_compat.bind_equation(equation, wide)
        pairs = zip(results, equation.outvars, strict=True)
        return [lax.convert_element_type(x, jax_compat.dtype_of(var)) for x, var in pairs]


def _is_narrow(equation: Equation) -> bool:
    is_reduction = equation.primitive.name in _REDUCTIONS
    return is_reduction and any(jax_compat.dtype_of(var) in _NARROW for var in equation.invars)
