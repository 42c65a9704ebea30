"""DiLoCo part by part, while training goes on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdist._src.core.tree import PyTree
from jdist._src.replica.leaf_annotations import snap_to_target
from jdist._src.sync.local_updates import (
    OuterStep,
    copy_params,
    init_local_optimizer,
    nesterov,
    outer_step,
    updates_to_target,
)
from jdist._src.sync.policy import (
    Policy,
    check_integer,
    check_number,
    check_transformation,
    policy_context,
    policy_of,
    require_params,
)
from jdist._src.sync.reduction import mean


class StreamingState(NamedTuple):
    """The state of `streaming_diloco`.

    Attributes:
        steps: How many steps were taken, int32 `[]`; mirrored.
        inner: The state of the inner optimizer, in part one a replica.
        fragments: For each fragment its parameters after its last meeting, and the states of what reduced and stepped there.
    """

    steps: jax.Array
    inner: Any
    fragments: tuple[OuterStep, ...]


def streaming_diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    *,
    every: int,
    fragments: int,
    overlap: int = 1,
    blend: float = 0.5,
    reduction: optax.GradientTransformation | None = None,
) -> Policy:
    """DiLoCo whose parameters meet in fragments, one after the other, while training goes on.

    Each fragment meets every `every` steps, at a time of its own, so that never more than a fragment is sent in a step. What
    is sent is not waited for: it sets out with a step, beside whose work it has room, and is used `overlap` steps later,
    when it is blended with what the replica has learned meanwhile.

    Args:
        inner: The optimizer of each replica, without a policy.
        outer: The optimizer of all; by default the paper's, `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        every: How many steps from one meeting of a fragment to its next.
        fragments: In how many parts the parameters are taken; whole leaves, of about as many numbers each.
        overlap: How many steps later what was sent is used. 0 waits for it, as `diloco` does.
        blend: How much of its own a replica keeps then, from 0 up and below 1. With 0 all agree after it.
        reduction: The policy that makes one way of all replicas'; `mean()` by default, `int8()` to send less.

    Returns:
        A transformation of each replica's gradients `[...]` into its own updates.

    Raises:
        ValueError: A number is out of range; by `init`, there are fewer leaves than fragments.
        TypeError: As for `diloco`.

    Source:
        A. Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed free lunch",
        arXiv:2501.18512.

    Example:
        >>> tx = jdist.sync.streaming_diloco(optax.adamw(1e-3), every=50, fragments=4)
    """
    word = "streaming_diloco"
    every = check_integer(word, "every", every, 1)
    fragments = check_integer(word, "fragments", fragments, 1)
    overlap = check_integer(word, "overlap", overlap, 0)
    if overlap >= every:
        raise ValueError(
            f"`overlap` of `jdist.sync.{word}` is less than `every`, got {overlap} and {every}: what was sent is used before "
            "the next is sent."
        )
    if not 0 <= check_number(word, "blend", blend) < 1:
        raise ValueError(
            f"`blend` of `jdist.sync.{word}` is from 0 up and below 1, got {blend!r}: a replica's own part."
        )
    inner = check_transformation(word, inner)
    outer = check_transformation(word, nesterov() if outer is None else outer)
    reduction = check_transformation(word, mean() if reduction is None else reduction)
    always = every == 1 and blend == 0  # then nothing drifts

    def first(params: PyTree) -> StreamingState:
        kept = init_local_optimizer(word, inner, params, not always)
        parts = [copy_params(part) for part in _parts(params, fragments)]
        mets = [OuterStep(part, reduction.init(part), outer.init(part)) for part in parts]
        return StreamingState(jnp.int32(0), kept, tuple(mets))

    def update(
        grads: PyTree, state: StreamingState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, StreamingState]:
        policy_context(word)
        params = require_params(word, params)
        updates, kept = inner.update(grads, state.inner, params, **extra)
        own = optax.apply_updates(params, updates)
        parts = zip(state.fragments, *(_parts(tree, fragments) for tree in (params, own, updates)), strict=True)
        results = [fragment(number, state.steps, *part) for number, part in enumerate(parts)]
        mets, updates_of_parts = zip(*results, strict=True)
        return _whole(updates, updates_of_parts), StreamingState(state.steps + 1, kept, mets)

    def fragment(
        number: int,
        steps: jax.Array,
        met: OuterStep,
        old: list[jax.Array],
        own: list[jax.Array],
        update: list[jax.Array],
    ) -> tuple[OuterStep, list[jax.Array]]:
        """What becomes of a fragment in a step from `old` to `own`: its last meeting, and its updates."""
        sends, arrives = (
            True if always else (moment > 0) & ((moment - number * every // fragments) % every == 0)
            for moment in (steps + (overlap == 0), steps + 1 - overlap)
        )
        # What sets out is what the step began with, if there is time: then it need not wait for the gradients.
        sent = old if overlap else own
        meet = lambda: outer_step(reduction, outer, sent, met.params, met.reduction, met.outer)
        after = meet() if always else lax.cond(sends, meet, lambda: met)

        def blended() -> list[jax.Array]:
            new = (
                [blend * a + (1 - blend) * b for a, b in zip(own, after.params, strict=True)] if blend else after.params
            )
            return updates_to_target(new, old, update)

        update = blended() if always else lax.cond(arrives, blended, lambda: update)
        if not blend and not always:
            snap_to_target(old, update, after.params, arrives)
        return after, update

    return policy_of(first, update)


def _parts(tree: PyTree, count: int) -> list[list[Any]]:
    """The leaves of `tree` in `count` parts of about as many numbers each, the largest ones dealt out first.

    Raises:
        ValueError: There are fewer leaves than parts.
    """
    leaves = jax.tree.leaves(tree)
    if len(leaves) < count:
        raise ValueError(
            f"`fragments` of `jdist.sync.streaming_diloco` is {count}, and there are {len(leaves)} arrays to share out. Take "
            f"at most {len(leaves)}."
        )
    return [[leaves[i] for i in part] for part in _dealt([leaf.size for leaf in leaves], count)]


def _dealt(sizes: list[int], count: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(parts, key=lambda part: (sum(sizes[j] for j in part), len(part))).append(i)
    return [sorted(part) for part in parts]


def _whole(like: PyTree, parts: Sequence[list[Any]]) -> PyTree:
    leaves, treedef = jax.tree.flatten(like)
    for part, places in zip(parts, _dealt([leaf.size for leaf in leaves], len(parts)), strict=True):
        for place, leaf in zip(places, part, strict=True):
            leaves[place] = leaf
    return treedef.unflatten(leaves)
