"""Policies that send gradients in fewer bits."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jdist._src.collectives import ops
from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.tree import PyTree, is_float, one_line
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
    make_policy,
    mark_gradients,
    policy_context,
)
from jdist._src.sync.reduction import mean


@explains_arguments()
def in_dtype(dtype: Any, *, reduction: optax.GradientTransformation | None = None) -> Policy:
    """Rounds the gradients to `dtype`, reduces them by `reduction`, and converts the result to their own dtype.

    The rounding error of the gradient that a replica sends is added to its next gradient (error feedback). The sum is computed
    in `dtype` and rounded accordingly; XLA may compute it in a wider dtype, as its CPU backend does with bfloat16.

    Args:
        dtype: A floating-point dtype. Leaves that are not rounded by the conversion are left unchanged.
        reduction: The policy that reduces the rounded gradients; `mean()` by default.

    Returns:
        A transformation of each replica's gradients `[...]`, with a residual for each rounded leaf in its state.

    Raises:
        TypeError: `dtype` is not a floating-point dtype, or `reduction` is not a gradient transformation.

    Example:
        >>> tx = optax.chain(jdist.sync.in_dtype(jnp.bfloat16), optax.adamw(1e-3))
    """
    dtype = float_dtype("`dtype` of `jdist.sync.in_dtype`", dtype)
    mantissa_bits = jnp.finfo(dtype).nmant
    reduction = check_transformation("in_dtype", "reduction", mean() if reduction is None else reduction)

    def is_rounded(leaf: Any) -> bool:
        return is_float(leaf) and jnp.finfo(leaf.dtype).nmant > mantissa_bits

    def cast(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    def init(params: PyTree) -> FeedbackState:
        rounded, others = partition_leaves(params, is_rounded)
        return FeedbackState(
            zero_residual("in_dtype", rounded), None, reduction.init(merge_leaves(cast(rounded), others))
        )

    def update(
        grads: PyTree, state: FeedbackState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, FeedbackState]:
        context = policy_context("in_dtype")
        rounded, others = partition_leaves(mark_gradients(grads), is_rounded)
        exact = add_residual(context, rounded, state.residual)
        sent = cast(exact)
        reduced, policy_state = reduction.update(merge_leaves(sent, others), state.policy_state, params, **extra_args)
        replicas = context.num_replicas_in_sync
        residual = jax.tree.map(lambda x, y: (x - y.astype(x.dtype)) / replicas, exact, sent)
        return jax.tree.map(lambda g, r: r.astype(g.dtype), grads, reduced), FeedbackState(residual, None, policy_state)

    return make_policy(init, update)


@explains_arguments()
def int8(
    *,
    fallback: optax.GradientTransformation | None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    block_size: int = 256,
    seed: int = 0,
) -> Policy:
    """Averages the gradients over the replicas, sent as int8: a quarter of the bytes of float32.

    Each replica scales its gradient, block by block, to integers from -127 to 127, and sends each other replica the part that
    this replica sums (all-to-all); the sums are sent back as int8 (all-gather). The rounding errors of both messages are added
    to the next gradient (error feedback).

    Args:
        fallback: The policy of leaves that have fewer than `block_size` numbers or are not floats; `mean()` by default.
        rounding: `"nearest"`, or `"stochastic"`: up or down at random, correct in expectation.
        block_size: The number of consecutive numbers that share a scale, a float32 sent with them.
        seed: The seed of stochastic rounding.

    Returns:
        A transformation of each replica's gradients `[...]` into their mean; replicated.

    Raises:
        ValueError: `rounding` is not one of the two names, or `block_size` is not positive.
        TypeError: `fallback` is not a gradient transformation.

    Source:
        D. Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", arXiv:1610.02132;
        T. Dettmers, "8-bit approximations for parallelism in deep learning", arXiv:1511.04561.

    Example:
        >>> tx = optax.chain(jdist.sync.int8(rounding="stochastic"), optax.adamw(1e-3))
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"`rounding` of `jdist.sync.int8` must be 'nearest' or 'stochastic', got {one_line(rounding)}."
        )
    block_size = check_integer("int8", "block_size", block_size, 1)
    fallback = check_transformation("int8", "fallback", mean() if fallback is None else fallback)

    def is_compressed(leaf: Any) -> bool:
        return is_float(leaf) and leaf.size >= block_size

    def init_codec(leaves: list[Any]) -> jax.Array | None:
        return jax.random.key(seed) if rounding == "stochastic" else None

    def send(context: ReplicaContext, leaves: list[jax.Array], key: jax.Array | None) -> CompressedMean:
        if not leaves:
            return CompressedMean([], [], key)
        key, *rounding_keys = [None] * 3 if key is None else jax.random.split(key, 3)
        replicas = context.num_replicas_in_sync
        flat, unravel = ravel_pytree(leaves)
        blocks = _split_into_blocks(flat.astype(jnp.float32), replicas, block_size)
        to_leaves = lambda blocks: unravel(blocks.ravel()[: flat.size].astype(flat.dtype))
        sent = _quantize(blocks, rounding_keys[0])
        received = _QuantizedBlocks.from_bytes(ops.all_to_all_rows(sent.bytes, context.axes))
        part_mean = jnp.sum(received.numbers, axis=0) / replicas
        sent_back = _quantize(part_mean, rounding_keys[1])
        means = _QuantizedBlocks.from_bytes(ops.stack_replicas(sent_back.bytes, context.axes))
        residual = (blocks - sent.numbers) / replicas
        residual = residual.at[context.replica_id_in_sync_group].add(part_mean - sent_back.numbers)
        return CompressedMean(to_leaves(means.numbers), to_leaves(residual), key)

    return with_feedback("int8", fallback, is_compressed, init_codec, send)


class _QuantizedBlocks(NamedTuple):
    """Numbers quantized to 8 bits.

    Attributes:
        integers: int8 `[..., block, number]`.
        scale: The value of the integer 1, float32 `[..., block]`.
    """

    integers: jax.Array
    scale: jax.Array

    @property
    def numbers(self) -> jax.Array:
        """The dequantized numbers, float32 `[..., block, number]`."""
        return self.integers * self.scale[..., None]

    @property
    def bytes(self) -> jax.Array:
        """Integers and scale in one array, for a single message: int8 `[..., block, number + 4]`."""
        return jnp.concatenate([self.integers, lax.bitcast_convert_type(self.scale, jnp.int8)], axis=-1)

    @classmethod
    def from_bytes(cls, message: jax.Array) -> "_QuantizedBlocks":
        return cls(message[..., :-4], lax.bitcast_convert_type(message[..., -4:], jnp.float32))


def _split_into_blocks(flat: jax.Array, replicas: int, size: int) -> jax.Array:
    """Reshapes `[number]` to `[replica, block, number]`, padded with zeros."""
    blocks = math.ceil(flat.size / (replicas * size))
    return jnp.pad(flat, (0, replicas * blocks * size - flat.size)).reshape(replicas, blocks, size)


def _quantize(x: jax.Array, key: jax.Array | None) -> _QuantizedBlocks:
    """Quantizes float32 `[..., block, number]`; rounds at random with `key`, else to the nearest integer."""
    # XLA's CPU programs drop NaN in a maximum (https://github.com/openxla/xla/issues/21461). The sum is 0, or NaN in a block
    # with a number that is not finite.
    scale = jnp.max(jnp.abs(x), axis=-1) / 127 + jnp.sum(x * 0, axis=-1)
    scaled = x / jnp.where(scale == 0, 1, scale)[..., None]
    # Each replica draws its own noise: with the same noise, the rounding errors would not average out.
    rounded = jnp.round(scaled) if key is None else jnp.floor(scaled + jax.random.uniform(replica_key(key), x.shape))
    return _QuantizedBlocks(jnp.clip(rounded, -127, 127).astype(jnp.int8), scale)
