"""Random keys: one for all replicas, one for each, one for each example."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.tree import dtype_and_shape
from jdist._src.replica.context import require_replica_context


def replica_key(key: jax.Array) -> jax.Array:
    """A random key of this replica's own, made of one that all share: `fold_in(key, replica_id())`.

    What is drawn from it differs per replica, so store `key` in the state and not what this returns.

    Args:
        key: A key, typed or raw.

    Raises:
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> draw = lambda key: jax.random.uniform(jdist.replica_key(key))
        >>> a, b = strategy.run(draw, (jax.random.key(0),)).values
        >>> float(a) == float(b)
        False
    """
    context = require_replica_context("replica_key", "jax.random.split")
    return jax.random.fold_in(key, context.replica_id_in_sync_group)


def example_key(key: jax.Array, index: jax.Array) -> jax.Array:
    """A random key of each example's own: `fold_in(key, index)`.

    What is drawn from it depends on the example and not on where it is computed, so that dropout, augmentation and noise
    are the same on 1 and on 8 replicas.

    Args:
        key: A key that all share, typed or raw.
        index: The numbers of the examples, `[...]` of integers: their places in the global batch or in the dataset. The rows
            of a batch of `n` a replica are `jdist.replica_id() * n + jnp.arange(n)`.

    Returns:
        Keys `[...]`, for `jax.vmap`.

    Raises:
        TypeError: `index` is not of integers.
        ValueError: A number has more than 32 bits.

    Example:
        >>> keys = jdist.example_key(jax.random.key(0), np.arange(4))
        >>> jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys).shape
        (4, 3)
    """
    numbers = index if isinstance(index, jax.Array) else jnp.asarray(_in_32_bits(np.asarray(index)))
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise TypeError(f"`index` numbers examples, in integers, got {dtype_and_shape(index)}.")
    fold = jax.random.fold_in
    for _ in numbers.shape:
        fold = jax.vmap(fold, in_axes=(None, 0))
    return fold(key, numbers)


def _in_32_bits(numbers: np.ndarray) -> np.ndarray:
    if numbers.dtype.kind not in "iu" or not numbers.size:
        return numbers
    if numbers.min() < -(2**31) or numbers.max() >= 2**32:
        raise ValueError(
            f"`index` goes up to {numbers.max()}, and keys are told apart by 32 bits. Take it modulo 2**32."
        )
    return numbers.astype(np.uint32)
