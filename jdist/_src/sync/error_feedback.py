"""Error feedback: what a policy does not send now, it sends later.

A policy that compresses keeps what it left out, its *residual*, and adds it to the next gradient, so that in the long run
nothing is lost. Each replica has its own. It is kept as this replica's share of the mean over all, and placed
`SyncOnRead(SUM)`: on another number of replicas the sum is split anew, and the mean that is yet to come stays the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist._src.core.tree import PyTree
from jdist._src.replica.context import ReplicaContext
from jdist._src.replica.leaf_annotations import mark_local
from jdist._src.sync.policy import Policy, mark_gradients, policy_context, policy_of
from jdist._src.values.aggregation import VariableAggregation


class FeedbackState(NamedTuple):
    """The state of a policy with error feedback.

    Attributes:
        residual: What is yet to be sent of each compressed leaf: this replica's share of the mean, `[...]`.
        codec: What the compression keeps; mirrored.
        inner: The state of the policy that reduces the rest.
    """

    residual: PyTree
    codec: Any
    inner: Any


class CompressedMean(NamedTuple):
    """What became of some gradients.

    Attributes:
        mean: Their mean over the replicas, as it arrived; mirrored.
        lost: This replica's share of what the mean lacks.
        codec: What the compression keeps from now on.
    """

    mean: PyTree
    lost: PyTree
    codec: Any


def with_feedback(
    word: str,
    inner: Policy,
    chosen: Callable[[Any], bool],
    init: Callable[[list[Any]], Any],
    send: Callable[[ReplicaContext, list[jax.Array], Any], CompressedMean],
) -> Policy:
    """A policy that compresses some leaves and makes up for it, and leaves the others to `inner`.

    Args:
        word: Its name.
        inner: The policy for the others.
        chosen: Whether a leaf is compressed, by its shape and dtype.
        init: From the compressed parameters to what the compression keeps.
        send: From corrected gradients, float32 at least, and what the compression keeps, to what became of them.

    Source:
        F. Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
        DNNs", Interspeech 2014; S. P. Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
        schemes", arXiv:1901.09847.
    """

    def first(params: PyTree) -> FeedbackState:
        mine, others = partition_leaves(params, chosen)
        residual = zero_residual(word, mine)
        return FeedbackState(residual, init(jax.tree.leaves(mine)), inner.init(others))

    def update(
        grads: PyTree, state: FeedbackState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, FeedbackState]:
        context = policy_context(word)
        mine, others = partition_leaves(mark_gradients(grads), chosen)
        leaves, treedef = jax.tree.flatten(add_residual(context, mine, state.residual))
        sent = send(context, leaves, state.codec)
        rest, kept = inner.update(others, state.inner, partition_leaves(params, chosen)[1], **extra)
        arrived = jax.tree.map(lambda g, m: m.astype(g.dtype), mine, treedef.unflatten(sent.mean))
        return merge_leaves(arrived, rest), FeedbackState(treedef.unflatten(sent.lost), sent.codec, kept)

    return policy_of(first, update)


def zero_residual(word: str, params: PyTree) -> PyTree:
    """The residual to begin with: zeros, of which `Strategy.init` gives each replica its own."""
    residual = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)
    mark_local(f"sync.{word}", residual, VariableAggregation.SUM)
    return residual


def add_residual(context: ReplicaContext, grads: PyTree, residual: PyTree) -> PyTree:
    """`grads` with what is owed from before, in the precision of the residual."""
    return jax.tree.map(lambda g, r: g.astype(r.dtype) + context.num_replicas_in_sync * r, grads, residual)


def partition_leaves(tree: PyTree, chosen: Callable[[Any], bool]) -> tuple[PyTree, PyTree]:
    """`tree` twice: with the leaves that are chosen, and with the others; `optax.MaskedNode()` stands for what is missing."""
    mine = jax.tree.map(lambda x: x if chosen(x) else optax.MaskedNode(), tree)
    others = jax.tree.map(lambda x: optax.MaskedNode() if chosen(x) else x, tree)
    return mine, others


def merge_leaves(mine: PyTree, others: PyTree) -> PyTree:
    """The tree of which `mine` and `others` are the parts."""
    return jax.tree.map(lambda a, b: b if _is_missing(a) else a, mine, others, is_leaf=_is_missing)


def _is_missing(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
