"""Describes a traced program such that processes can compare their programs: one line per equation, one sum per constant.

The lines contain only what is the same in every process that traces the same code: no addresses, no identities, and sets in
sorted order. A parameter of a type that is not known here is described by its type alone.
"""

import enum
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.core.tree import dtype_and_shape
from jdist._src.jaxpr import calls


class Constant(NamedTuple):
    """A value that a traced function closes over.

    Attributes:
        spec: Its dtype and shape.
        crc: The CRC-32 of its bytes; 0 for an array that other processes hold a part of.
        place: The line of the user's code that uses it, or "".
    """

    spec: str
    crc: int
    place: str


class Line(NamedTuple):
    """An equation of a program, or a boundary of one.

    Attributes:
        text: The primitive, its operands and its parameters.
        place: The line of the user's code that made it, or "".
    """

    text: str
    place: str


def lines_of(program: Any) -> list[Line]:
    """Returns a line for each equation of a closed jaxpr, in order, with the equations of the jaxprs that it contains."""
    return list(_lines(jax_compat.open_jaxpr(program)))


def constants_of(program: Any) -> list[Constant]:
    """Returns the constants of a closed jaxpr and of the jaxprs that it contains."""
    return list(_constants(program))


def crc_of(value: Any) -> int:
    """Returns the CRC-32 of a value's bytes, or 0 for an array that other processes hold a part of."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return 0
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return zlib.crc32(np.ascontiguousarray(jax.device_get(value)).tobytes())


def _lines(program: Jaxpr) -> Iterator[Line]:
    numbers = {var: number for number, var in enumerate([*program.constvars, *program.invars])}

    def described(atom: Any) -> str:
        aval = f"{atom.aval.dtype}{list(atom.aval.shape)}" if hasattr(atom.aval, "dtype") else type(atom.aval).__name__
        if isinstance(atom, Literal):
            return f"{_plain(atom.val)}:{aval}"
        return f"{numbers.setdefault(atom, len(numbers))}:{aval}"

    for equation in program.eqns:
        operands, results = (", ".join(map(described, atoms)) for atoms in (equation.invars, equation.outvars))
        params = ", ".join(f"{key}={_plain(value)}" for key, value in sorted(equation.params.items()))
        yield Line(f"{results} = {equation.primitive.name}[{params}] {operands}", _place(equation))
        for inner in jax_compat.contents(equation).programs:
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
            yield Constant(dtype_and_shape(value), crc_of(value), _first_use(jaxpr, var))
    for equation in jaxpr.eqns:
        for inner in jax_compat.closed_programs(equation):
            yield from _constants(inner)


def _first_use(program: Jaxpr, var: Any) -> str:
    for equation in program.eqns:
        if var in (atom for atom in equation.invars if not isinstance(atom, Literal)):
            call = calls.call_of(equation)
            pairs = zip(call.operands(equation.invars), call.program.invars, strict=True) if call else ()
            inner = next((_first_use(call.program, name) for atom, name in pairs if atom is var), "") if call else ""
            return inner or _place(equation)
    return ""


def _place(equation: Equation) -> str:
    frame = source_lines.equation_frame(equation)
    return f"{frame} in {frame.function}" if frame else ""
