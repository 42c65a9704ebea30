"""Streaming DiLoCo: outer steps of parameter fragments, whose communication overlaps with computation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdist._src.core.tree import PyTree, one_line
from jdist._src.replica.leaf_annotations import snap_to_target
from jdist._src.sync.local_updates import (
    OuterStep,
    check_outer_optimizer,
    copy_params,
    init_local_optimizer,
    outer_step,
    updates_to_target,
)
from jdist._src.sync.policy import (
    Policy,
    check_integer,
    check_number,
    check_transformation,
    make_policy,
    require_params,
    synchronous_context,
)
from jdist._src.sync.reduction import mean


class StreamingState(NamedTuple):
    """The state of `streaming_diloco`.

    Attributes:
        steps: The number of steps taken, int32 `[]`; replicated.
        opt_state: The state of each replica's optimizer; leaves that may vary are local to each replica.
        fragments: The last outer step of each fragment: its parameters, and the states of `reduction` and the outer optimizer.
    """

    steps: jax.Array
    opt_state: Any
    fragments: tuple[OuterStep, ...]


def streaming_diloco(
    optimizer: optax.GradientTransformation,
    outer_optimizer: optax.GradientTransformation | None = None,
    *,
    every: int,
    fragments: int,
    overlap: int = 1,
    blend: float = 0.5,
    reduction: optax.GradientTransformation | None = None,
) -> Policy:
    """Streaming DiLoCo: the outer steps of parameter fragments are spread over the steps, and overlap with computation.

    Each fragment has an outer step every `every` steps, at its own offset, so that no step sends more than a fragment unless
    there are more fragments than steps. Communication overlaps with computation: a fragment's all-reduce starts with one step,
    and its result is applied `overlap` steps later, blended with the parameters that the replica has reached by then.

    Args:
        optimizer: The optimizer of each replica, without a policy.
        outer_optimizer: The optimizer of the outer steps; by default `optax.sgd(0.7, momentum=0.9, nesterov=True)`, as in the
            paper.
        every: The number of steps between two outer steps of a fragment.
        fragments: The number of fragments; each contains complete leaves, with similar numbers of parameters.
        overlap: The number of steps after which the result of an outer step is applied. 0 waits for it, as `diloco` does.
        blend: The weight of the replica's own parameters at that time, at least 0 and less than 1. With 0 all replicas agree.
        reduction: The policy that reduces the pseudo-gradients; `mean()` by default. `int8()` sends fewer bytes.

    Returns:
        A transformation of each replica's gradients `[...]` into its own updates.

    Raises:
        ValueError: A number is out of range; or, raised by `init`, there are fewer leaves than fragments.
        TypeError: As for `diloco`.

    Source:
        A. Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed free lunch",
        arXiv:2501.18512.

    Example:
        >>> tx = jdist.sync.streaming_diloco(optax.adamw(1e-3), every=50, fragments=4)
    """
    name = "streaming_diloco"
    every = check_integer(name, "every", every, 1)
    fragments = check_integer(name, "fragments", fragments, 1)
    overlap = check_integer(name, "overlap", overlap, 0)
    if overlap >= every:
        raise ValueError(
            f"`overlap` of `jdist.sync.{name}` must be less than `every`, got overlap={overlap} and every={every}: the result "
            "of an outer step is applied before the next one starts."
        )
    if not 0 <= check_number(name, "blend", blend) < 1:
        raise ValueError(
            f"`blend` of `jdist.sync.{name}` must be at least 0 and less than 1, got {one_line(blend)}. It is the weight of a "
            "replica's own parameters."
        )
    optimizer = check_transformation(name, "optimizer", optimizer)
    outer_optimizer = check_outer_optimizer(name, outer_optimizer)
    reduction = check_transformation(name, "reduction", mean() if reduction is None else reduction)
    always_synchronized = every == 1 and blend == 0

    def init(params: PyTree) -> StreamingState:
        opt_state = init_local_optimizer(name, optimizer, params, not always_synchronized)
        parts = [copy_params(part) for part in _split_into_fragments(params, fragments)]
        outer_steps = [OuterStep(part, reduction.init(part), outer_optimizer.init(part)) for part in parts]
        return StreamingState(jnp.int32(0), opt_state, tuple(outer_steps))

    def update(
        grads: PyTree, state: StreamingState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, StreamingState]:
        synchronous_context(name)
        params = require_params(name, params)
        updates, opt_state = optimizer.update(grads, state.opt_state, params, **extra_args)
        local_params = optax.apply_updates(params, updates)
        trees = (_split_into_fragments(tree, fragments) for tree in (params, local_params, updates))
        results = [
            update_fragment(number, state.steps, *part)
            for number, part in enumerate(zip(state.fragments, *trees, strict=True))
        ]
        outer_steps, fragment_updates = zip(*results, strict=True)
        new_state = StreamingState(state.steps + 1, opt_state, outer_steps)
        return _merge_fragments(updates, fragment_updates), new_state

    def update_fragment(
        number: int,
        steps: jax.Array,
        last: OuterStep,
        params: list[jax.Array],
        local_params: list[jax.Array],
        updates: list[jax.Array],
    ) -> tuple[OuterStep, list[jax.Array]]:
        """Returns the last outer step and the updates of a fragment after a step from `params` to `local_params`."""
        starts, is_applied = (
            True if always_synchronized else (moment > 0) & ((moment - number * every // fragments) % every == 0)
            for moment in (steps + (overlap == 0), steps + 1 - overlap)
        )
        # With overlap, the parameters before the step are sent, so that the message does not depend on the step's gradients.
        sent = params if overlap else local_params
        start = lambda: outer_step(reduction, outer_optimizer, sent, last)
        outer = start() if always_synchronized else lax.cond(starts, start, lambda: last)

        def blended_updates() -> list[jax.Array]:
            target = outer.params
            if blend:
                target = [blend * a + (1 - blend) * b for a, b in zip(local_params, target, strict=True)]
            return updates_to_target(target, params, updates)

        if always_synchronized:
            return outer, blended_updates()
        updates = lax.cond(is_applied, blended_updates, lambda: updates)
        if not blend:
            snap_to_target(params, updates, outer.params, is_applied)
        return outer, updates

    return make_policy(init, update)


def _split_into_fragments(tree: PyTree, count: int) -> list[list[Any]]:
    """Returns the leaves of `tree` in `count` fragments of similar numbers of parameters.

    Raises:
        ValueError: There are fewer leaves than fragments.
    """
    leaves = jax.tree.leaves(tree)
    if len(leaves) < count:
        raise ValueError(
            f"`fragments` of `jdist.sync.streaming_diloco` is {count}, but there are only {len(leaves)} arrays. Use at most "
            f"{len(leaves)} fragments."
        )
    return [[leaves[i] for i in indices] for indices in _assign_leaves([leaf.size for leaf in leaves], count)]


def _assign_leaves(sizes: list[int], count: int) -> list[list[int]]:
    """Returns the leaf indices of each fragment: the largest leaf first, each to the smallest fragment so far."""
    fragments: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(fragments, key=lambda indices: (sum(sizes[j] for j in indices), len(indices))).append(i)
    return [sorted(indices) for indices in fragments]


def _merge_fragments(like: PyTree, fragments: Sequence[list[Any]]) -> PyTree:
    """Returns a tree like `like` of the leaves of its fragments."""
    leaves, treedef = jax.tree.flatten(like)
    indices_of_fragments = _assign_leaves([leaf.size for leaf in leaves], len(fragments))
    for fragment, indices in zip(fragments, indices_of_fragments, strict=True):
        for i, leaf in zip(indices, fragment, strict=True):
            leaves[i] = leaf
    return treedef.unflatten(leaves)
