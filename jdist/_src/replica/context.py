"""Replica context and collectives: whether code runs for one replica or on the host, and the public collectives.

While a strategy traces a replica function, `jdist.all_reduce` and the other collectives reduce over the strategy's mesh axes.
Outside any strategy there is one replica, and they are the identity. In `strategy.scope()` the host cannot call them.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.collectives import ops
from jdist._src.collectives.cross_device_ops import AllReduce, CommunicationOptions, CrossDeviceOps
from jdist._src.core.arguments import keyword_arguments
from jdist._src.core.trace_key import keyed, set_outermost_key
from jdist._src.core.tree import PyTree, describe_type, named_leaves
from jdist._src.devices.mesh import Replicas
from jdist._src.values.arrays import check_value
from jdist._src.values.base import is_distributed
from jdist._src.values.device_put import check_uniform_shape
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.reduce_op import ReduceOp


@dataclasses.dataclass(frozen=True)
class ReplicaContext:
    """What one replica knows of the others.

    Attributes:
        axes: The mesh axes that the replicas lie along; none outside any strategy.
        num_replicas_in_sync: How many replicas compute together.
        strategy: The strategy that runs them.
        cross_device_ops: How their values are added up.
        communication_options: Which of them travel together.
        virtual: Whether the replicas are virtual, and their number does not depend on the devices.
        reduced: What becomes of what is reduced, where one replica spans devices: it is split as the state is.
    """

    axes: tuple[str, ...] = ()
    num_replicas_in_sync: int = 1
    strategy: Any = None
    cross_device_ops: CrossDeviceOps = AllReduce()
    communication_options: CommunicationOptions = CommunicationOptions()
    virtual: bool = False
    reduced: Callable[[PyTree], PyTree] | None = None

    @classmethod
    def of(
        cls, strategy: Any, replicas: Replicas, ops: CrossDeviceOps, options: CommunicationOptions
    ) -> "ReplicaContext":
        """The context of the replicas of `strategy`."""
        return cls(replicas.axes, replicas.size, strategy, ops, options, replicas.virtual)

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """The number of this replica, an int32 scalar from 0 up; per-replica."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def all_reduce(self, op: ReduceOp | str, tree: PyTree, options: CommunicationOptions | None = None) -> PyTree:
        """See `jdist.all_reduce`."""
        if not isinstance(options, CommunicationOptions | None):
            raise TypeError(f"`options` are `jdist.CommunicationOptions(bytes_per_pack)`, got {options!r}.")
        if options is None or options.bytes_per_pack is None:
            options = self.communication_options
        total = ops.all_reduce_tree(ReduceOp.of(op), tree, self.axes, self.cross_device_ops, options)
        return self.reduced(total) if self.reduced else total

    def all_gather(self, tree: PyTree, axis: int) -> PyTree:
        """See `jdist.all_gather`."""
        return ops.all_gather_tree(tree, axis, self.axes)

    def broadcast(self, tree: PyTree) -> PyTree:
        """See `jdist.broadcast`."""
        return ops.broadcast_tree(tree, self.axes, self.cross_device_ops, self.communication_options)

    def merge_call(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Calls `fn` once for all replicas, as the host program would, and gives each its part of the result.

        It brings the values of all replicas to each of them, which costs more than a reduction: where `fn` reduces,
        `jdist.all_reduce` does it for less. Works in `scan`, `cond` and `while_loop`.

        Args:
            fn: Called as `fn(strategy, *args, **kwargs)` in the cross-replica context; every array among its arguments is a
                `PerReplica` with leaves `[replica, ...]`. With one replica the arguments are plain arrays, as in TensorFlow;
                `strategy.reduce`, `strategy.gather` and `strategy.local_results` take both.
            args: One replica's values.
            kwargs: One replica's values by name.

        Returns:
            What `fn` returned: of a `PerReplica`, this replica's own value; anything else as it is, the same on all.

        Raises:
            TypeError: `args` is no tuple, or `kwargs` no mapping.
            ValueError: `fn` returned a `PerReplica` that has not one row for each replica.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def total(strategy, value):
            ...     return strategy.reduce("sum", value, axis=None)
            >>> float(strategy.run(lambda: jdist.get_replica_context().merge_call(total, (jdist.replica_id(),))))
            1.0
        """
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                f"`args` is a tuple of arguments, got {describe_type(args)}: write `merge_call(fn, (value,))`."
            )
        given = tuple(args), keyword_arguments("merge_call", kwargs)
        for name, leaf in named_leaves("args", given[0]) + named_leaves("kwargs", given[1]):
            check_value(name, leaf)
        if self.num_replicas_in_sync == 1:
            given = jax.tree.map(jnp.asarray, given)
        else:
            given = jax.tree.map(PerReplica, ops.stack_replicas(given, self.axes))
        with enter_context(CrossReplicaContext(self.strategy, merging=True, axes=self.axes)):
            result = fn(self.strategy, *given[0], **given[1])
        return jax.tree.map(self._own_part, result, is_leaf=is_distributed)

    def _own_part(self, node: Any) -> Any:
        if not is_distributed(node):
            return node
        for name, leaf in named_leaves("the result of merge_call", node.tree):
            node.check(name, leaf, self.num_replicas_in_sync)
        check_uniform_shape("the result of merge_call", node)
        if node.agrees:
            return node.read()
        mine = self.replica_id_in_sync_group
        rows = node.rows(self.num_replicas_in_sync)
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, mine, keepdims=False), rows)


@dataclasses.dataclass(frozen=True)
class CrossReplicaContext:
    """The host program within `strategy.scope()`, or the function of a `merge_call`: it speaks for all replicas.

    Attributes:
        strategy: Whose replicas.
        merging: Whether it is a `merge_call`, within a replica function.
        axes: In a `merge_call`, the mesh axes of the replicas.
    """

    strategy: Any
    merging: bool = False
    axes: tuple[str, ...] = ()


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
_Context: TypeAlias = ReplicaContext | CrossReplicaContext
_context: ContextVar[_Context | None] = ContextVar("jdist_context", default=None)
_outermost: list[_Context] = [_OUTSIDE]  # of all threads and tasks


@contextlib.contextmanager
def enter_context(context: _Context) -> Iterator[None]:
    """Makes `context` the current one of this thread or task, and restores the former one whatever happens."""
    token = _context.set(context)
    try:
        with keyed(_key_of(context)):
            yield
    finally:
        _context.reset(token)


def set_default_context(context: CrossReplicaContext | None) -> None:
    """What is current wherever nothing is entered; None for the default, one replica.

    Raises:
        RuntimeError: Something is entered.
    """
    if _context.get() is not None:
        raise RuntimeError(
            "`set_strategy` is called inside a `strategy.scope()` or a replica function. Leave it first."
        )
    set_outermost_key(None if context is None else _key_of(context))
    _outermost[0] = context or _OUTSIDE


def _key_of(context: _Context) -> Hashable:
    """What tells apart two contexts in which a function may be traced differently: JAX's caches must not hold a strategy."""
    if context.strategy is None or getattr(context, "reduced", None) is not None:
        return object()  # `reduced` is a function of one step's state
    return weakref.ref(context.strategy), type(context), getattr(context, "merging", None)


def current_context() -> _Context:
    """The context of this thread or task."""
    return _context.get() or _outermost[0]


def in_replica_function() -> bool:
    """Whether a strategy is tracing a replica function around this call."""
    context = _context.get()
    return context.merging if isinstance(context, CrossReplicaContext) else context is not None


def merge_call_axes() -> tuple[str, ...]:
    """The mesh axes of the replicas whose `merge_call` is around this call; empty elsewhere."""
    context = _context.get()
    return context.axes if isinstance(context, CrossReplicaContext) else ()


def in_cross_replica_context() -> bool:
    """Whether the host program speaks for all replicas here: in `strategy.scope()`, and in a `merge_call`.

    Example:
        >>> jdist.in_cross_replica_context()
        False
    """
    return isinstance(current_context(), CrossReplicaContext)


def all_reduce(op: ReduceOp | str, tree: PyTree, options: CommunicationOptions | None = None) -> PyTree:
    """The value of all replicas together, handed to each.

    At home in `scan`, `cond` and `while_loop`. SUM and MEAN are differentiable: the gradient is the same reduction of the
    incoming gradients. The mean of integers is a float. MAX and MIN are NaN where the value of any replica is, as in
    `jnp.max`. Reduce everything in one call: small leaves then travel together.

    Args:
        op: `"sum"`, `"mean"`, `"max"` or `"min"`.
        tree: A tree whose leaves are `[...]` on each replica, or `RowSlices`.
        options: Which leaves travel together, if not as the strategy says.

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
    return require_replica_context("all_reduce", "strategy.reduce").all_reduce(op, tree, options)


def all_gather(tree: PyTree, axis: int) -> PyTree:
    """The values of all replicas, joined along a dimension and handed to each.

    Args:
        tree: A tree whose leaves are `[..., n, ...]` on each replica, the same shape on all.
        axis: The dimension to join along; -1 is the last.

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
    return require_replica_context("all_gather", "strategy.gather").all_gather(tree, axis)


def broadcast(tree: PyTree) -> PyTree:
    """What replica 0 holds, handed to every replica.

    Args:
        tree: A tree of arrays `[...]` of any dtype, the same shapes on all replicas.

    Returns:
        The same tree; mirrored.

    Raises:
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> int(strategy.run(lambda: jdist.broadcast(7 + jdist.replica_id())))
        7
    """
    return require_replica_context("broadcast", "strategy.put").broadcast(tree)


def replica_id() -> jax.Array:
    """The number of this replica, an int32 scalar from 0 up; 0 outside any strategy.

    Raises:
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> [int(i) for i in strategy.run(jdist.replica_id).values]
        [0, 1]
    """
    return require_replica_context("replica_id", "strategy.num_replicas_in_sync").replica_id_in_sync_group


def num_replicas() -> int:
    """How many replicas compute together: a Python number, known while tracing; 1 outside any strategy.

    Raises:
        RuntimeError: Called from the host program within `strategy.scope()`.

    Example:
        >>> jdist.num_replicas()
        1
    """
    return require_replica_context("num_replicas", "strategy.num_replicas_in_sync").num_replicas_in_sync


def require_replica_context(word: str, instead: str) -> ReplicaContext:
    """The replica that is asking.

    Raises:
        RuntimeError: It is the host program, which should take `instead`.
    """
    context = current_context()
    if not isinstance(context, ReplicaContext):
        raise RuntimeError(
            f"`jdist.{word}` is a word of replica functions, and within `strategy.scope()` the host program speaks for "
            f"all replicas. Call it in a function that `strategy.run` or `strategy.step` runs, or use `{instead}` here."
        )
    return context


def require_cross_replica_context(word: str, instead: str = "call it before, and hand in what it gives") -> None:
    """Raises RuntimeError if a replica function is running: `word` is a method of strategies for the host program."""
    if isinstance(current_context(), ReplicaContext) and in_replica_function():
        raise RuntimeError(f"`strategy.{word}` is called by the host program, not in a replica function: {instead}.")
