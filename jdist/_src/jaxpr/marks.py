"""Names that jdist gives to values (`checkpoint_name`) and calls of a traced function, for the analyses of its jaxpr.

A call has a name where jdist knows a property of its result that does not follow from its equations: a sum over the replicas
by another algorithm than `psum`, or a mean that is rounded. XLA inlines the calls.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation

T = TypeVar("T")

GRADIENT_MARK = "jdist.sync.gradients"  # the input of a policy
# The change of parameters over local steps. `clip_check` searches no further: clipping in local steps is not a mistake.
PSEUDO_GRADIENT_MARK = "jdist.sync.pseudo_gradients"
SUM_MARK = "jdist.all_reduce_sum"  # the operands of the user's sums, before they are packed with others
MEAN_MARK = "jdist.all_reduce_mean"  # the operands of means over the replicas
KEY_MARK = "jdist.replica_key"  # the index that is folded into a key of a replica
STALENESS_MARK = "jdist.staleness"  # the staleness of an update, 0 outside `ParameterServerStrategy`
LOOKUP_MARK = "jdist.lookup"  # a table whose rows are looked up
READ_MARK = "jdist.read"  # a value of the state as the worker has read it
CONSTANT_MARK = "jdist.captured: "  # a captured value; the name in messages follows


def mark_of(equation: Equation) -> str:
    """Returns the name that an equation gives to its operand, or an empty string."""
    return jax_compat.name_of(equation) if equation.primitive.name == "name" else ""


REDUCE_CALL = "jdist.reduce"  # each result is its operand, reduced over the replicas; the operation follows
APPROXIMATE_CALL = "jdist.approximate"  # the first results are means; their number and the policy follow
FINITE_CALL = "jdist.finite"  # whether all operands are finite
GUARD_CALL = "jdist.unless"  # the first operand is a condition under which the results, the others, are zeros already


def named_call(fn: Callable[..., T], kind: str, *details: Any) -> Callable[..., T]:
    """Returns `fn` of arrays as a call with a name."""
    call = jax_compat.with_current_lines(fn)
    call.__name__ = call.__qualname__ = " ".join([kind, *map(str, details)])
    return jax.jit(call)


def call_name(equation: Equation) -> list[str]:
    """Returns the kind and the details in the name that `named_call` gave to an equation, or an empty list."""
    name = equation.params.get("name") if equation.primitive.name == "jit" else None
    return name.split() if isinstance(name, str) and name.startswith("jdist.") else []
