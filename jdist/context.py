"""Who is asking: one replica, or the host program that sees them all. And the words a replica function is written in.

A replica function is ordinary code that may say `jdist.all_reduce`. While a strategy traces it, there is a replica
context, and the words mean the strategy's mesh axes. Outside any strategy there is one replica, so they are the
identity, and the same function can be called and tested by itself. Inside `strategy.scope()`, where the host program
speaks for all replicas, there is no replica to ask.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist import collectives
from jdist._tree import PyTree
from jdist.collectives import ReduceOp


@dataclasses.dataclass(frozen=True)
class ReplicaContext:
    """What one replica knows of the others.

    Attributes:
        axes: The mesh axes that the replicas lie along; none outside any strategy.
        num_replicas_in_sync: How many replicas compute together.
        strategy: The strategy that runs them; None outside any.
    """

    axes: tuple[str, ...] = ()
    num_replicas_in_sync: int = 1
    strategy: Any = None

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """The number of this replica, an int32 scalar from 0 up; per-replica."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def all_reduce(self, op: ReduceOp | str, tree: PyTree) -> PyTree:
        """See `jdist.all_reduce`."""
        return collectives.all_reduce(ReduceOp.of(op), tree, self.axes)

    def all_gather(self, tree: PyTree, axis: int) -> PyTree:
        """See `jdist.all_gather`."""
        return collectives.all_gather(tree, axis, self.axes)


@dataclasses.dataclass(frozen=True)
class CrossReplicaContext:
    """Inside `strategy.scope()`: the host program, which speaks for all replicas of `strategy`."""

    strategy: Any


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """Which replica a value is for, in `Strategy.distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: The number of the replica, from 0 up.
        num_replicas_in_sync: How many there are.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


_OUTSIDE = ReplicaContext()
_context: ContextVar[ReplicaContext | CrossReplicaContext] = ContextVar("jdist_context", default=_OUTSIDE)


@contextlib.contextmanager
def entered(context: ReplicaContext | CrossReplicaContext) -> Iterator[None]:
    """Makes `context` the current one of this thread or task, and restores the former one whatever happens."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current() -> ReplicaContext | CrossReplicaContext:
    """The context of this thread or task."""
    return _context.get()


def in_replica_function() -> bool:
    """Whether a strategy is tracing a replica function around this call."""
    context = _context.get()
    return context is not _OUTSIDE and isinstance(context, ReplicaContext)


def get_replica_context() -> ReplicaContext | None:
    """What this replica knows of the others; None in `strategy.scope()`, where no replica is asking.

    Example:
        >>> jdist.get_replica_context().num_replicas_in_sync
        1
    """
    context = _context.get()
    return context if isinstance(context, ReplicaContext) else None


def all_reduce(op: ReduceOp | str, tree: PyTree) -> PyTree:
    """The value of all replicas together, handed to each.

    Differentiable, and at home in `scan`, `cond` and `while_loop`. The mean of integers is a float.

    Args:
        op: `"sum"`, `"mean"`, `"max"` or `"min"`.
        tree: A tree whose leaves are `[...]` on each replica.

    Returns:
        The same tree, reduced element by element; mirrored.

    Raises:
        ValueError: There is no such reduction.
        TypeError: A leaf has no such reduction (booleans, keys).
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> float(strategy.run(lambda: jdist.all_reduce("mean", jdist.replica_id())))
        0.5
        >>> jdist.all_reduce("sum", 3.0).item()  # outside any strategy there is one replica
        3.0
    """
    return _replica("all_reduce", "strategy.reduce").all_reduce(op, tree)


def all_gather(tree: PyTree, axis: int) -> PyTree:
    """The values of all replicas, joined along a dimension and handed to each.

    Args:
        tree: A tree whose leaves are `[..., n, ...]` on each replica, the same shape on all.
        axis: The dimension to join along, from 0 up.

    Returns:
        The same tree with leaves `[..., replica * n, ...]`; mirrored.

    Raises:
        ValueError: A leaf has no such dimension.
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.run(lambda: jdist.all_gather(jdist.replica_id()[None], axis=0)).tolist()
        [0, 1]
    """
    return _replica("all_gather", "strategy.gather").all_gather(tree, axis)


def replica_id() -> jax.Array:
    """The number of this replica, an int32 scalar from 0 up; 0 outside any strategy.

    Raises:
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> [int(i) for i in strategy.run(jdist.replica_id).values]
        [0, 1]
    """
    return _replica("replica_id", "strategy.num_replicas_in_sync").replica_id_in_sync_group


def num_replicas() -> int:
    """How many replicas compute together: a Python number, known while tracing; 1 outside any strategy.

    Raises:
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> jdist.num_replicas()
        1
    """
    return _replica("num_replicas", "strategy.num_replicas_in_sync").num_replicas_in_sync


def replica_key(key: jax.Array) -> jax.Array:
    """A random key of this replica's own, made of one that all share: `fold_in(key, replica_id())`.

    What is drawn from it differs per replica, so store `key` in the state and not what this returns.

    Args:
        key: A key, typed or raw.

    Raises:
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> draw = lambda key: jax.random.uniform(jdist.replica_key(key))
        >>> a, b = strategy.run(draw, (jax.random.key(0),)).values
        >>> float(a) == float(b)
        False
    """
    context = _replica("replica_key", "jax.random.split")
    return jax.random.fold_in(key, context.replica_id_in_sync_group)


def _replica(word: str, instead: str) -> ReplicaContext:
    context = get_replica_context()
    if context is None:
        raise RuntimeError(
            f"`jdist.{word}` is a word of replica functions, and within `strategy.scope()` the host program speaks for "
            f"all replicas. Call it in a function that `strategy.run` or `strategy.step` runs, or use `{instead}` here."
        )
    return context
