"""Gradients of the mean over all replicas and micro-batches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.collectives.ops import check_unwrapped
from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, argument_names, dtype_and_shape, named_leaves
from jdist._src.replica import precision
from jdist._src.replica.context import require_replica_context
from jdist._src.replica.losses import weighted_sums
from jdist._src.values.reduce_op import ReduceOp


def value_and_grad(
    loss_fn: Callable[..., Any], *, micro_batches: int = 1, has_aux: bool = False, weights: Any = None
) -> Callable[..., tuple[Any, PyTree]]:
    """Differentiates the weighted mean of a loss over the examples of all replicas and micro-batches.

    What it gives is this replica's share: the mean of the shares over the replicas is the loss of the whole batch, and its
    gradient, wherever padding lies. So a policy, `jdist.sync.mean()`, or `jdist.all_reduce("mean", ...)` makes of it what one
    device would compute. It talks to the other replicas only to add up `weights`.

    With `micro_batches` the rows are taken in turn, and activations need the memory of one micro-batch. In a step with a
    `jdist.Precision`, parameters, data and results are cast as it says, and the loss is scaled as
    `jdist.sync.dynamic_loss_scale` says; gradients come back unscaled, in the dtype of the parameters.

    Args:
        loss_fn: `loss_fn(params, *batch)` gives losses `[batch, ...]`, one an example or several, or one number `[]` for all
            of its rows alike. It closes over what is not data.
        micro_batches: How many parts the rows are taken in. Each array in `batch` is `[batch, ...]` then.
        has_aux: Whether `loss_fn` returns a pair, the second of which is handed on: of several micro-batches stacked,
            `[micro_batch, ...]`.
        weights: `[batch]`, or as many dimensions of the losses as it has from the left: how much each counts. 0 leaves an
            example out. 1 each by default.

    Returns:
        A function like `jax.value_and_grad(loss_fn)`: `(value, grads)`, or `((value, aux), grads)`. 0 if all weights are 0.

    Raises:
        ValueError: `micro_batches` is less than 1. When called: the rows do not split so, or weights do not fit the losses.
        TypeError: `micro_batches` is no whole number, or, when called, a loss is no number.
        RuntimeError: When called: by the host program, within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> @strategy.step
        ... def descend(w, batch):
        ...     x, weights = batch
        ...     loss, grad = jdist.value_and_grad(lambda w, x: (w - x) ** 2, micro_batches=2, weights=weights)(w, x)
        ...     return w - 0.5 * jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)
        >>> (batch,) = strategy.distribute_dataset(np.float32([1, 2, 6]), batch_size=4, remainder="pad")
        >>> w, loss = descend(strategy.put(np.float32(0)), batch)
        >>> float(w), float(loss)  # the mean of 1, 2 and 6, and of their squares
        (3.0, 13.666666984558105)
    """
    micro_batches = as_int("`micro_batches`", micro_batches, 1)

    @functools.wraps(loss_fn)
    def share(params: PyTree, *batch: PyTree) -> tuple[Any, PyTree]:
        context = require_replica_context("value_and_grad", "strategy.step")
        check_unwrapped((params, batch, weights))
        here = precision.step_precision()
        if here.precision:
            here.precision.check_params(params)
        differentiate = _differentiated(loss_fn, has_aux, here, micro_batches)
        if micro_batches == 1:
            (total, count), grads, aux = differentiate(params, batch, weights)
        else:
            parts = _split(loss_fn, batch, weights, micro_batches)
            (total, count), grads, aux = _added(differentiate, params, parts)
        if weights is not None:
            count = context.all_reduce(ReduceOp.MEAN, count)
        scale = 1 / jnp.where(count == 0, 1, count)
        value = total * scale
        unscale = scale if here.scale is None else scale / here.scale
        grads = jax.tree.map(lambda g, p: (g * unscale).astype(jnp.asarray(p).dtype), grads, params)
        return ((value, aux) if has_aux else value), grads

    return share


def _differentiated(
    loss_fn: Callable[..., Any], has_aux: bool, here: precision.StepPrecision, parts: int
) -> Callable[..., Any]:
    """From parameters, rows and their weights to `(total, count)`, the gradient of the total, and what else there is.

    Both are divided by the number of losses in all parts, so that float16 has room for what is differentiated.
    """
    dtypes = here.precision or None

    def scaled_total(params: PyTree, batch: PyTree, weights: Any) -> tuple[jax.Array, tuple[Any, Any, PyTree]]:
        given = dtypes.cast_compute((params, batch)) if dtypes else (params, batch)
        result = loss_fn(given[0], *given[1])
        losses, aux = _pair(result) if has_aux else (result, None)
        if isinstance(losses, (tuple, list)):
            raise TypeError(
                f"The loss function returned a {type(losses).__name__}, and a loss is one array. If it is a loss and something "
                "else, say `has_aux=True`."
            )
        if dtypes:
            losses, aux = dtypes.cast_output((losses, aux))
        total, count = weighted_sums("losses", losses, weights)
        number = max(jnp.size(losses), 1) * parts
        total = total / number
        return total if here.scale is None else total * here.scale, (total, count / number, aux)

    def differentiate(params: PyTree, batch: PyTree, weights: Any) -> Any:
        (_, (total, count, aux)), grads = jax.value_and_grad(scaled_total, has_aux=True)(params, batch, weights)
        if weights is not None:  # of rows that only fill up, a model may make what is no number
            no_row_counts = jnp.all(jnp.asarray(weights) == 0)
            grads = jax.tree.map(lambda g: jnp.where(no_row_counts, 0, g), grads)
        return (total, jnp.float32(count)), grads, aux

    return differentiate


def _added(differentiate: Callable[..., Any], params: PyTree, parts: PyTree) -> Any:
    """What `differentiate` gives of each part, added up one after the other; the rest stacked."""

    def add(sums: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
        totals, grads, aux = differentiate(params, *part)
        return jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, (totals, grads)), aux

    like = jax.eval_shape(lambda part: differentiate(params, *part)[:2], jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), like)
    (totals, grads), aux = lax.scan(add, zeros, parts)
    return totals, grads, aux


def _split(loss_fn: Callable[..., Any], batch: tuple[PyTree, ...], weights: Any, parts: int) -> PyTree:
    """`[batch, ...]` to `[micro_batch, batch / micro_batches, ...]`.

    Raises:
        ValueError: A leaf has no rows, or they do not split.
    """
    names = argument_names(loss_fn, (None, *batch), {})[1:]
    leaves = [leaf for name, tree in zip(names, batch, strict=True) for leaf in named_leaves(name, tree)]
    for name, leaf in [*leaves, *named_leaves("weights", weights)]:
        if not jnp.ndim(leaf) or jnp.shape(leaf)[0] % parts:
            rows = f"{jnp.shape(leaf)[0]} rows" if jnp.ndim(leaf) else "no rows"
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)}, and its {rows} do not make {parts} micro-batches. Take a divisor "
                "of the rows of a "
                "replica, and let the loss function close over what is not data."
            )
    return jax.tree.map(
        lambda x: jnp.reshape(x, (parts, jnp.shape(x)[0] // parts, *jnp.shape(x)[1:])), (batch, weights)
    )


def _pair(result: Any) -> tuple[Any, PyTree]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TypeError(
        f"With `has_aux` the loss function returns a pair `(losses, aux)`, and this one returned {type(result).__name__}."
    )
