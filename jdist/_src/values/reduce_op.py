"""`ReduceOp`: the reductions over the replicas, and the dtypes that support them."""

import enum
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdist._src.core.arguments import enum_member
from jdist._src.core.tree import dtype_and_shape, one_line

ReduceOpName: TypeAlias = Literal["sum", "mean", "max", "min", "SUM", "MEAN", "MAX", "MIN"]


class ReduceOp(enum.Enum):
    """A reduction over the replicas.

    Functions that take a `ReduceOp` also accept its name, in any case: `"mean"`.

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
        """Returns the reduction with this name.

        Raises:
            ValueError: No reduction has this name.
        """
        if isinstance(op, (str, cls)):
            return enum_member(cls, op, f"{one_line(op)} is not a reduction")
        raise ValueError(f'{one_line(op)} is not a reduction. The operation is the first argument, such as "mean".')


def check_reducible(op: ReduceOp, name: str, leaf: Any) -> None:
    """Raises TypeError if the dtype of `leaf` does not support `op`: keys, booleans, and MAX or MIN of complex numbers."""
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{name} is a random key ({dtype_and_shape(leaf)}): keys cannot be reduced. Reduce the numbers drawn from it."
        )
    if getattr(dtype, "kind", "") in "USOmM":
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}, not a number or an array of numbers, and cannot be reduced by "
            f"{op.name}."
        )
    if dtype == jnp.bool_:
        raise TypeError(
            f"{name} is boolean ({dtype_and_shape(leaf)}), and {op.name} of booleans is ambiguous. Cast it with "
            "`x.astype(jnp.int32)`: SUM counts, MAX is any, MIN is all."
        )
    if op in (ReduceOp.MAX, ReduceOp.MIN) and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} is complex ({dtype_and_shape(leaf)}), and {op.name} is not defined for complex numbers. Reduce "
            "`abs(x)`, or the real and imaginary parts."
        )


def sortable(op: ReduceOp, x: jax.Array) -> jax.Array:
    """Returns integers in the order of the floats `x`, so that their MAX or MIN is NaN where any operand is, as in `jnp.max`.

    XLA's all-reduce of floats drops NaN on the CPU. NaN becomes the greatest integer for MAX and the least for MIN; `-0.0` is
    less than `0.0`. Floats of less than 32 bits become int32, which every backend reduces. For another reduction, or another
    dtype, `x` is returned unchanged.

    Raises:
        NotImplementedError: While differentiating: an all-reduce of MAX or MIN is not differentiable.
    """
    if not _is_sorted(op, x.dtype):
        return x
    x = _without_gradient(x)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    integer = jnp.iinfo(np.dtype(f"int{wide.dtype.itemsize * 8}"))
    ordered = _mirror_negatives(lax.bitcast_convert_type(wide, integer.dtype))
    return jnp.where(jnp.isnan(wide), integer.max if op is ReduceOp.MAX else integer.min, ordered)


def from_sortable(op: ReduceOp, x: jax.Array, dtype: Any) -> jax.Array:
    """Returns `x` in its original dtype: the inverse of `sortable`."""
    if not _is_sorted(op, dtype):
        return x
    wide = lax.bitcast_convert_type(_mirror_negatives(x), np.dtype(f"float{x.dtype.itemsize * 8}"))
    return wide.astype(dtype)


def _is_sorted(op: ReduceOp, dtype: Any) -> bool:
    return op in (ReduceOp.MAX, ReduceOp.MIN) and bool(jnp.issubdtype(dtype, jnp.floating))


def _mirror_negatives(bits: jax.Array) -> jax.Array:
    """Reverses the order of negative numbers, whose floats are stored as sign and magnitude. Applied twice, the identity."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


@jax.custom_jvp
def _without_gradient(x: jax.Array) -> jax.Array:
    """Returns `x`. Raises when differentiated: the gradient of its bits would silently be zero."""
    return x


@_without_gradient.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "`jdist.all_reduce` with MAX or MIN is not differentiable. Stop the gradient before it: "
        '`jdist.all_reduce("max", jax.lax.stop_gradient(x))`.'
    )
