"""Names that jdist gives to values of a traced function (`checkpoint_name`), by which analyses of its jaxpr find them."""

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation

GRADIENT_MARK = "jdist.sync.gradients"  # the input of a policy
PSEUDO_GRADIENT_MARK = "jdist.sync.way"  # a policy's input that is the difference of parameters over local steps
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
