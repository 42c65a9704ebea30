"""A traced program of one replica where there is no other: its collectives give back what they are given.

A collective over an axis of size one is no work, and XLA has no name for the axis where one program spans all devices. So it
is taken out of the program while that is traced anew, also from what is called, branched to and looped over.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation
from jdist._src.jaxpr import calls

Rule: TypeAlias = Callable[[Equation, list[Any]], list[Any] | None]
_Runner: TypeAlias = Callable[
    ..., Callable[..., list[Any]]
]  # from an inner program, and its constants, to its function


def eliminate_collectives(program: Any, axis: str, arguments: Sequence[Any]) -> list[Any]:
    """The results of a closed program without what it says along `axis`, which is of size one."""

    def without(equation: Equation, operands: list[Any]) -> list[Any] | None:
        rule = _RULES.get(equation.primitive.name)
        return rule(equation, operands, axis) if rule else None

    axes = frozenset((axis,))
    alone = lambda *arguments: jax_compat.follow(program.jaxpr, program.consts, arguments, rewriting(axes, without))
    quiet = jax.make_jaxpr(alone, axis_env=[(axis, 1)])(*arguments)
    run = jax_compat.jaxpr_function(quiet)
    if not any(jax_compat.uses_axes(equation, axes) for equation in quiet.jaxpr.eqns):
        return run(*arguments)
    # What says something in a way that is not known is left to JAX's own rules.
    rows = jax.vmap(run, in_axes=None, axis_name=axis, axis_size=1)(*arguments)
    return [lax.squeeze(row, (0,)) for row in rows]


def rewriting(axes: frozenset[str], rule: Rule) -> Rule:
    """Applies `rule` to equations that name one of `axes`, also in programs that are called, branched to and looped over.

    Args:
        axes: The axes.
        rule: From an equation and the values of its operands to its results; None leaves the equation.

    Returns:
        A rule for `_compat.follow`. It gives None for equations that do not name one of `axes`, nor hold a program that does.
    """

    def replaced(equation: Equation, operands: list[Any]) -> list[Any] | None:
        if not jax_compat.uses_axes(equation, axes):
            return None
        results = rule(equation, operands)
        structure = _STRUCTURES.get(equation.primitive.name)
        return structure(equation, operands, run) if results is None and structure else results

    def run(program: Any, consts: Sequence[Any] | None = None) -> Callable[..., list[Any]]:
        values = getattr(program, "consts", ()) if consts is None else consts
        return lambda *arguments: jax_compat.follow(jax_compat.open_jaxpr(program), values, arguments, replaced)

    return replaced


def _same(equation: Equation, operands: list[Any], axis: str) -> list[Any] | None:
    positions = [
        one for one in equation.params.get("axes", ()) if not isinstance(one, str)
    ]  # of a `jax.vmap` in between
    alone = jax_compat.contents(equation).names <= {axis} and not positions
    return operands if alone else None


def _reshaped(equation: Equation, operands: list[Any], axis: str) -> list[Any] | None:
    """Of one part, a gather, a scatter and an exchange differ in where the dimension of size one is."""
    alone = jax_compat.contents(equation).names <= {axis}
    shapes = map(jax_compat.shape_of, equation.outvars)
    return [jnp.reshape(x, shape) for x, shape in zip(operands, shapes, strict=True)] if alone else None


def _sent(equation: Equation, operands: list[Any], axis: str) -> list[Any]:
    return operands if equation.params["perm"] else [jnp.zeros_like(x) for x in operands]


def _number(equation: Equation, operands: list[Any], axis: str) -> list[Any] | None:
    alone = jax_compat.contents(equation).names <= {axis}
    return [jnp.int32(0)] if alone else None


def _called(equation: Equation, operands: list[Any], run: _Runner) -> list[Any] | None:
    call = calls.call_of(equation)
    return run(call.program, call.consts)(*call.operands(operands)) if call else None


def _computed_again(equation: Equation, operands: list[Any], run: _Runner) -> list[Any]:
    """A part that is computed again for its gradients stays one, marked as it is."""
    traced = jax.make_jaxpr(run(equation.params["jaxpr"]))(*operands)
    return jax_compat.bind_with_program(equation, traced, operands)


def _branched(equation: Equation, operands: list[Any], run: _Runner) -> list[Any]:
    index, *rest = operands
    branches = [run(branch) for branch in equation.params["branches"]]
    return lax.switch(jnp.asarray(index, jnp.int32), branches, *rest)


def _looped(equation: Equation, operands: list[Any], run: _Runner) -> list[Any]:
    test, body = (run(equation.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
    first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    of_test, of_body, carry = operands[:first], operands[first : first + second], operands[first + second :]
    turn = lambda carry: _as(carry, body(*of_body, *carry))
    return lax.while_loop(lambda carry: test(*of_test, *carry)[0], turn, list(map(jnp.asarray, carry)))


def _scanned(equation: Equation, operands: list[Any], run: _Runner) -> list[Any]:
    num_consts, num_carry = jax_compat.scan_counts(equation)
    body = run(equation.params["jaxpr"])
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]

    def turn(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*consts, *carry, *row)
        return _as(carry, results[:num_carry]), results[num_carry:]

    rows = operands[num_consts + num_carry :]
    options = {key: equation.params[key] for key in ("length", "reverse", "unroll")}
    carry, rows = lax.scan(turn, list(map(jnp.asarray, carry)), rows, **options)
    return [*carry, *rows]


def _as(like: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """A carry of the types that it began with: it may have been weakly typed."""
    return [
        lax.convert_element_type(value, jax.typeof(one).dtype) if one.dtype != value.dtype else value
        for one, value in zip(like, values, strict=True)
    ]


_RULES: dict[str, Callable[[Equation, list[Any], str], list[Any] | None]] = {
    **dict.fromkeys(("psum", "pmax", "pmin", "pbroadcast"), _same),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all"), _reshaped),
    "ppermute": _sent,
    "axis_index": _number,
}
_STRUCTURES: dict[str, Callable[[Equation, list[Any], _Runner], list[Any] | None]] = {
    **dict.fromkeys(calls.CALLS - {"shard_map"}, _called),
    "remat2": _computed_again,
    "cond": _branched,
    "while": _looped,
    "scan": _scanned,
}
