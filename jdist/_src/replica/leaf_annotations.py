"""What a policy tells the strategy that runs it about leaves of the user's state.

A policy is handed parameters and keeps a state, and never sees the container that the user has both in. It names leaves by
the very arrays that it was given or has made; the strategy, which sees the whole state, finds them again by identity. So
what is said where JAX traces a function of its own (`jax.jit`, `jax.eval_shape`, a loop) cannot be followed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._src.core import jax_compat
from jdist._src.core.trace_key import keyed
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.base import is_distributed
from jdist._src.values.sync_on_read import SyncOnRead


class LocalLeaves(NamedTuple):
    """Leaves of a new state of which every replica is to hold its own value.

    Attributes:
        policy: Who says so.
        leaves: The leaves.
        aggregation: How they are read.
        trainable: Whether they are parameters.
        where: What JAX was tracing.
    """

    policy: str
    leaves: list[Any]
    aggregation: VariableAggregation
    trainable: bool
    where: Any


class SyncTarget(NamedTuple):
    """Parameters that a step brings to the same value on every replica.

    Attributes:
        before: What the step was given for them.
        update: What is added to them.
        target: What they are to become; mirrored.
        when: Whether they are to in this step, a boolean `[]`; mirrored.
        where: What JAX was tracing.
    """

    before: list[Any]
    update: list[jax.Array]
    target: list[jax.Array]
    when: jax.Array
    where: Any


_partials: ContextVar[list[LocalLeaves] | None] = ContextVar("jdist_partials", default=None)
_landings: ContextVar[list[SyncTarget] | None] = ContextVar("jdist_landings", default=None)


def mark_local(policy: str, tree: PyTree, aggregation: VariableAggregation, trainable: bool = False) -> None:
    """Says of the leaves of `tree` that `Strategy.init`, if it runs around this call, makes them `SyncOnRead`.

    Raises:
        TypeError: A leaf is a Python number, which has no identity.
    """
    noted = _partials.get()
    if noted is None:
        return
    for name, leaf in named_leaves("params", tree):
        if not hasattr(leaf, "dtype"):
            raise TypeError(
                f"{name} is {dtype_and_shape(leaf)}, no array, and `jdist.{policy}` has to find it again in the "
                "state. Make it one: "
                "`jnp.asarray(x)`."
            )
    if leaves := jax.tree.leaves(tree):
        noted.append(LocalLeaves(policy, leaves, aggregation, trainable, jax_compat.trace_state()))


def snap_to_target(before: PyTree, update: PyTree, target: PyTree, when: Any) -> None:
    """Says that the parameters `before`, to which the user adds `update`, are to be `target` to the bit, if `when` is true.

    The sum is rounded, on every replica from another starting point, and so would not be quite the same on all.
    """
    noted = _landings.get()
    if noted is not None:
        leaves = [jax.tree.leaves(tree) for tree in (before, update, target)]
        noted.append(SyncTarget(leaves[0], leaves[1], leaves[2], jnp.asarray(when), jax_compat.trace_state()))


def snap_to_target_if(condition: jax.Array, noted: Sequence[SyncTarget]) -> None:
    """Says again what was said within, for the case that `condition` is true."""
    for one in noted:
        snap_to_target(one.before, one.update, one.target, one.when & condition)


@contextlib.contextmanager
def collect_local_leaves() -> Iterator[list[LocalLeaves]]:
    """Collects what is said by `keep_partial`."""
    token = _partials.set(noted := [])
    try:
        with keyed(object()):  # a cached trace of a helper would call no policy, and so note nothing
            yield noted
    finally:
        _partials.reset(token)


@contextlib.contextmanager
def collect_sync_targets() -> Iterator[list[SyncTarget]]:
    """Collects what is said by `land`."""
    token = _landings.set(noted := [])
    try:
        yield noted
    finally:
        _landings.reset(token)


def wrap_local_leaves(state: PyTree, noted: Sequence[LocalLeaves]) -> PyTree:
    """A new state with the leaves that were noted as `SyncOnRead`.

    Raises:
        ValueError: A policy keeps values apart, and they are not in the state.
    """
    items, treedef = jax.tree.flatten(state, is_leaf=is_distributed)
    there, here = {id(item) for item in items}, jax_compat.trace_state()
    for one in noted:
        # Within another function a policy may have been asked in vain, if it was asked here too.
        asked_here = any(other.where == here for other in noted if other.policy == one.policy)
        found = sum(id(leaf) in there for leaf in one.leaves)
        if found < len(one.leaves) and (one.where == here or not asked_here):
            raise ValueError(_not_found(one, found))
    by_leaf = {id(leaf): one for one in noted for leaf in one.leaves}
    return treedef.unflatten(
        [SyncOnRead(item, one.aggregation, one.trainable) if (one := by_leaf.get(id(item))) else item for item in items]
    )


def apply_sync_targets(before: PyTree, after: PyTree, noted: Sequence[SyncTarget]) -> PyTree:
    """What a step made of its state, with what reached its target but for rounding exactly there."""
    if not noted or jax.tree.structure(before) != jax.tree.structure(after):
        return after
    leaves, treedef = jax.tree.flatten(after)
    places = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(before))}
    for one in noted:
        if one.where == jax_compat.trace_state():
            for was, update, target in zip(one.before, one.update, one.target, strict=True):
                number = places.get(id(was))
                if number is not None and jnp.shape(leaves[number]) == target.shape:
                    leaves[number] = _snapped(was, update, leaves[number], target, one.when)
    return treedef.unflatten(leaves)


def _snapped(was: jax.Array, update: jax.Array, now: Any, target: jax.Array, when: jax.Array) -> jax.Array:
    now = jnp.asarray(now)
    # What the user has made of it otherwise, as by a bound, is kept.
    untouched = now == jnp.asarray(was + update).astype(was.dtype)
    return jnp.where(when & untouched, target.astype(now.dtype), now)


def _not_found(one: LocalLeaves, found: int) -> str:
    what = "parameters that drift apart between synchronisations" if one.trainable else "values of each replica's own"
    return (
        f"`jdist.{one.policy}` keeps {what}, and {found} of its {len(one.leaves)} arrays are in the state that "
        "`strategy.init` made. It finds them by identity: hand the same parameters to the optimizer's `init` and to the "
        "state, and call that `init` directly, not within `jax.jit` or `optax.flatten`."
    )
