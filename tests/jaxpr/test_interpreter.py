"""The interpreter of jaxprs, and the jaxprs that equations of the installed JAX call."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.jaxpr import primitives


def _solved(factor, divisor, b):
    """`b` divided by `divisor`, with other constants for the operator and its transpose than for the solver."""
    return lax.custom_linear_solve(lambda v: factor * v, b, lambda _, b: b / divisor, symmetric=True)


CALLS = {
    "jit": (jax.jit(lambda x: x + 1), True),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(x)), True),
    "custom_jvp": (jax.nn.relu, True),
    "linear_solve": (lambda x: _solved(2.0, 3.0, x), True),
    "custom_vmap": (jax.custom_batching.sequential_vmap(jnp.sin), True),
    "linear_call": (lambda x: jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, x: r * x, 2.0, x), True),
    "composite": (lambda x: lax.composite(jnp.sin, "test.sine")(x), True),
    "cond": (lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x), False),
    "sine": (jnp.sin, False),
}


@pytest.mark.parametrize("fn, is_call", CALLS.values(), ids=CALLS)
def test_called_jaxpr_takes_the_operands_of_the_equation_and_returns_its_results(fn, is_call):
    equation = jax.make_jaxpr(fn)(1.5).jaxpr.eqns[-1]
    assert (equation.primitive.name in primitives.CALLS) == is_call
    if is_call:
        call = jax_compat.called_jaxpr(equation)
        (result,) = jax_compat.jaxpr_function(call.program)(*call.operands([1.5] * len(equation.invars)))
        assert result.shape == equation.outvars[0].aval.shape


def test_linear_solve_calls_the_solver_with_the_constants_of_the_solver():
    traced = jax.make_jaxpr(_solved)(2.0, 3.0, 12.0)
    (equation,) = (one for one in traced.jaxpr.eqns if one.primitive.name == "custom_linear_solve")
    values = dict(zip(traced.jaxpr.invars, (2.0, 3.0, 12.0), strict=True))
    call = jax_compat.called_jaxpr(equation)
    operands = call.operands([values[atom] for atom in equation.invars])
    assert jax_compat.jaxpr_function(call.program)(*operands) == [4.0]
