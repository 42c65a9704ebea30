"""Collectives over named mesh axes, for values as one replica sees them.

With no axes there is one replica, and each of these is the identity. `jdist.context` supplies the axes of the replica
function that is being traced; that is where the public words are.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist._tree import PyTree, named_leaves, spec
from jdist.proof import SUM_SCOPE
from jdist.values import is_distributed


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
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        raise ValueError(f"{op!r} is not a reduction; take one of {', '.join(repr(name) for name in cls.__members__)}.")


def check_reducible(op: ReduceOp, name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is of a dtype that has no reduction `op`: a key, or a boolean."""
    dtype = jax.typeof(leaf).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} is a random key ({spec(leaf)}): keys cannot be reduced. Reduce what is drawn from it.")
    if dtype == jnp.bool_:
        raise TypeError(
            f"{name} is boolean ({spec(leaf)}), and {op.name} of booleans has no one meaning. Cast it: "
            "`x.astype(jnp.int32)` and SUM counts, MAX is any, MIN is all."
        )


def all_reduce(op: ReduceOp, tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """The leaves of `tree`, `[...]`, reduced over the replicas element by element; every replica gets the result."""
    _check_plain(tree)
    for name, leaf in named_leaves("value", tree):
        check_reducible(op, name, leaf)
    return jax.tree.map(lambda x: _REDUCTIONS[op](jnp.asarray(x), axes), tree)


def all_gather(tree: PyTree, axis: int, axes: tuple[str, ...]) -> PyTree:
    """The leaves of all replicas joined along dimension `axis`: `[..., n, ...]` gives `[..., replica * n, ...]`.

    Raises:
        ValueError: A leaf has no such dimension; the message names it.
    """
    _check_plain(tree)
    for name, leaf in named_leaves("value", tree):
        check_dim(name, leaf, axis)
    if not axes:
        return jax.tree.map(jnp.asarray, tree)
    return jax.tree.map(lambda x: lax.all_gather(x, axes, axis=axis, tiled=True), tree)


def _check_plain(tree: PyTree) -> None:
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        if is_distributed(node):
            raise TypeError(
                f"{node!r} is for the host program, and collectives take one replica's plain arrays. Hand it to a replica "
                "function (`strategy.run(fn, (value,))`), or use `strategy.reduce` or `strategy.gather`."
            )


def check_dim(name: str, leaf: Any, dim: int) -> None:
    """Raises ValueError if `leaf` has no dimension `dim`, counted from 0."""
    if not 0 <= dim < jnp.ndim(leaf):
        raise ValueError(f"{name} is {spec(leaf)}: it has no dimension {dim}. Take `axis` from 0 up, below the rank.")


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    with jax.named_scope(SUM_SCOPE):
        return lax.psum(x, axes) if axes else x


def _mean(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    # With no axes too, so that an integer's mean is a float under every strategy.
    return lax.pmean(x, axes) if axes else x / 1 if jnp.issubdtype(x.dtype, jnp.integer) else x


def _max(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pmax(x, axes) if axes else x


def _min(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pmin(x, axes) if axes else x


_REDUCTIONS = {ReduceOp.SUM: _sum, ReduceOp.MEAN: _mean, ReduceOp.MAX: _max, ReduceOp.MIN: _min}
