"""A traced program of one replica where there is no other: its collectives give back what they are given.

A collective over an axis of size one is no work, and XLA has no name for the axis where one program spans all devices. So it
is taken out of the program while that is traced anew, also from what is called, branched to and looped over.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist import _compat
from jdist._compat import Equation, Jaxpr


def run_alone(program: Any, axis: str, arguments: Sequence[Any]) -> list[Any]:
    """The results of a closed program without what it says along `axis`, which is of size one."""
    quiet = jax.make_jaxpr(_alone(program.jaxpr, program.consts, axis), axis_env=[(axis, 1)])(*arguments)
    run = _compat.function_of(quiet)
    if not any(_compat.speaks(equation, frozenset((axis,))) for equation in quiet.jaxpr.eqns):
        return run(*arguments)
    # What says something in a way that is not known is left to JAX's own rules.
    rows = jax.vmap(run, in_axes=None, axis_name=axis, axis_size=1)(*arguments)
    return [lax.squeeze(row, (0,)) for row in rows]


def _alone(program: Jaxpr, consts: Sequence[Any], axis: str) -> Callable[..., list[Any]]:
    def rule(equation: Equation, operands: list[Any]) -> list[Any] | None:
        known = _RULES.get(equation.primitive.name) if _compat.speaks(equation, frozenset((axis,))) else None
        return known(equation, operands, axis) if known else None

    return lambda *arguments: _compat.follow(program, consts, arguments, rule)


def _closed(program: Any, axis: str) -> Callable[..., list[Any]]:
    return _alone(_compat.open_jaxpr(program), getattr(program, "consts", ()), axis)


def _same(equation: Equation, operands: list[Any], axis: str) -> list[Any] | None:
    positions = [
        one for one in equation.params.get("axes", ()) if not isinstance(one, str)
    ]  # of a `jax.vmap` in between
    alone = _compat.contents(equation).names <= {axis} and not positions
    return operands if alone else None


def _reshaped(equation: Equation, operands: list[Any], axis: str) -> list[Any] | None:
    """Of one part, a gather, a scatter and an exchange differ in where the dimension of size one is."""
    alone = _compat.contents(equation).names <= {axis}
    shapes = map(_compat.shape_of, equation.outvars)
    return [jnp.reshape(x, shape) for x, shape in zip(operands, shapes, strict=True)] if alone else None


def _sent(equation: Equation, operands: list[Any], axis: str) -> list[Any]:
    return operands if equation.params["perm"] else [jnp.zeros_like(x) for x in operands]


def _number(equation: Equation, operands: list[Any], axis: str) -> list[Any] | None:
    alone = _compat.contents(equation).names <= {axis}
    return [jnp.int32(0)] if alone else None


def _called(equation: Equation, operands: list[Any], axis: str) -> list[Any] | None:
    target = _compat.call_target(equation)
    return target and _alone(target, _compat.call_consts(equation), axis)(*operands)


def _computed_again(equation: Equation, operands: list[Any], axis: str) -> list[Any]:
    """A part that is computed again for its gradients stays one, marked as it is."""
    traced = jax.make_jaxpr(_closed(equation.params["jaxpr"], axis))(*operands)
    return _compat.bind_with_program(equation, traced, operands)


def _branched(equation: Equation, operands: list[Any], axis: str) -> list[Any]:
    index, *rest = operands
    branches = [_closed(branch, axis) for branch in equation.params["branches"]]
    return lax.switch(jnp.asarray(index, jnp.int32), branches, *rest)


def _looped(equation: Equation, operands: list[Any], axis: str) -> list[Any]:
    test, body = (_closed(equation.params[key], axis) for key in ("cond_jaxpr", "body_jaxpr"))
    first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    of_test, of_body, carry = operands[:first], operands[first : first + second], operands[first + second :]
    turn = lambda carry: _as(carry, body(*of_body, *carry))
    return lax.while_loop(lambda carry: test(*of_test, *carry)[0], turn, list(map(jnp.asarray, carry)))


def _scanned(equation: Equation, operands: list[Any], axis: str) -> list[Any]:
    num_consts, num_carry = _compat.scan_counts(equation)
    body = _closed(equation.params["jaxpr"], axis)
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
    **dict.fromkeys(_compat.CALLS.keys() - {"shard_map"}, _called),
    "remat2": _computed_again,
    "ppermute": _sent,
    "axis_index": _number,
    "cond": _branched,
    "while": _looped,
    "scan": _scanned,
}
