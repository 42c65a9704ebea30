"""Describes a jaxpr so that processes can compare theirs: one line per equation, one checksum per constant.

The lines are equal on all processes that trace the same code: they contain no addresses, and sets are in sorted order. For a
parameter of an unknown type, a line contains the type alone.

The module does not use the interpreter: it lists the equations of each jaxpr with its variables numbered, and computes no
values.
"""

import enum
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.ad_checkpoint import checkpoint_name

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.core.tree import dtype_and_shape, has_dtype
from jdist._src.jaxpr.interpreter import all_equations
from jdist._src.jaxpr.marks import CONSTANT_MARK, mark_of
from jdist._src.jaxpr.primitives import CALLS


class Constant(NamedTuple):
    """A value that a traced function captures.

    Attributes:
        dtype_and_shape: Such as `"float32[3]"`.
        crc: The CRC-32 of its bytes; 0 for an array that other processes hold shards of.
        place: The line of the user's code that uses it, or "".
        name: The name that `named_constant` gave it, or "".
    """

    dtype_and_shape: str
    crc: int
    place: str
    name: str = ""


class Line(NamedTuple):
    """An equation of a jaxpr, or the start or return of one.

    Attributes:
        text: The primitive, its operands and its parameters.
        place: The line of the user's code that the equation comes from, or "".
    """

    text: str
    place: str


def lines_of(program: Any) -> list[Line]:
    """Returns a line for each equation of a closed jaxpr, in order, with the equations of the jaxprs inside it."""
    return list(_lines(jax_compat.open_jaxpr(program)))


def constants_of(program: Any) -> list[Constant]:
    """Returns the constants of a closed jaxpr and of the jaxprs inside it."""
    return list(_constants(program))


def crc_of(value: Any) -> int:
    """Returns the CRC-32 of a value's bytes, or 0 for an array that other processes hold shards of."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return 0
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # a program is compared while it is traced
            value = jax.random.key_data(value)
    return zlib.crc32(np.ascontiguousarray(jax.device_get(value)).tobytes())


def _lines(program: Jaxpr) -> Iterator[Line]:
    numbers = {var: number for number, var in enumerate([*program.constvars, *program.invars])}

    def described(atom: Any) -> str:
        aval = f"{atom.aval.dtype}{list(atom.aval.shape)}" if has_dtype(atom.aval) else type(atom.aval).__name__
        if isinstance(atom, Literal):
            return f"{_plain(atom.val)}:{aval}"
        return f"{numbers.setdefault(atom, len(numbers))}:{aval}"

    for equation in program.eqns:
        operands, results = (", ".join(map(described, atoms)) for atoms in (equation.invars, equation.outvars))
        params = ", ".join(f"{key}={_plain(value)}" for key, value in sorted(equation.params.items()))
        yield Line(f"{results} = {equation.primitive.name}[{params}] {operands}", _place(equation))
        for inner in jax_compat.contents(equation).jaxprs:
            yield Line("begin", "")
            yield from _lines(inner)
    yield Line(f"return {', '.join(map(described, program.outvars))}", "")


def _plain(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 and value.dtype.kind in "biufc":
        return repr(value.item())
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return f"{dtype_and_shape(value)}#{crc_of(value)}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_plain, value))) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_plain, value)) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_plain(key)}: {_plain(item)}" for key, item in value.items())) + "}"
    if isinstance(value, jax.sharding.PartitionSpec):
        return str(value)
    return type(value).__name__


def _constants(program: Any) -> Iterator[Constant]:
    jaxpr = jax_compat.open_jaxpr(program)
    for var, value in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False):
        if not isinstance(value, core.Tracer):
            yield Constant(dtype_and_shape(value), crc_of(value), _first_use(jaxpr, var), _name_of(jaxpr, var))
    for equation in jaxpr.eqns:
        for inner in jax_compat.closed_jaxprs(equation):
            yield from _constants(inner)


def named_constant(name: str, value: jax.Array) -> jax.Array:
    """Returns `value`, which a traced function captures and messages call `name`."""
    return checkpoint_name(value, f"{CONSTANT_MARK}{name}")


def _name_of(program: Jaxpr, var: Any) -> str:
    marks = (mark_of(one) for one in all_equations(program) if var in one.invars)
    return next((mark.removeprefix(CONSTANT_MARK) for mark in marks if mark.startswith(CONSTANT_MARK)), "")


def _first_use(program: Jaxpr, var: Any) -> str:
    for equation in program.eqns:
        if var in (atom for atom in equation.invars if not isinstance(atom, Literal)):
            call = jax_compat.called_jaxpr(equation) if equation.primitive.name in CALLS else None
            place_in_call = ""
            if call is not None:
                called = jax_compat.open_jaxpr(call.program)
                pairs = zip(call.operands(equation.invars), called.invars, strict=True)
                place_in_call = next((_first_use(called, inner) for atom, inner in pairs if atom is var), "")
            return place_in_call or _place(equation)
    return ""


def _place(equation: Equation) -> str:
    frame = source_lines.equation_frame(equation)
    return f"{frame} in {frame.function}" if frame and not source_lines.is_in_jdist(frame) else ""
