"""The model state in a training step: the leaves that the step changes, and their mean over micro-batches and replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.jaxpr.replication import may_vary
from jdist._src.jaxpr.unchanged import unchanged_outputs
from jdist._src.replica.context import all_reduce, require_replica_context
from jdist._src.training.state import GROWING_MODEL_STATE, check_same_leaves


def update_model_state(
    fn: Callable[..., tuple[PyTree, PyTree]],
    params: PyTree,
    old: PyTree,
    data: PyTree,
    weights: Any,
    micro_batches: int,
) -> tuple[PyTree, PyTree, list[bool]]:
    """Calls a function that computes a new model state, and finds the leaves that may differ between replicas.

    A leaf that the function returns unchanged is the leaf of `old`: frozen weights are variables of many models, and their mean
    would cost a message and round them.

    Args:
        fn: From `(params, old, data)` to results and the new model state, whose leaves are `[micro_batch, ...]` if there are
            several micro-batches.
        params: The parameters.
        old: The model state before the step.
        data: The data of this replica.
        weights: The weights of the examples of this replica, or None.
        micro_batches: The number of micro-batches.

    Returns:
        The results; the new model state, the mean over the micro-batches; and for each of its leaves whether it may differ
        between replicas.

    Raises:
        TypeError: The new model state has other leaves.
    """
    arguments = params, old, data
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    leaves = jax_compat.jaxpr_function(program)(*jax.tree.leaves(arguments))
    results, new = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    check_same_leaves("model_state", old, new, GROWING_MODEL_STATE)
    old_leaves, treedef = jax.tree.flatten(old)
    num_params, first = len(jax.tree.leaves(params)), len(leaves) - len(old_leaves)
    sources = unchanged_outputs(program.jaxpr)[first:]
    is_unchanged = [source == num_params + number for number, source in enumerate(sources)]
    is_inexact = [jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact) for leaf in old_leaves]
    varies = [inexact and not unchanged for inexact, unchanged in zip(is_inexact, is_unchanged, strict=True)]
    if any(varies):
        # The parameters may differ under a policy. The proof of the step refuses a model state that does.
        kinds = [True] * num_params + [False] * len(old_leaves) + [True] * len(jax.tree.leaves(data))
        may_differ = may_vary(program, kinds, require_replica_context("sync", "strategy.step").axes)[first:]
        has_weights = micro_batches > 1 and weights is not None  # which differ between replicas
        varies = [one and (differs or has_weights) for one, differs in zip(varies, may_differ, strict=True)]
    new_leaves = jax.tree.leaves(new if micro_batches == 1 else _mean_over_micro_batches(new, weights, micro_batches))
    updated_leaves = [
        before if unchanged else jnp.asarray(after).astype(before.dtype)
        for before, after, unchanged in zip(old_leaves, new_leaves, is_unchanged, strict=True)
    ]
    return results, treedef.unflatten(updated_leaves), varies


def mean_model_state(model_state: PyTree, varies: Sequence[bool], weights: Any) -> PyTree:
    """Returns the model state with the leaves that vary averaged over the replicas, weighted by examples."""
    leaves, treedef = jax.tree.flatten(model_state)
    indices = [i for i, one in enumerate(varies) if one]
    if not indices:
        return model_state
    values = [leaves[i] for i in indices]
    if weights is not None:
        count = jnp.sum(weights)
        values = [_scaled_by_count(value, count, all_reduce("mean", count)) for value in values]
    for i, value in zip(indices, all_reduce("mean", values), strict=True):
        leaves[i] = value
    return treedef.unflatten(leaves)


def _mean_over_micro_batches(stacked: PyTree, weights: Any, micro_batches: int) -> PyTree:
    """Returns the model state after micro-batches: the mean of floats, weighted by examples; the last of other values."""
    counts = None if weights is None else jnp.reshape(weights, (micro_batches, -1)).sum(1)

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[-1]
        return x.mean(0) if counts is None else jnp.mean(_scaled_by_count(x, counts, counts.mean()), 0)

    return jax.tree.map(mean, stacked)


def _scaled_by_count(value: jax.Array, count: jax.Array, mean_count: jax.Array) -> jax.Array:
    """Returns `value * count / mean_count`, whose plain mean is the mean weighted by count; `value` if all counts are 0."""
    factor = jnp.where(mean_count == 0, 1, count / jnp.where(mean_count == 0, 1, mean_count))
    factor = factor.astype(value.dtype).reshape(factor.shape + (1,) * (value.ndim - factor.ndim))
    return jnp.where(factor == 0, 0, value * factor)
