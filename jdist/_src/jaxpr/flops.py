"""Counts the floating point operations of the matrix products and convolutions in a jaxpr.

XLA's cost analysis counts the body of a loop once, so a model that scans over its layers would seem to have one layer.
"""

import math
from typing import Any

from jax.interpreters import partial_eval

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr


def matmul_flops(program: Any) -> float:
    """Returns the flops of the matrix products and convolutions of a closed jaxpr: two per multiplication and addition.

    A scan counts as often as it runs its body, a `while_loop` once, and of the branches of a `cond` the largest one. A forward
    pass that `jax.checkpoint` computes again counts again. Operations whose results are unused do not count, nor do elementwise
    operations, as is usual for model flops utilization (https://arxiv.org/abs/2204.02311, appendix B).

    Args:
        program: A closed jaxpr, such as `jax.make_jaxpr(fn)(*args)`.

    Example:
        >>> matmul_flops(jax.make_jaxpr(lambda a, b: a @ b)(np.ones((2, 3)), np.ones((3, 5))))
        60.0
    """
    jaxpr = jax_compat.open_jaxpr(program)
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return float(_flops(used))


def _flops(jaxpr: Jaxpr) -> float:
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(equation: Equation) -> float:
    name = equation.primitive.name
    if name in _FLOPS:
        return _FLOPS[name](equation)
    call = jax_compat.called_jaxpr(equation)  # of a linear call, not its transpose
    jaxprs = [jax_compat.open_jaxpr(call.program)] if call else jax_compat.contents(equation).jaxprs
    inner = [_flops(jaxpr) for jaxpr in jaxprs]
    if name == "cond":
        return max(inner, default=0)
    return sum(inner) * (_executions(equation) if inner else 1)


def _executions(equation: Equation) -> int:
    """Returns how often an equation runs its jaxprs, on all devices."""
    match equation.primitive.name:
        case "scan":
            return jax_compat.scan_parts(equation).options["length"]
        case "shard_map":
            sizes, manual = equation.params["mesh"].shape, equation.params["newly_manual_axes"]
            return math.prod(sizes[axis] for axis in manual)
        case "pallas_call":
            grid = equation.params["grid_mapping"].grid
            return math.prod(size for size in grid if isinstance(size, int))
        case _:
            return 1


def _dot_flops(equation: Equation) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = jax_compat.shape_of(equation.invars[0])
    return 2 * math.prod(jax_compat.shape_of(equation.outvars[0])) * math.prod(left[i] for i in contracted)


def _ragged_dot_flops(equation: Equation) -> float:
    left, right, *_ = map(jax_compat.shape_of, equation.invars)
    return 2 * math.prod(left) * right[-1]  # each row is multiplied by the matrix of its group


def _convolution_flops(equation: Equation) -> float:
    kernel = jax_compat.shape_of(equation.invars[1])
    terms = math.prod(kernel) / kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    terms /= math.prod(equation.params["lhs_dilation"])  # the zeros between the rows of a dilated operand
    return 2 * math.prod(jax_compat.shape_of(equation.outvars[0])) * terms


_FLOPS = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "ragged_dot": _ragged_dot_flops,
    "conv_general_dilated": _convolution_flops,
}
