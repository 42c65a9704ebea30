"""The test for infinite numbers and NaN, and the choice that depends on it."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from jdist._src.core.tree import PyTree
from jdist._src.jaxpr.marks import FINITE_CALL, named_call
from jdist._src.replica.context import all_reduce

NonFinite: TypeAlias = Literal["stop", "skip", "keep"]  # the treatment of a step whose loss or gradient is not finite
_SMALL_SIZE = 4096  # elements of an array that is tested together with others
# Elements from which XLA's CPU programs compute a sum in less time than `isfinite(leaf).all()`: a sum of 131,072 elements
# takes 8 us, and 160 us where devices share the threads between which XLA divides it.
_LARGE_SIZE = 1 << 19


def are_finite(tree: PyTree) -> jax.Array:
    """Returns whether all floats of `tree` are finite, bool `[]`.

    Example:
        >>> (
        ...     bool(are_finite({"w": jnp.ones(3), "n": 2})),
        ...     bool(are_finite([jnp.float16(jnp.inf)])),
        ... )
        (True, False)
    """
    leaves = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(tree)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return named_call(_are_finite, FINITE_CALL)(*leaves) if leaves else jnp.bool_(True)


def _are_finite(*leaves: jax.Array) -> jax.Array:
    # A program of many small tests takes longer than one test of a copy.
    tested = [leaf for leaf in leaves if leaf.size > _SMALL_SIZE]
    for dtype in {leaf.dtype: None for leaf in leaves}:
        small = [leaf.ravel() for leaf in leaves if leaf.size <= _SMALL_SIZE and leaf.dtype == dtype]
        tested += [jnp.concatenate(small)] if small else []
    return jnp.stack([_is_finite(leaf) for leaf in tested]).all()


def are_finite_on_all_replicas(tree: PyTree) -> jax.Array:
    """Returns whether all floats of the trees of all replicas are finite, bool `[]`; replicated."""
    return all_reduce("min", are_finite(tree).astype(jnp.int32)) == 1


def select(condition: jax.Array, tree: PyTree, other: PyTree) -> PyTree:
    """Returns the leaves of `tree` if `condition`, else the leaves of `other`; a leaf that is the same in both unchanged."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), tree, other)


def _is_finite(leaf: jax.Array) -> jax.Array:
    if leaf.size < _LARGE_SIZE:
        return jnp.isfinite(leaf).all()
    # 0, or NaN if a number is not finite. A maximum drops NaN in XLA's CPU programs: https://github.com/openxla/xla/issues/21461
    return jnp.isfinite(jnp.sum(leaf * 0))
