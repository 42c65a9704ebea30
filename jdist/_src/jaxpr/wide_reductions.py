"""Reductions of bfloat16 over mesh axes as reductions of float32.

XLA's CPU compiler ends the process ("Invalid binary instruction opcode copy", jax 0.10 to 0.12) where a computation that it
partitions contains a reduction of bfloat16 over a manual axis. Elsewhere it widens the operands to float32 itself, so the bits
are the same.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.jaxpr.interpreter import Evaluator, Function, all_equations, nested_equations

_REDUCTIONS = frozenset(("psum", "pmax", "pmin", "reduce_scatter"))


def widened(program: Any, arguments: Sequence[Any]) -> Any:
    """Returns a closed jaxpr for arguments of these shapes, with its reductions of bfloat16 computed in float32."""
    if not any(map(_is_narrow, all_equations(program.jaxpr))):
        return program
    return jax.make_jaxpr(lambda *arguments: _Widened().run(program.jaxpr, program.consts, arguments))(*arguments)


class _Widened(Evaluator):
    """Evaluates jaxprs with the reductions of bfloat16 in float32."""

    def enters(self, equation: Equation) -> bool:
        return any(_is_narrow(inner) for inner, _ in nested_equations(equation))

    def call(self, equation: Equation, body: Function[Any], operands: list[Any]) -> list[Any]:
        if equation.primitive.name != "shard_map":
            return super().call(equation, body, operands)
        return list(jax_compat.shard_map_like(equation, lambda *blocks: tuple(body(blocks)))(*operands))

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        if not _is_narrow(equation):
            return super().primitive(jaxpr, equation, operands)
        dtypes = map(jax_compat.dtype_of, equation.invars)
        wide = [
            lax.convert_element_type(x, jnp.float32) if dtype == jnp.bfloat16 else x
            for x, dtype in zip(operands, dtypes, strict=True)
        ]
        pairs = zip(jax_compat.bind_equation(equation, wide), equation.outvars, strict=True)
        return [lax.convert_element_type(x, jax_compat.dtype_of(var)) for x, var in pairs]


def _is_narrow(equation: Equation) -> bool:
    is_reduction = equation.primitive.name in _REDUCTIONS
    return is_reduction and any(jax_compat.dtype_of(var) == jnp.bfloat16 for var in equation.invars)
