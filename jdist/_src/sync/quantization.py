"""Policies that send each number in fewer bits."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdist._src.collectives import ops
from jdist._src.core.tree import PyTree
from jdist._src.replica.context import ReplicaContext
from jdist._src.replica.precision import float_dtype
from jdist._src.replica.random import replica_key
from jdist._src.sync.error_feedback import (
    CompressedMean,
    FeedbackState,
    add_residual,
    merge_leaves,
    partition_leaves,
    with_feedback,
    zero_residual,
)
from jdist._src.sync.policy import (
    Policy,
    check_integer,
    check_transformation,
    is_float,
    mark_gradients,
    policy_context,
    policy_of,
)
from jdist._src.sync.reduction import mean


def in_dtype(dtype: Any, inner: optax.GradientTransformation | None = None) -> Policy:
    """Gradients rounded to `dtype` before `inner` reduces them, and given their own dtype again.

    What rounding takes away from what a replica sends is added to its next gradient (error feedback). The sum is then one of
    numbers in `dtype`, and is rounded as they are; XLA may add up in a wider dtype, as its CPU backend does with bfloat16.

    Args:
        dtype: A floating-point dtype. Leaves that lose no digits in it are left as they are.
        inner: The policy that reduces; `mean()` by default.

    Returns:
        A transformation of each replica's gradients `[...]`, with a residual for each leaf in its state.

    Raises:
        TypeError: `dtype` is no floating-point dtype, or `inner` no gradient transformation.

    Example:
        >>> tx = optax.chain(jdist.sync.in_dtype(jnp.bfloat16), optax.adamw(1e-3))
    """
    dtype = float_dtype("`dtype` of `jdist.sync.in_dtype`", dtype)
    digits = jnp.finfo(dtype).nmant
    inner = check_transformation("in_dtype", mean() if inner is None else inner)

    def loses(leaf: Any) -> bool:
        return is_float(leaf) and jnp.finfo(leaf.dtype).nmant > digits

    def lower(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    def first(params: PyTree) -> FeedbackState:
        mine, others = partition_leaves(params, loses)
        return FeedbackState(zero_residual("in_dtype", mine), None, inner.init(merge_leaves(lower(mine), others)))

    def update(
        grads: PyTree, state: FeedbackState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, FeedbackState]:
        context = policy_context("in_dtype")
        mine, others = partition_leaves(mark_gradients(grads), loses)
        meant = add_residual(context, mine, state.residual)
        low = lower(meant)
        total, kept = inner.update(merge_leaves(low, others), state.inner, params, **extra)
        count = context.num_replicas_in_sync
        lost = jax.tree.map(lambda x, y: (x - y.astype(x.dtype)) / count, meant, low)
        return jax.tree.map(lambda g, t: t.astype(g.dtype), grads, total), FeedbackState(lost, None, kept)

    return policy_of(first, update)


def int8(
    inner: optax.GradientTransformation | None = None,
    *,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    block_size: int = 256,
    seed: int = 0,
) -> Policy:
    """The mean over the replicas, sent in 8 bits a number: a quarter of the bytes of float32.

    Every replica scales its gradient, block by block, to whole numbers from -127 to 127, and sends each other replica the
    part that this one adds up (all-to-all); the sums go back in 8 bits again (all-gather). What rounding takes away, on both
    ways, is added to the next gradient (error feedback).

    Args:
        inner: The policy for leaves of fewer than `block_size` numbers and of no floats; `mean()` by default.
        rounding: To the nearest number, or up and down at random, right on average.
        block_size: How many neighbours share a scale, a float32 sent with them.
        seed: Of the random rounding.

    Returns:
        A transformation of each replica's gradients `[...]` into their mean; mirrored.

    Raises:
        ValueError: There is no such rounding, or `block_size` is not positive.
        TypeError: `inner` is no gradient transformation.

    Source:
        D. Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", arXiv:1610.02132;
        T. Dettmers, "8-bit approximations for parallelism in deep learning", arXiv:1511.04561.

    Example:
        >>> tx = optax.chain(jdist.sync.int8(rounding="stochastic"), optax.adamw(1e-3))
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"`rounding` of `jdist.sync.int8` is 'nearest' or 'stochastic', got {rounding!r}.")
    block_size = check_integer("int8", "block_size", block_size, 1)
    inner = check_transformation("int8", mean() if inner is None else inner)

    def chosen(leaf: Any) -> bool:
        return is_float(leaf) and leaf.size >= block_size

    def init(leaves: list[Any]) -> jax.Array | None:
        return jax.random.key(seed) if rounding == "stochastic" else None

    def send(context: ReplicaContext, leaves: list[jax.Array], key: jax.Array | None) -> CompressedMean:
        if not leaves:
            return CompressedMean([], [], key)
        key, *draws = [None] * 3 if key is None else jax.random.split(key, 3)
        count = context.num_replicas_in_sync
        flat = jnp.concatenate([leaf.ravel().astype(jnp.float32) for leaf in leaves])
        parts = _blocks(flat, count, block_size)
        there = _quantized(parts, draws[0])
        received = _Blocks.of_bytes(ops.all_to_all_rows(there.bytes, context.axes))
        own = jnp.sum(received.numbers, axis=0) / count
        back = _quantized(own, draws[1])
        arrived = _Blocks.of_bytes(ops.stack_replicas(back.bytes, context.axes))
        lost = (parts - there.numbers) / count
        lost = lost.at[context.replica_id_in_sync_group].add(own - back.numbers)
        return CompressedMean(_like(arrived.numbers, leaves), _like(lost, leaves), key)

    return with_feedback("int8", inner, chosen, init, send)


class _Blocks(NamedTuple):
    """Numbers in 8 bits.

    Attributes:
        whole: int8 `[..., block, number]`.
        scale: What 1 stands for, float32 `[..., block]`.
    """

    whole: jax.Array
    scale: jax.Array

    @property
    def numbers(self) -> jax.Array:
        """What they stand for, float32 `[..., block, number]`."""
        return self.whole * self.scale[..., None]

    @property
    def bytes(self) -> jax.Array:
        """As they are sent, all in one: int8 `[..., block, number + 4]`."""
        return jnp.concatenate([self.whole, lax.bitcast_convert_type(self.scale, jnp.int8)], axis=-1)

    @classmethod
    def of_bytes(cls, sent: jax.Array) -> "_Blocks":
        return cls(sent[..., :-4], lax.bitcast_convert_type(sent[..., -4:], jnp.float32))


def _blocks(flat: jax.Array, count: int, size: int) -> jax.Array:
    """`[number]` to `[count, block, number]`, filled up with zeros."""
    each = math.ceil(flat.size / (count * size))
    return jnp.pad(flat, (0, count * each * size - flat.size)).reshape(count, each, size)


def _quantized(x: jax.Array, draw: jax.Array | None) -> _Blocks:
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    scaled = x / jnp.where(scale == 0, 1, scale)[..., None]
    # At random each replica for itself, or all would round to the same side.
    noise = None if draw is None else jax.random.uniform(replica_key(draw), x.shape)
    rounded = jnp.round(scaled) if noise is None else jnp.floor(scaled + noise)
    return _Blocks(jnp.clip(rounded, -127, 127).astype(jnp.int8), scale)


def _like(parts: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
    """The numbers of `parts`, in the shapes and dtypes of `leaves`."""
    flat, found, start = parts.ravel(), [], 0
    for leaf in leaves:
        found.append(flat[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype))
        start += leaf.size
    return found
