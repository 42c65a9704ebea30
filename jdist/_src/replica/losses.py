"""Averages over the batches of all replicas, for losses and metrics.

The mean of a global batch is the mean over all its examples. The mean of the replicas' means differs from it if the replicas
hold different numbers of examples, or if padding is counted.
"""

import dataclasses
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdist._src.collectives.ops import axes_argument, check_no_row_slices, check_unwrapped, normalize_axes
from jdist._src.core.tree import PyTree, dtype_and_shape, has_dtype, named_leaves, one_line
from jdist._src.replica.context import require_replica_context
from jdist._src.values.array_checks import check_array, check_range
from jdist._src.values.reduce_op import ReduceOp, check_reducible

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class WeightedLosses:
    """Losses with their weights, which take the place of the weights of the examples: a result of a loss function.

    Attributes:
        losses: `[batch, ...]`, or one number `[]`.
        weights: The first dimensions of the losses. Without a gradient.
    """

    losses: jax.Array
    weights: jax.Array


def is_loss(value: Any) -> bool:
    """Returns whether the result of a loss function is one array, or one number."""
    return has_dtype(value) or isinstance(value, (int, float))


@overload
def global_mean(
    values: complex | np.ndarray | np.generic, weights: Any = None, *, axis: int | tuple[int, ...] | None = None
) -> jax.Array: ...
@overload
def global_mean(values: T, weights: Any = None, *, axis: int | tuple[int, ...] | None = None) -> T: ...
def global_mean(values: PyTree, weights: Any = None, *, axis: int | tuple[int, ...] | None = None) -> PyTree:
    """Returns the weighted mean over the examples of all replicas; replicated.

    As a loss, its gradient is correct after `jdist.all_reduce("mean", grads)`: it equals the gradient of the mean over the
    global batch on one device, for every split of the batch and every position of padding.

    Args:
        values: `[batch, ...]`, one or several values per example; or a tree of these.
        weights: `[batch]`, or the first dimensions of `values`. An example with weight 0 has no effect, even if its value is
            NaN; its gradient has no effect if it is finite, so avoid infinite gradients at padding. By default all weights
            are 1.
        axis: The dimensions of `values` to average over, from 0 up, in addition to the replicas; all by default.

    Returns:
        The tree with means: arrays `[]`, or of the dimensions that are not averaged over, float32 or wider. 0 if all weights
        are 0.

    Raises:
        ValueError: The shape of `weights` does not match `values`, or `axis` is out of range.
        TypeError: A leaf is boolean or a random key.
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> uneven = strategy.distribute_values_from_function(
        ...     lambda c: np.arange(1.0, 4 - 2 * c.replica_id_in_sync_group)
        ... )
        >>> uneven  # 1, 2, 3 and 1
        PerReplica(float32[3] | float32[1])
        >>> float(strategy.run(jdist.global_mean, uneven.padded()))
        1.75
    """
    context = require_replica_context("global_mean", "strategy.reduce")
    check_unwrapped((values, weights))
    check_no_row_slices("global_mean", values)
    sums = [weighted_sums(name, leaf, weights, axis) for name, leaf in named_leaves("values", values)]
    totals, counts = [total for total, _ in sums], [count for _, count in sums]
    # The mean over the replicas divides totals and counts by the number of replicas, which cancels in the ratio. Without
    # weights the count is known while tracing, and the same on all replicas.
    if weights is None:
        totals = context.all_reduce(ReduceOp.MEAN, totals)
    else:
        totals, counts = context.all_reduce(ReduceOp.MEAN, (totals, counts))
    means = [total / jnp.where(count == 0, 1, count) for total, count in zip(totals, counts, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(values), means)


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> jax.Array:
    """Returns this replica's share of the average loss: the sum of its losses, divided by the global batch size.

    The average is the sum of the shares of all replicas, so reduce losses and gradients by SUM. `jdist.global_mean` counts the
    examples itself, and supports padding.

    Args:
        per_example_loss: `[batch, ...]`.
        sample_weight: `[batch]`, or the first dimensions of `per_example_loss`.
        global_batch_size: The number of examples on all replicas; by default the number on this replica times the
            number of replicas.

    Returns:
        A scalar, one value per replica.

    Raises:
        ValueError: `global_batch_size` is not positive, or is needed because `per_example_loss` has no examples to count.
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> share = strategy.run(jdist.compute_average_loss, (np.float32([1, 2, 3]),))
        >>> float(strategy.reduce("sum", share, axis=None))
        2.0
    """
    context = require_replica_context("compute_average_loss", "strategy.reduce")
    check_unwrapped((per_example_loss, sample_weight))
    check_reducible(ReduceOp.MEAN, "per_example_loss", per_example_loss)
    check_range("per_example_loss", per_example_loss)
    loss = jnp.asarray(per_example_loss)
    if global_batch_size is None:
        if not loss.ndim or not loss.size:
            raise ValueError(
                f"`per_example_loss` is {dtype_and_shape(loss)}, without examples to count. Pass `global_batch_size`."
            )
        global_batch_size = len(loss) * context.num_replicas_in_sync
    is_int = isinstance(global_batch_size, (int, np.integer))
    if not isinstance(global_batch_size, jax.Array) and not (is_int and global_batch_size > 0):
        raise ValueError(
            f"`global_batch_size` must be a positive number of examples, got {one_line(global_batch_size)}."
        )
    weighted = loss if sample_weight is None else loss * broadcast_weights(sample_weight, loss, "per_example_loss")
    return jnp.sum(weighted) / global_batch_size


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Returns this replica's share of a loss that every replica computes in full: its sum, divided by the number of replicas.

    Add it to the result of `compute_average_loss`, and reduce their sum over the replicas by SUM.

    Raises:
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> float(strategy.run(jdist.scale_regularization_loss, (np.float32([1, 2]),)))
        1.5
    """
    context = require_replica_context("scale_regularization_loss", "strategy.num_replicas_in_sync")
    check_unwrapped(regularization_loss)
    check_reducible(ReduceOp.MEAN, "regularization_loss", regularization_loss)
    check_range("regularization_loss", regularization_loss)
    return jnp.sum(jnp.asarray(regularization_loss)) / context.num_replicas_in_sync


def weighted_sums(
    name: str, leaf: Any, weights: Any, axis: int | tuple[int, ...] | None = None
) -> tuple[jax.Array, Any]:
    """Returns the weighted sum of a leaf's values on this replica, and the sum of their weights.

    Without weights the second is the number of values, a numpy number that is known while tracing.
    """
    check_reducible(ReduceOp.MEAN, name, leaf)
    check_range(name, leaf)
    values = jnp.asarray(leaf)
    normalize_axes(name, values, axes_argument(axis))
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if weights is None:
        total = jnp.sum(values, axis=axis)
        return total, np.float32(values.size // max(total.size, 1))
    weight = jnp.ones(values.shape, values.real.dtype) * broadcast_weights(weights, values, name)
    # `where`, because 0 * NaN is NaN: an example of weight 0 has no effect even if its value is not finite.
    return jnp.sum(jnp.where(weight == 0, 0, values * weight), axis=axis), jnp.sum(weight, axis=axis)


def broadcast_weights(weights: Any, values: jax.Array, name: str) -> jax.Array:
    """Returns `weights` with trailing dimensions of size 1, up to the rank of `values`.

    Raises:
        ValueError: The shape of `weights` is not a prefix of the shape of `values`, which the message calls `name`; or a weight
            that is known while tracing is negative or not finite.
        TypeError: The weights are not numbers.
    """
    array = weights_array(weights)
    if array.ndim > values.ndim or array.shape != values.shape[: array.ndim]:
        raise ValueError(
            f"weights {dtype_and_shape(array)} do not match {name} {dtype_and_shape(values)}: the dimensions of the weights "
            "must be the first dimensions of the values, as [batch] for [batch, ...]."
        )
    check_weights("weights", weights)
    return array.reshape(array.shape + (1,) * (values.ndim - array.ndim))


def weights_array(weights: Any) -> jax.Array:
    """Returns `weights` as an array.

    Raises:
        TypeError: The weights are not numbers.
    """
    check_array("weights", weights)
    array = jnp.asarray(weights)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError(f"weights are random keys, {dtype_and_shape(array)}: use numbers.")
    return array


def check_weights(name: str, weights: Any) -> None:
    """Raises ValueError if a weight is negative or not finite. A traced value is not checked."""
    if isinstance(weights, Tracer) or (isinstance(weights, jax.Array) and not weights.is_fully_addressable):
        return
    with jax.transfer_guard_device_to_host("allow"):
        values = np.asarray(weights)
    if values.dtype == bool or not jnp.issubdtype(values.dtype, jnp.number):
        return
    is_invalid = ~(np.isfinite(values) & (np.real(values) >= 0))
    if is_invalid.any():
        index = [int(i) for i in np.argwhere(is_invalid)[0]]
        raise ValueError(
            f"{name} has {int(is_invalid.sum())} of {values.size} values that are negative or not finite, the first is "
            f"{values[tuple(index)]} at {index}. Weights must be finite and at least 0; an example with weight 0 has no effect."
        )
