"""Annotations of state leaves that a synchronization policy makes while a step is traced.

A policy receives parameters and returns its own state; it does not receive the container of both. It annotates leaves by the
identity of the arrays that it received or created, and the strategy, which receives the complete state, finds these arrays
again by identity. Annotations made inside a function that JAX traces separately (`jax.jit`, `jax.eval_shape`, a
loop) refer to tracers of that function, and cannot be matched with the state.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._src.core import jax_compat
from jdist._src.core.trace_key import keyed
from jdist._src.core.tree import PyTree, dtype_and_shape, has_dtype, named_leaves
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.base import is_distributed
from jdist._src.values.sync_on_read import SyncOnRead


class LocalLeaves(NamedTuple):
    """Leaves of a new state that `Strategy.init` stores as `SyncOnRead`.

    Attributes:
        policy: The name of the policy, for error messages.
        leaves: The leaves.
        aggregation: The aggregation of the `SyncOnRead`.
        trainable: Whether the leaves are parameters.
        trace: The trace in which they were annotated.
    """

    policy: str
    leaves: list[Any]
    aggregation: VariableAggregation
    trainable: bool
    trace: Any


class SyncTarget(NamedTuple):
    """Parameters that a step sets to the same value on every replica.

    Attributes:
        before: The parameters that the step received.
        update: The update that is added to them.
        target: Their new value; replicated.
        when: Whether this step sets them, a boolean `[]`; replicated.
        trace: The trace in which they were annotated.
    """

    before: list[Any]
    update: list[jax.Array]
    target: list[jax.Array]
    when: jax.Array
    trace: Any


_local_leaves: ContextVar[list[LocalLeaves] | None] = ContextVar("jdist_local_leaves", default=None)
_sync_targets: ContextVar[list[SyncTarget] | None] = ContextVar("jdist_sync_targets", default=None)


def mark_local(policy: str, tree: PyTree, aggregation: VariableAggregation, trainable: bool = False) -> None:
    """Annotates the leaves of `tree` as local: an enclosing `Strategy.init` stores them as `SyncOnRead`.

    Raises:
        TypeError: A leaf is a Python number, which has no identity.
    """
    annotations = _local_leaves.get()
    if annotations is None:
        return
    for name, leaf in named_leaves("params", tree):
        if not has_dtype(leaf):
            raise TypeError(
                f"{name} is {dtype_and_shape(leaf)}, not an array. `jdist.{policy}` finds it in the state by its identity, "
                "which a number does not have: use `jnp.asarray(x)`."
            )
    if leaves := jax.tree.leaves(tree):
        annotations.append(LocalLeaves(policy, leaves, aggregation, trainable, jax_compat.trace_state()))


def snap_to_target(before: PyTree, update: PyTree, target: PyTree, when: Any) -> None:
    """Annotates the parameters `before`: with `update` added, they become bitwise equal to `target` where `when` is true.

    The sum `before + update` is rounded, from a different `before` on each replica, so it would differ in the last bits.
    """
    annotations = _sync_targets.get()
    if annotations is not None:
        leaves = [jax.tree.leaves(tree) for tree in (before, update, target)]
        annotations.append(SyncTarget(leaves[0], leaves[1], leaves[2], jnp.asarray(when), jax_compat.trace_state()))


@contextlib.contextmanager
def _collected(variable: ContextVar[Any]) -> Iterator[list[Any]]:
    token = variable.set(annotations := [])
    try:
        yield annotations
    finally:
        variable.reset(token)


@contextlib.contextmanager
def collect_local_leaves() -> Iterator[list[LocalLeaves]]:
    """Collects the annotations of `mark_local`."""
    # From a cached trace of a helper, the policy would not be called, and would not annotate.
    with _collected(_local_leaves) as annotations, keyed(object()):
        yield annotations


def collect_sync_targets() -> contextlib.AbstractContextManager[list[SyncTarget]]:
    """Collects the annotations of `snap_to_target`."""
    return _collected(_sync_targets)


def wrap_local_leaves(state: PyTree, annotations: Sequence[LocalLeaves]) -> PyTree:
    """Returns a new state with the annotated leaves as `SyncOnRead`.

    Raises:
        ValueError: Leaves that a policy annotated are not in the state.
    """
    items, treedef = jax.tree.flatten(state, is_leaf=is_distributed)
    item_ids, trace = {id(item) for item in items}, jax_compat.trace_state()
    for local in annotations:
        # Annotations of an inner trace are ignored if the same policy also annotated in this trace.
        is_called_here = any(other.trace == trace for other in annotations if other.policy == local.policy)
        num_found = sum(id(leaf) in item_ids for leaf in local.leaves)
        if num_found < len(local.leaves) and (local.trace == trace or not is_called_here):
            kind = "parameters that diverge between synchronization steps" if local.trainable else "per-replica values"
            raise ValueError(
                f"`jdist.{local.policy}` stores {kind}, and {num_found} of its {len(local.leaves)} arrays are in the state "
                "that `strategy.init` created. It finds them by identity: pass the same parameters to the optimizer's `init` "
                "and to "
                "the state, and call that `init` directly, not within `jax.jit` or `optax.flatten`."
            )
    by_leaf = {id(leaf): local for local in annotations for leaf in local.leaves}
    return treedef.unflatten(
        [
            SyncOnRead(item, local.aggregation, local.trainable) if (local := by_leaf.get(id(item))) else item
            for item in items
        ]
    )


def apply_sync_targets(before: PyTree, after: PyTree, targets: Sequence[SyncTarget]) -> PyTree:
    """Returns the new state of a step, in which annotated parameters are bitwise equal to their targets.

    Args:
        before: The state that the step received.
        after: The state that the step returned.
        targets: The annotations made while the step was traced.
    """
    if not targets or jax.tree.structure(before) != jax.tree.structure(after):
        return after
    leaves, treedef = jax.tree.flatten(after)
    positions = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(before))}
    for sync_target in targets:
        if sync_target.trace == jax_compat.trace_state():
            for old, update, target in zip(sync_target.before, sync_target.update, sync_target.target, strict=True):
                i = positions.get(id(old))
                if i is not None and jnp.shape(leaves[i]) == target.shape:
                    leaves[i] = _snapped(old, update, leaves[i], target, sync_target.when)
    return treedef.unflatten(leaves)


def _snapped(old: jax.Array, update: jax.Array, new: Any, target: jax.Array, when: jax.Array) -> jax.Array:
    new = jnp.asarray(new)
    # An element that the step changed after the update, for example by clipping, is not replaced.
    is_plain_update = new == jnp.asarray(old + update).astype(old.dtype)
    return jnp.where(when & is_plain_update, target.astype(new.dtype), new)
