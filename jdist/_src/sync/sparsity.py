"""A policy that sends the largest numbers only."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jdist._src.collectives import ops
from jdist._src.replica.context import ReplicaContext
from jdist._src.sync.error_feedback import CompressedMean, with_feedback
from jdist._src.sync.policy import Policy, check_number, check_transformation, is_float
from jdist._src.sync.reduction import mean


def top_k(fraction: float, inner: optax.GradientTransformation | None = None) -> Policy:
    """The mean over the replicas of the largest numbers of each, by magnitude; the others wait.

    Of each leaf a replica sends `fraction` of its numbers and where they stand (all-gather). What it does not send is added
    to its next gradient (error feedback), until it is large enough. Every replica receives what all others send: it pays
    where `fraction` times the number of replicas is well below 1.

    Args:
        fraction: In (0, 1]; at least one number of each leaf is sent. 1 leaves all to `inner`.
        inner: The policy for leaves of one number, of no floats, and of which all would be sent; `mean()` by default.

    Returns:
        A transformation of each replica's gradients `[...]` into the mean of what is sent; mirrored.

    Raises:
        ValueError: `fraction` is not in (0, 1].
        TypeError: It is no number, or `inner` no gradient transformation.

    Source:
        Y. Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training",
        arXiv:1712.01887; D. Alistarh et al., "The convergence of sparsified gradient methods", arXiv:1809.10505.

    Example:
        >>> tx = optax.chain(jdist.sync.top_k(0.01), optax.sgd(0.1))
    """
    if not 0 < check_number("top_k", "fraction", fraction) <= 1:
        raise ValueError(
            f"`fraction` of `jdist.sync.top_k` is in (0, 1], got {fraction!r}: 0.01 sends one number in 100."
        )
    inner = check_transformation("top_k", mean() if inner is None else inner)

    def count(leaf: Any) -> int:
        return math.ceil(fraction * leaf.size)

    def chosen(leaf: Any) -> bool:
        return is_float(leaf) and count(leaf) < leaf.size

    def send(context: ReplicaContext, leaves: list[jax.Array], codec: None) -> CompressedMean:
        if not leaves:
            return CompressedMean([], [], codec)
        replicas = context.num_replicas_in_sync
        starts = np.cumsum([0] + [leaf.size for leaf in leaves])
        flat = jnp.concatenate([leaf.ravel().astype(jnp.float32) for leaf in leaves])
        places = jnp.concatenate(
            [start + _largest(leaf, count(leaf)) for start, leaf in zip(starts, leaves, strict=False)]
        )
        message = jnp.stack([lax.bitcast_convert_type(flat[places], jnp.int32), places])
        received = ops.stack_replicas(message, context.axes)

        def add(total: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
            # One replica after the other, each place once: an order of additions that all devices share.
            return total.at[one[1]].add(lax.bitcast_convert_type(one[0], jnp.float32), unique_indices=True), None

        total, _ = lax.scan(add, jnp.zeros_like(flat), received)
        lost = flat.at[places].set(0) / replicas
        cut = lambda x: [
            part.reshape(leaf.shape).astype(leaf.dtype)
            for part, leaf in zip(jnp.split(x, starts[1:-1]), leaves, strict=True)
        ]
        return CompressedMean(cut(total / replicas), cut(lost), codec)

    return with_feedback("top_k", inner, chosen, lambda leaves: None, send)


def _largest(leaf: jax.Array, count: int) -> jax.Array:
    """Where the `count` largest numbers of `leaf` stand in it, by magnitude; int32 `[count]`."""
    return lax.top_k(jnp.abs(leaf.ravel()), count)[1].astype(jnp.int32)
