"""Top-k sparsification: replicas send their largest gradient entries only."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jdist._src.collectives import ops
from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.tree import is_float, one_line
from jdist._src.replica.context import ReplicaContext
from jdist._src.sync.error_feedback import CompressedMean, with_feedback
from jdist._src.sync.policy import Policy, check_number, check_transformation
from jdist._src.sync.reduction import mean


@explains_arguments()
def top_k(fraction: float, *, fallback: optax.GradientTransformation | None = None) -> Policy:
    """Averages the largest entries of each replica's gradients, by magnitude; the other entries are sent later.

    Of each leaf a replica sends the largest `fraction` of the entries and their indices, by an all-gather. Unsent entries are
    added to the next gradient (error feedback). Every replica receives the entries of all others: the policy reduces the
    bytes if `fraction` times the number of replicas is much less than 1.

    Args:
        fraction: In (0, 1]; at least one entry of each leaf is sent. With 1, `fallback` reduces all leaves.
        fallback: The policy of leaves that have a single entry, are not floats, or would be sent completely; `mean()` by
            default.

    Returns:
        A transformation of each replica's gradients `[...]` into the mean of the sent entries; replicated.

    Raises:
        ValueError: `fraction` is not in (0, 1].
        TypeError: `fraction` is not a number, or `fallback` is not a gradient transformation.

    Source:
        Y. Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training",
        arXiv:1712.01887; D. Alistarh et al., "The convergence of sparsified gradient methods", arXiv:1809.10505.

    Example:
        >>> tx = optax.chain(jdist.sync.top_k(0.01), optax.sgd(0.1))
    """
    if not 0 < check_number("top_k", "fraction", fraction) <= 1:
        raise ValueError(
            f"`fraction` of `jdist.sync.top_k` must be in (0, 1], got {one_line(fraction)}. 0.01 sends one entry in 100."
        )
    fallback = check_transformation("top_k", "fallback", mean() if fallback is None else fallback)

    def num_sent(leaf: Any) -> int:
        return math.ceil(fraction * leaf.size)

    def is_compressed(leaf: Any) -> bool:
        return is_float(leaf) and num_sent(leaf) < leaf.size

    def send(context: ReplicaContext, leaves: list[jax.Array], codec: None) -> CompressedMean:
        if not leaves:
            return CompressedMean([], [], codec)
        replicas = context.num_replicas_in_sync
        starts = np.cumsum([0] + [leaf.size for leaf in leaves])
        exact, unravel = ravel_pytree(leaves)
        flat = exact.astype(jnp.float32)
        indices = jnp.concatenate(
            [
                start + lax.top_k(jnp.abs(leaf.ravel()), num_sent(leaf))[1].astype(jnp.int32)
                for start, leaf in zip(starts, leaves, strict=False)
            ]
        )
        message = jnp.stack([lax.bitcast_convert_type(flat[indices], jnp.int32), indices])
        received = ops.stack_replicas(message, context.axes)

        def add(total: jax.Array, message: jax.Array) -> tuple[jax.Array, None]:
            # Sequentially by replica, with unique indices each: all devices add in the same order.
            entries = lax.bitcast_convert_type(message[0], jnp.float32)
            return total.at[message[1]].add(entries, unique_indices=True), None

        total, _ = lax.scan(add, jnp.zeros_like(flat), received)
        residual = flat.at[indices].set(0) / replicas
        to_leaves = lambda x: unravel(x.astype(exact.dtype))
        return CompressedMean(to_leaves(total / replicas), to_leaves(residual), codec)

    return with_feedback("top_k", fallback, is_compressed, lambda leaves: None, send)
