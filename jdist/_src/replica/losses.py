"""Averages over the batches of all replicas, for losses and metrics.

A batch that is split over replicas has one mean: that of all its examples. The mean of the replicas' means is another
wherever they hold different numbers of examples, and where padding counts as one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdist._src.collectives.ops import axes_argument, check_no_row_slices, check_unwrapped, normalize_axes
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.replica.context import require_replica_context
from jdist._src.values.arrays import check_range
from jdist._src.values.reduce_op import ReduceOp, check_reducible


def global_mean(values: PyTree, weights: Any = None, axis: int | tuple[int, ...] | None = None) -> PyTree:
    """The weighted mean over the examples of all replicas together; the same on each.

    As a loss, its gradient is right after `jdist.all_reduce("mean", grads)`: it is then the gradient of the mean over the
    whole batch on one device, however the batch is split and wherever padding lies.

    Args:
        values: `[batch, ...]`, one value an example or several; or a tree of these.
        weights: `[batch]`, or as many dimensions of `values` as it has from the left. 0 leaves an example out, whatever its
            value, NaN included; of its gradient it leaves out what is finite, so give padding no infinite slope. 1 each by
            default.
        axis: The dimensions to average over, from 0 up, besides the replicas; all by default.

    Returns:
        float32 at least, `[]`, or the dimensions that are not averaged over. 0 if all weights are 0.

    Raises:
        ValueError: `weights` does not fit `values`, or there is no such dimension.
        TypeError: A leaf is boolean or a random key.
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> uneven = strategy.distribute_values_from_function(lambda c: np.arange(1.0, 4 - 2 * c.replica_id_in_sync_group))
        >>> uneven  # 1, 2, 3 and 1
        PerReplica(float32[3] | float32[1])
        >>> float(strategy.run(jdist.global_mean, uneven.padded()))
        1.75
    """
    context = require_replica_context("mean", "strategy.reduce")
    check_unwrapped((values, weights))
    check_no_row_slices("mean", values)
    sums = [weighted_sums(name, leaf, weights, axis) for name, leaf in named_leaves("values", values)]
    totals, counts = [total for total, _ in sums], [count for _, count in sums]
    # Both are divided by the number of replicas, which is gone from their ratio. A count without weights is known, and the
    # same on all.
    if weights is None:
        totals = context.all_reduce(ReduceOp.MEAN, totals)
    else:
        totals, counts = context.all_reduce(ReduceOp.MEAN, (totals, counts))
    means = [total / jnp.where(count == 0, 1, count) for total, count in zip(totals, counts, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(values), means)


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> jax.Array:
    """This replica's share of the average loss: its sum, divided by the size of the global batch.

    The shares of all replicas add up to the average, so reduce losses and gradients by SUM. `jdist.global_mean` counts the examples
    by itself, and knows of padding.

    Args:
        per_example_loss: `[batch, ...]`.
        sample_weight: `[batch]`, or as many dimensions as it has from the left.
        global_batch_size: Examples on all replicas together; by default this replica's times the number of replicas.

    Returns:
        A scalar, one value a replica.

    Raises:
        ValueError: `global_batch_size` is not positive, or there is no dimension to count examples in.
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
                f"`per_example_loss` is {dtype_and_shape(loss)}, without examples to count. Give `global_batch_size`."
            )
        global_batch_size = len(loss) * context.num_replicas_in_sync
    whole = isinstance(global_batch_size, (int, np.integer))
    if not isinstance(global_batch_size, jax.Array) and not (whole and global_batch_size > 0):
        raise ValueError(f"`global_batch_size` is a positive number of examples, got {global_batch_size!r}.")
    weighted = loss if sample_weight is None else loss * broadcast_weights(sample_weight, loss, "per_example_loss")
    return jnp.sum(weighted) / global_batch_size


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """This replica's share of a loss that all have whole: its sum, divided by the number of replicas.

    To be added to what `compute_average_loss` gives, and reduced by SUM with it.

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
    """On this replica: the weighted sum of a leaf's values, and the sum of the weights of as many of them.

    Without weights the second is a count, a number that is known before tracing.
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
    # Not weight * value alone: 0 leaves out what is not finite too.
    return jnp.sum(jnp.where(weight == 0, 0, values * weight), axis=axis), jnp.sum(weight, axis=axis)


def broadcast_weights(weights: Any, values: jax.Array, name: str) -> jax.Array:
    """`weights` with dimensions of 1 on the right, up to the rank of `values`.

    Raises:
        ValueError: Its dimensions are not the first ones of `values`; the message calls these `name`. Or a weight is known
            to be negative or not finite.
        TypeError: They are no numbers.
    """
    given, weights = weights, jnp.asarray(weights)
    if jnp.issubdtype(weights.dtype, jax.dtypes.prng_key):
        raise TypeError(f"weights are random keys, {dtype_and_shape(weights)}: weigh with numbers.")
    if weights.ndim > values.ndim or weights.shape != values.shape[: weights.ndim]:
        raise ValueError(
            f"weights {dtype_and_shape(weights)} do not stand beside {name} {dtype_and_shape(values)}: their "
            "dimensions are the first ones of the "
            "values, as [batch] for [batch, ...]."
        )
    check_weights("weights", given)
    return weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))


def check_weights(name: str, weights: Any) -> None:
    """Checks weights whose values are known; a traced value is not checked.

    Raises:
        ValueError: A weight is negative or not finite.
    """
    if isinstance(weights, Tracer) or (isinstance(weights, jax.Array) and not weights.is_fully_addressable):
        return
    with jax.transfer_guard_device_to_host("allow"):
        values = np.asarray(weights)
    if values.dtype == bool or not jnp.issubdtype(values.dtype, jnp.number):
        return
    wrong = ~(np.isfinite(values) & (np.real(values) >= 0))
    if wrong.any():
        place = [int(i) for i in np.argwhere(wrong)[0]]
        raise ValueError(
            f"{name} has {int(wrong.sum())} of {values.size} values that are negative or not finite, the first is "
            f"{values[tuple(place)]} at {place}. Weights must be finite and at least 0; 0 leaves an example out."
        )
