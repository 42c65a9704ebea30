"""Removes collectives over mesh axes of size one from a jaxpr.

The auto-sharded backend traces a step with an axis `"replica"` of size one, so that the replication analysis applies. The axis
does not exist in a program that spans all devices, so the jaxpr is traced anew without it, including called jaxprs, branches
and loop bodies. Left to `jax.vmap`, an `all_to_all` of a value that is not mapped has another shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.jaxpr.interpreter import Evaluator, uses_axes
from jdist._src.jaxpr.primitives import IDENTITY_ON_ONE, RESHAPE_ON_ONE


def eliminate_collectives(program: Any, axes: Sequence[str], arguments: Sequence[Any]) -> list[Any]:
    """Returns the results of a closed jaxpr for `arguments`, without its collectives over `axes`, each of size one."""
    evaluator = _WithoutAxes(frozenset(axes))
    evaluate = lambda *arguments: evaluator.run(program.jaxpr, program.consts, arguments)
    rewritten = jax.make_jaxpr(evaluate, axis_env=[(axis, 1) for axis in axes])(*arguments)
    run = jax_compat.jaxpr_function(rewritten)
    if not any(uses_axes(equation, frozenset(axes)) for equation in rewritten.jaxpr.eqns):
        return run(*arguments)
    # JAX's own batching rules remove the remaining collectives.
    for axis in axes:
        run = jax.vmap(run, in_axes=None, axis_name=axis, axis_size=1)
    return [lax.squeeze(row, tuple(range(len(axes)))) for row in run(*arguments)]


class _WithoutAxes(Evaluator):
    """Evaluates jaxprs without collectives over axes of size one."""

    def __init__(self, axes: frozenset[str]):
        self._axes = axes

    def enters(self, equation: Equation) -> bool:
        return equation.primitive.name != "shard_map" and uses_axes(equation, self._axes)

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        names = jax_compat.contents(equation).names
        rule = _RULES.get(equation.primitive.name) if self._axes & names else None
        # A collective over further axes, or over a dimension that `jax.vmap` batched, is left to JAX.
        is_alone = names <= self._axes and not jax_compat.has_positional_axes(equation)
        if rule is None or not is_alone:
            return super().primitive(jaxpr, equation, operands)
        return rule(equation, operands)


def _identity(equation: Equation, operands: list[Any]) -> list[Any]:
    pairs = zip(operands, equation.outvars, strict=True)  # a literal is weakly typed
    return [x if isinstance(x, jax.Array) else jnp.asarray(x, jax_compat.dtype_of(var)) for x, var in pairs]


def _reshape(equation: Equation, operands: list[Any]) -> list[Any]:
    """Over one replica, a gather, a scatter and an exchange only add, remove or move a dimension of size one."""
    shapes = map(jax_compat.shape_of, equation.outvars)
    return [jnp.reshape(x, shape) for x, shape in zip(operands, shapes, strict=True)]


def _permute(equation: Equation, operands: list[Any]) -> list[Any]:
    return operands if jax_compat.permutation(equation) else [jnp.zeros_like(x) for x in operands]


def _index(equation: Equation, operands: list[Any]) -> list[Any]:
    return [jnp.int32(0)]


_RULES: dict[str, Callable[[Equation, list[Any]], list[Any]]] = {
    **dict.fromkeys(IDENTITY_ON_ONE, _identity),
    **dict.fromkeys(RESHAPE_ON_ONE, _reshape),
    "ppermute": _permute,
    "axis_index": _index,
}
