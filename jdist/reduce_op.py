"""`ReduceOp`: how the values of the replicas become one, and of what there is none."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._arguments import choice
from jdist._tree import spec


class ReduceOp(enum.Enum):
    """How the values of the replicas become one.

    Wherever one is asked for, its name does as well, in any case: `"mean"`.

    Example:
        >>> ReduceOp.of("Sum")
        <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"

    @classmethod
    def of(cls, op: "ReduceOp | str") -> "ReduceOp":
        """The operation of that name.

        Raises:
            ValueError: There is none.
        """
        return choice(cls, op, f"{op!r} is not a reduction")


def check_reducible(op: ReduceOp, name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is of a dtype that has no reduction `op`: a key, a boolean, the order of complex numbers."""
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} is a random key ({spec(leaf)}): keys cannot be reduced. Reduce what is drawn from it.")
    if getattr(dtype, "kind", "") in "USOmM":
        raise TypeError(f"{name} is {spec(leaf)}, no number or array of numbers: it has no {op.name}.")
    if dtype == jnp.bool_:
        raise TypeError(
            f"{name} is boolean ({spec(leaf)}), and {op.name} of booleans has no one meaning. Cast it: "
            "`x.astype(jnp.int32)` and SUM counts, MAX is any, MIN is all."
        )
    if op in (ReduceOp.MAX, ReduceOp.MIN) and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} is complex ({spec(leaf)}), and complex numbers have no {op.name}. Reduce `abs(x)`, or the parts."
        )
