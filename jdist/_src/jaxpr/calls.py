"""Equations that call a program: which program, and with which of their operands.

The proof, and all that takes a traced program apart, follow such calls by these functions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr

# Equations that run one program of theirs once, and return its results. The others that `custom_linear_solve` has, and the
# rules of `custom_vmap_call` and `linear_call`, are for derivatives and `vmap`, which were applied when the program was traced.
CALLS = frozenset(
    """
    closed_call composite compute_on core_call custom_jvp_call custom_linear_solve custom_vjp_call custom_vmap_call eval_jaxpr
    jit linear_call remat2 shard_map xla_metadata_call
    """.split()  # noqa: SIM905
)
# Calls that tell the compiler something about their program, which is lost where the program takes the place of the call.
ANNOTATED_CALLS = frozenset(("composite", "compute_on", "remat2", "shard_map", "xla_metadata_call"))


class Call(NamedTuple):
    """The program that an equation calls.

    Attributes:
        program: The program; its results are those of the equation.
        consts: The values of its constants.
        positions: For each of its inputs, the position of the operand among those of the equation.
    """

    program: Jaxpr
    consts: Sequence[Any]
    positions: Sequence[int]

    def operands(self, values: Sequence[Any]) -> list[Any]:
        """The values for its inputs, from the values of all operands of the equation."""
        return [values[position] for position in self.positions]


def call_of(equation: Equation) -> Call | None:
    """The program that `equation` calls once, or None if `equation` is not such a call."""
    if equation.primitive.name not in CALLS:
        return None
    positions = range(len(equation.invars))
    if equation.primitive.name == "custom_linear_solve":
        # The operands are the constants of four programs, one after the other, and the right-hand side.
        called, lengths = equation.params["jaxprs"].solve, equation.params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        positions = [*positions[start : start + lengths.solve], *positions[sum(lengths) :]]
    else:
        called = next((equation.params[key] for key in _CALLED if key in equation.params), None)
    if called is None:
        return None
    program = jax_compat.open_jaxpr(called)
    fits = len(program.invars) == len(positions) and len(program.outvars) == len(equation.outvars)
    return Call(program, getattr(called, "consts", ()), positions) if fits else None


_CALLED = (
    "jaxpr",
    "call_jaxpr",
    "call",
    "callee",
)  # the parameter with the program, which depends on primitive and JAX
