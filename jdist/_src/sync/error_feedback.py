"""Error feedback: a compressed gradient's residual is added to the next gradient.

A policy that compresses stores the part of the gradient that it did not send, the *residual*, and adds it to the next
gradient, so that nothing is lost in the long run. Each replica stores its own residual, as its share of the mean over all
replicas, placed `SyncOnRead(SUM)`: another number of replicas splits the sum anew, and the pending mean stays the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist._src.core.tree import PyTree
from jdist._src.jaxpr.marks import APPROXIMATE_CALL, named_call
from jdist._src.replica.context import ReplicaContext
from jdist._src.replica.leaf_annotations import mark_local
from jdist._src.sync.policy import (
    Policy,
    make_policy,
    mark_gradients,
    policy_context,
)
from jdist._src.values.aggregation import VariableAggregation


class FeedbackState(NamedTuple):
    """The state of a policy with error feedback.

    Attributes:
        residual: The unsent part of each compressed leaf: this replica's share of the mean, `[...]`.
        codec: The state of the compression; replicated.
        policy_state: The state of the policy `reduction` or `fallback`.
    """

    residual: PyTree
    codec: Any
    policy_state: Any


class CompressedMean(NamedTuple):
    """The result of a compressed reduction.

    Attributes:
        mean: The mean over the replicas as it was received; replicated.
        residual: This replica's share of the difference to the exact mean.
        codec: The new state of the compression.
    """

    mean: PyTree
    residual: PyTree
    codec: Any


def with_feedback(
    name: str,
    fallback: Policy,
    is_compressed: Callable[[Any], bool],
    init_codec: Callable[[list[Any]], Any],
    send: Callable[[ReplicaContext, list[jax.Array], Any], CompressedMean],
) -> Policy:
    """Returns a policy that compresses some leaves, with error feedback, and leaves the others to `fallback`.

    Args:
        name: The name of the policy.
        fallback: The policy of the leaves that are not compressed.
        is_compressed: Returns whether a leaf is compressed, by its shape and dtype.
        init_codec: Returns the initial state of the compression, of the compressed parameters.
        send: Reduces gradients with their residuals added, at least float32, with the state of the compression.

    Source:
        F. Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
        DNNs", Interspeech 2014; S. P. Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
        schemes", arXiv:1901.09847.
    """

    def init(params: PyTree) -> FeedbackState:
        compressed, others = partition_leaves(params, is_compressed)
        residual = zero_residual(name, compressed)
        return FeedbackState(residual, init_codec(jax.tree.leaves(compressed)), fallback.init(others))

    def update(
        grads: PyTree, state: FeedbackState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, FeedbackState]:
        context = policy_context(name)
        compressed, others = partition_leaves(mark_gradients(grads), is_compressed)
        leaves, treedef = jax.tree.flatten(add_residual(context, compressed, state.residual))
        reduce = lambda leaves, codec: tuple(send(context, leaves, codec))
        result = CompressedMean(
            *named_call(reduce, APPROXIMATE_CALL, len(leaves), f"jdist.sync.{name}")(leaves, state.codec)
        )
        other_params = partition_leaves(params, is_compressed)[1]
        others, policy_state = fallback.update(others, state.policy_state, other_params, **extra_args)
        means = jax.tree.map(lambda g, m: m.astype(g.dtype), compressed, treedef.unflatten(result.mean))
        new_state = FeedbackState(treedef.unflatten(result.residual), result.codec, policy_state)
        return merge_leaves(means, others), new_state

    return make_policy(init, update)


def zero_residual(name: str, params: PyTree) -> PyTree:
    """Returns the initial residual of the policy `name`: zeros, which `Strategy.init` makes local to each replica."""
    residual = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)
    mark_local(f"sync.{name}", residual, VariableAggregation.SUM)
    return residual


def add_residual(context: ReplicaContext, grads: PyTree, residual: PyTree) -> PyTree:
    """Returns `grads` plus the unsent part of earlier gradients, in the dtype of the residual."""
    return jax.tree.map(lambda g, r: g.astype(r.dtype) + context.num_replicas_in_sync * r, grads, residual)


def partition_leaves(tree: PyTree, is_selected: Callable[[Any], bool]) -> tuple[PyTree, PyTree]:
    """Returns `tree` with the selected leaves, and with the others; `optax.MaskedNode()` replaces a missing leaf."""
    selected = jax.tree.map(lambda x: x if is_selected(x) else optax.MaskedNode(), tree)
    others = jax.tree.map(lambda x: optax.MaskedNode() if is_selected(x) else x, tree)
    return selected, others


def merge_leaves(selected: PyTree, others: PyTree) -> PyTree:
    """Returns the tree that `partition_leaves` split into `selected` and `others`."""
    is_missing = lambda node: isinstance(node, optax.MaskedNode)
    return jax.tree.map(lambda a, b: b if is_missing(a) else a, selected, others, is_leaf=is_missing)
