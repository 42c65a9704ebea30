"""Random keys per replica and per example, derived from a key that all replicas share."""

import contextlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jdist._src.core.nn_modules import is_variable
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.jaxpr.marks import KEY_MARK
from jdist._src.replica.context import require_replica_context


def replica_key(key: jax.Array) -> jax.Array:
    """Returns a random key that is different on each replica: `fold_in(key, replica_id())`.

    Numbers drawn from it vary between replicas, so store `key` in the state, and not the result of this function.

    Args:
        key: A replicated key, typed or raw.

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
    return jax.random.fold_in(key, checkpoint_name(context.replica_id_in_sync_group, KEY_MARK))


@contextlib.contextmanager
def replica_rngs(*modules: PyTree) -> Iterator[None]:
    """Makes the random keys in nnx modules different on each replica, within a `with` block.

    In the block each `nnx.RngKey` is the `replica_key` of its value, so that dropout uses another mask on each replica. After
    the block the keys have their previous values, so the state stays replicated. Counters continue.

    Args:
        modules: Trees with nnx modules or `nnx.Rngs`.

    Raises:
        TypeError: The trees do not contain an `nnx.RngKey`.
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> from flax import nnx
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> @strategy.step
        ... def draw(rngs):
        ...     with jdist.replica_rngs(rngs):
        ...         noise = rngs.normal((3,))
        ...     return rngs, noise
        >>> rngs, noise = draw(strategy.init(lambda: nnx.Rngs(0)))
        >>> noise, int(rngs.default.count[...])
        (PerReplica(float32[2,3]), 1)
    """
    rng_key = getattr(sys.modules.get("flax.nnx"), "RngKey", ())
    nodes = jax.tree.leaves(modules, is_leaf=is_variable)
    keys = {id(node): node for node in nodes if isinstance(node, rng_key)}.values()
    if not keys:
        raise TypeError(
            "`replica_rngs` takes modules with random keys, and found no `nnx.RngKey`. Pass a module that was created with "
            "`rngs=`, or an `nnx.Rngs`; for a key use `jdist.replica_key(key)`."
        )
    previous = [key.get_raw_value() for key in keys]
    for key, value in zip(keys, previous, strict=True):
        key.set_raw_value(replica_key(value))
    try:
        yield
    finally:
        for key, value in zip(keys, previous, strict=True):
            key.set_raw_value(value)


def example_key(key: jax.Array, index: jax.Array) -> jax.Array:
    """Returns one random key per example: `fold_in(key, index)`.

    Numbers drawn from it depend on the example and not on the replica that computes it, so dropout, augmentation and noise are
    the same on 1 and on 8 replicas.

    Args:
        key: A replicated key, typed or raw.
        index: The indices of the examples, integers `[...]`: their positions in the global batch or in the data set. With `n`
            examples per replica, the positions in the global batch are `jdist.replica_id() * n + jnp.arange(n)`.

    Returns:
        Keys `[...]`, for `jax.vmap`.

    Raises:
        TypeError: `index` does not contain integers.
        ValueError: An index has more than 32 bits.

    Example:
        >>> keys = jdist.example_key(jax.random.key(0), np.arange(4))
        >>> jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys).shape
        (4, 3)
    """
    indices = index if isinstance(index, jax.Array) else jnp.asarray(_to_32_bits(np.asarray(index)))
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"`index` must contain integers, the positions of examples, got {dtype_and_shape(index)}.")
    fold = jax.random.fold_in
    for _ in indices.shape:
        fold = jax.vmap(fold, in_axes=(None, 0))
    return fold(key, indices)


def _to_32_bits(indices: np.ndarray) -> np.ndarray:
    if indices.dtype.kind not in "iu" or not indices.size:
        return indices
    if indices.min() < -(2**31) or indices.max() >= 2**32:
        raise ValueError(f"`index` is as large as {indices.max()}, and `fold_in` uses 32 bits. Pass it modulo 2**32.")
    return indices.astype(np.uint32)
