"""The interpreter of jaxprs, and the jaxprs that equations of the installed JAX call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.jaxpr import primitives
from jdist._src.jaxpr.interpreter import Evaluator, all_equations, fixed_point


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
        (result,) = _call(equation, [1.5] * len(equation.invars))
        assert result.shape == equation.outvars[0].aval.shape


def test_linear_solve_calls_the_solver_with_the_constants_of_the_solver():
    traced = jax.make_jaxpr(_solved)(2.0, 3.0, 12.0)
    (equation,) = (one for one in traced.jaxpr.eqns if one.primitive.name == "custom_linear_solve")
    values = dict(zip(traced.jaxpr.invars, (2.0, 3.0, 12.0), strict=True))
    assert _call(equation, [values[atom] for atom in equation.invars]) == [4.0]


def _call(equation, operands):
    """Returns the results of the jaxpr that `equation` calls."""
    call = jax_compat.called_jaxpr(equation)
    consts = getattr(call.program, "consts", ())
    return Evaluator().run(jax_compat.open_jaxpr(call.program), consts, call.operands(operands))


CONTROL_FLOW = {
    "call": lambda x: jax.jit(lambda x: x * jax.checkpoint(jnp.sin)(x))(x),
    "cond": lambda x: lax.cond(x > 0, lambda x: x + 1, lambda x: 2 * x, x),
    "switch": lambda x: lax.switch(jnp.int32(x), [jnp.sin, jnp.cos, jnp.tanh], x),
    "while": lambda x: lax.while_loop(lambda c: c[0] < x + 3, lambda c: (c[0] + 1, c[1] * x), (0, x)),
    "scan": lambda x: lax.scan(lambda c, row: (c + row * x, c), x, jnp.arange(3.0), reverse=True),
    "scan_in_cond": lambda x: lax.cond(x > 0, lambda: lax.fori_loop(0, 3, lambda i, c: c * x + i, x), lambda: x),
}


@pytest.mark.parametrize("fn", CONTROL_FLOW.values(), ids=CONTROL_FLOW)
def test_evaluator_computes_the_results_of_the_jaxpr(fn):
    program = jax.make_jaxpr(fn)(1.5)
    results = jax.jit(lambda x: Evaluator().run(program.jaxpr, program.consts, [x]))(1.5)
    for result, expected in zip(results, jax.tree.leaves(jax.jit(fn)(1.5)), strict=True):
        np.testing.assert_array_equal(result, expected, strict=True)


def test_evaluator_that_does_not_enter_keeps_the_equations():
    class Unchanged(Evaluator):
        def enters(self, equation):
            return False

    program = jax.make_jaxpr(CONTROL_FLOW["scan_in_cond"])(1.5)
    again = jax.make_jaxpr(lambda x: Unchanged().run(program.jaxpr, program.consts, [x]))(1.5)
    names = lambda traced: [equation.primitive.name for equation in all_equations(traced.jaxpr)]
    assert names(again) == names(program)


def test_fixed_point_joins_the_carry_of_all_iterations():
    rotate = lambda carry: [*carry[1:], {"new"}]
    assert fixed_point(rotate, [{1}, {2}, set()], set.union) == [{1, 2, "new"}, {2, "new"}, {"new"}]
