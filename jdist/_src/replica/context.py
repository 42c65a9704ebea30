"""Replica context and collectives: whether code runs for one replica or on the host, and the public collectives.

While a strategy traces a replica function, `jdist.all_reduce` and the other collectives reduce over the strategy's mesh axes.
Outside any strategy there is one replica, and they are the identity. In `strategy.scope()` the host program cannot call them.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdist._src.collectives import ops
from jdist._src.collectives.cross_device_ops import AllReduce, CommunicationOptions, CrossDeviceOps
from jdist._src.core.arguments import keyword_arguments
from jdist._src.core.migration_hints import explains_attributes
from jdist._src.core.trace_key import keyed, set_outermost_key
from jdist._src.core.tree import PyTree, describe_type, named_leaves, one_line
from jdist._src.devices.mesh import Replicas
from jdist._src.replica.metric_sums import check_metric_sums
from jdist._src.values.array_checks import check_value
from jdist._src.values.base import is_distributed
from jdist._src.values.device_put import check_uniform_shape
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.reduce_op import ReduceOp, ReduceOpName

T = TypeVar("T")
_Number: TypeAlias = complex | np.ndarray | np.generic  # leaves that become JAX arrays


@explains_attributes("replica_context")
@dataclasses.dataclass(frozen=True)
class ReplicaContext:
    """The context of a replica function: the replicas that run together, and the collectives over them.

    Attributes:
        axes: The mesh axes of the replicas; none outside any strategy.
        num_replicas_in_sync: The number of replicas that run together.
        strategy: The strategy that runs them.
        cross_device_ops: The algorithm of all-reduces.
        communication_options: The packing of leaves into messages.
        virtual: Whether the replicas are virtual, so that their number does not depend on the devices.
        constraints: Where one replica spans devices, from the state of a step to a function that constrains the sharding of
            reduced gradients, or None.
        gradient_constraint: This function, in a step. It is applied to the result of an all-reduce.
        is_asynchronous: Whether workers update one state at different times (`jdist.ParameterServerStrategy`).
    """

    axes: tuple[str, ...] = ()
    num_replicas_in_sync: int = 1
    strategy: Any = None
    cross_device_ops: CrossDeviceOps = AllReduce()
    communication_options: CommunicationOptions = CommunicationOptions()
    virtual: bool = False
    constraints: Callable[[PyTree], Callable[[PyTree], PyTree] | None] | None = None
    gradient_constraint: Callable[[PyTree], PyTree] | None = None
    is_asynchronous: bool = False

    @classmethod
    def of(
        cls, strategy: Any, replicas: Replicas, ops: CrossDeviceOps, options: CommunicationOptions
    ) -> "ReplicaContext":
        """Returns the context of the replicas of `strategy`."""
        return cls(replicas.axes, replicas.size, strategy, ops, options, replicas.virtual)

    def of_state(self, state: PyTree) -> "ReplicaContext":
        """Returns the context of a step over this state."""
        return (
            self if self.constraints is None else dataclasses.replace(self, gradient_constraint=self.constraints(state))
        )

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """The index of this replica, an int32 scalar from 0 up; varying."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def all_reduce(self, op: ReduceOp | ReduceOpName, tree: T, *, options: CommunicationOptions | None = None) -> T:
        """See `jdist.all_reduce`."""
        if not isinstance(options, CommunicationOptions | None):
            raise TypeError(
                f"`options` must be a `jdist.CommunicationOptions(bytes_per_pack)`, got {one_line(options)}."
            )
        if options is None or options.bytes_per_pack is None:
            options = self.communication_options
        total = ops.all_reduce_tree(ReduceOp.of(op), tree, self.axes, self.cross_device_ops, options)
        return self.gradient_constraint(total) if self.gradient_constraint else total

    def all_gather(self, tree: T, axis: int) -> T:
        """See `jdist.all_gather`."""
        return ops.all_gather_tree(tree, axis, self.axes)

    def reduce_scatter(self, op: ReduceOp | ReduceOpName, tree: T, *, axis: int = 0) -> T:
        """See `jdist.reduce_scatter`."""
        return ops.reduce_scatter_tree(ReduceOp.of(op), tree, axis, self.axes)

    def broadcast(self, tree: T) -> T:
        """See `jdist.broadcast`."""
        return ops.broadcast_tree(tree, self.axes, self.cross_device_ops, self.communication_options)

    def merge_call(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Calls `fn` once for all replicas in the cross-replica context, and returns this replica's part of the result.

        It gathers the values of all replicas on each replica, which sends more than a reduction: if `fn` only reduces, use
        `jdist.all_reduce`. Can be called in `scan`, `cond` and `while_loop`.

        Args:
            fn: Called as `fn(strategy, *args, **kwargs)` in the cross-replica context; every array among its arguments is a
                `PerReplica` with leaves `[replica, ...]`. With one replica the arguments are plain arrays, as in TensorFlow;
                `strategy.reduce`, `strategy.gather` and `strategy.local_results` accept both.
            args: The values of this replica.
            kwargs: The values of this replica by name.

        Returns:
            The result of `fn`, with the row of this replica in place of each `PerReplica`; other values are replicated.

        Raises:
            TypeError: `args` is not a tuple, or `kwargs` is not a mapping.
            ValueError: `fn` returned a `PerReplica` that does not have one row per replica.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def total(strategy, value):
            ...     return strategy.reduce("sum", value, axis=None)
            >>> float(
            ...     strategy.run(
            ...         lambda: jdist.get_replica_context().merge_call(total, (jdist.replica_id(),))
            ...     )
            ... )
            1.0
        """
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                f"`args` must be a tuple of arguments, got {describe_type(args)}: write `merge_call(fn, (value,))`."
            )
        arguments = tuple(args), keyword_arguments("merge_call", kwargs)
        for name, leaf in named_leaves("args", arguments[0]) + named_leaves("kwargs", arguments[1]):
            check_value(name, leaf)
        if self.num_replicas_in_sync == 1:
            arguments = jax.tree.map(jnp.asarray, arguments)
        else:
            arguments = jax.tree.map(PerReplica, ops.stack_replicas(arguments, self.axes))
        with enter_context(CrossReplicaContext(self.strategy, merging=True, axes=self.axes)):
            result = fn(self.strategy, *arguments[0], **arguments[1])
        return jax.tree.map(self._this_replica, result, is_leaf=is_distributed)

    def _this_replica(self, node: Any) -> Any:
        if not is_distributed(node):
            return node
        for name, leaf in named_leaves("the result of merge_call", node.tree):
            node._check_leaf(name, leaf, self.num_replicas_in_sync)
        check_uniform_shape("the result of merge_call", node)
        if node._is_replicated:
            return node.read()
        rows = node._rows(self.num_replicas_in_sync)
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, self.replica_id_in_sync_group, keepdims=False), rows)


@dataclasses.dataclass(frozen=True)
class CrossReplicaContext:
    """The cross-replica context: the host program within `strategy.scope()`, or the function of a `merge_call`.

    Attributes:
        strategy: The current strategy.
        merging: Whether it is a `merge_call`, within a replica function.
        axes: In a `merge_call`, the mesh axes of the replicas.
    """

    strategy: Any
    merging: bool = False
    axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The argument of the function passed to `Strategy.distribute_values_from_function`: the replica of a value.

    Attributes:
        replica_id_in_sync_group: The index of the replica, from 0 up.
        num_replicas_in_sync: The number of replicas.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


_OUTSIDE = ReplicaContext()
_Context: TypeAlias = ReplicaContext | CrossReplicaContext
_context: ContextVar[_Context | None] = ContextVar("jdist_context", default=None)
_outermost: list[_Context] = [_OUTSIDE]  # shared by all threads and tasks


@contextlib.contextmanager
def enter_context(context: _Context) -> Iterator[None]:
    """Makes `context` the current context of this thread or task, and restores the former context on exit."""
    token = _context.set(context)
    try:
        with keyed(_key_of(context)):
            yield
    finally:
        _context.reset(token)


def set_default_context(context: CrossReplicaContext | None) -> None:
    """Sets the context that is current outside `enter_context`; None for the initial one, a single replica.

    Raises:
        RuntimeError: A context is entered.
    """
    if _context.get() is not None:
        raise RuntimeError(
            "`set_strategy` cannot be called inside a `strategy.scope()` or a replica function. Call it outside."
        )
    set_outermost_key(None if context is None else _key_of(context))
    _outermost[0] = context or _OUTSIDE


def _key_of(context: _Context) -> Hashable:
    """Returns a key of the traces made in this context. Not the strategy: JAX's caches must not keep it alive."""
    if context.strategy is None or getattr(context, "gradient_constraint", None) is not None:
        return object()  # the constraint is a function of the state of one step
    number = getattr(context, "num_replicas_in_sync", None)  # 1 where a step is traced as the only replica
    return weakref.ref(context.strategy), type(context), getattr(context, "merging", None), number


def current_context() -> _Context:
    """Returns the context of this thread or task."""
    return _context.get() or _outermost[0]


def in_replica_function() -> bool:
    """Returns whether this call is inside a replica function that a strategy is tracing."""
    context = _context.get()
    return context.merging if isinstance(context, CrossReplicaContext) else context is not None


def merge_call_axes() -> tuple[str, ...]:
    """Returns the mesh axes of the replicas inside a `merge_call`; no axes elsewhere."""
    context = _context.get()
    return context.axes if isinstance(context, CrossReplicaContext) else ()


def in_cross_replica_context() -> bool:
    """Returns whether the current context is the cross-replica context: in `strategy.scope()`, and in a `merge_call`.

    Example:
        >>> jdist.in_cross_replica_context()
        False
    """
    return isinstance(current_context(), CrossReplicaContext)


@overload
def all_reduce(
    op: ReduceOp | ReduceOpName, tree: _Number, *, options: CommunicationOptions | None = None
) -> jax.Array: ...
@overload
def all_reduce(op: ReduceOp | ReduceOpName, tree: T, *, options: CommunicationOptions | None = None) -> T: ...
def all_reduce(op: ReduceOp | ReduceOpName, tree: PyTree, *, options: CommunicationOptions | None = None) -> PyTree:
    """Returns the values of all replicas, reduced element by element; replicated.

    Can be called in `scan`, `cond` and `while_loop`. SUM and MEAN are differentiable: the gradient is the same reduction of the
    incoming gradients. The mean of integers is a float. MAX and MIN are NaN where the value of any replica is NaN, as in
    `jnp.max`. Reduce a tree in one call: small leaves are then packed into one message.

    Args:
        op: `"sum"`, `"mean"`, `"max"` or `"min"`.
        tree: A tree whose leaves are `[...]` per replica, or `RowSlices`.
        options: The packing of leaves into messages; by default the options of the strategy.

    Returns:
        The same tree, reduced element by element; replicated.

    Raises:
        ValueError: `op` is not a reduction; or a metric of flax.nnx, clu or metrax is added whose merge is not a sum.
        TypeError: The dtype of a leaf does not support the reduction (booleans, keys).
        RuntimeError: Called in the cross-replica context.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> float(strategy.run(lambda: jdist.all_reduce("mean", jdist.replica_id())))
        0.5
        >>> jdist.all_reduce("sum", 3.0).item()  # outside any strategy there is one replica
        3.0
    """
    context, op = require_replica_context("all_reduce", "strategy.reduce"), ReduceOp.of(op)
    if op is ReduceOp.SUM:
        check_metric_sums("value", tree)
    return context.all_reduce(op, tree, options=options)


@overload
def all_gather(tree: np.ndarray | np.generic, axis: int) -> jax.Array: ...
@overload
def all_gather(tree: T, axis: int) -> T: ...
def all_gather(tree: PyTree, axis: int) -> PyTree:
    """Returns the values of all replicas, concatenated along a dimension; replicated.

    Args:
        tree: A tree whose leaves are `[..., n, ...]` per replica, with the same shape on all replicas.
        axis: The dimension to concatenate along; -1 is the last.

    Returns:
        The same tree with leaves `[..., replica * n, ...]`; replicated.

    Raises:
        ValueError: A leaf does not have the dimension.
        RuntimeError: Called in the cross-replica context.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.run(lambda: jdist.all_gather(jdist.replica_id()[None], axis=0)).tolist()
        [0, 1]
    """
    return require_replica_context("all_gather", "strategy.gather").all_gather(tree, axis)


@overload
def reduce_scatter(op: ReduceOp | ReduceOpName, tree: np.ndarray | np.generic, *, axis: int = 0) -> jax.Array: ...
@overload
def reduce_scatter(op: ReduceOp | ReduceOpName, tree: T, *, axis: int = 0) -> T: ...
def reduce_scatter(op: ReduceOp | ReduceOpName, tree: PyTree, *, axis: int = 0) -> PyTree:
    """Returns one shard per replica of the values of all replicas, reduced element by element.

    Equals this replica's shard of `all_reduce(op, tree)`, and sends half the bytes. `all_gather` of the shards along the same
    dimension returns the result of `all_reduce`. SUM and MEAN are differentiable. The mean of integers is a float.

    Args:
        op: `"sum"` or `"mean"`.
        tree: A tree whose leaves are `[..., n, ...]` per replica, where the number of replicas divides `n`.
        axis: The dimension to split; -1 is the last.

    Returns:
        The same tree with leaves `[..., n / replica, ...]`: replica `i` holds shard `i`; varying.

    Raises:
        ValueError: `op` is another reduction, a leaf does not have the dimension, or the number of replicas does not divide it.
        TypeError: The dtype of a leaf does not support the reduction (booleans, keys), or a leaf is `RowSlices`.
        RuntimeError: Called in the cross-replica context.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> shards = strategy.run(
        ...     lambda: jdist.reduce_scatter("sum", jnp.arange(4.0) + jdist.replica_id())
        ... )
        >>> [shard.tolist() for shard in shards.values]
        [[1.0, 3.0], [5.0, 7.0]]
    """
    return require_replica_context("reduce_scatter", "strategy.reduce").reduce_scatter(op, tree, axis=axis)


@overload
def broadcast(tree: _Number) -> jax.Array: ...
@overload
def broadcast(tree: T) -> T: ...
def broadcast(tree: PyTree) -> PyTree:
    """Returns the values of replica 0; replicated.

    Args:
        tree: A tree of arrays `[...]` of any dtype, with the same shapes on all replicas.

    Returns:
        The same tree; replicated.

    Raises:
        RuntimeError: Called in the cross-replica context.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> int(strategy.run(lambda: jdist.broadcast(7 + jdist.replica_id())))
        7
    """
    return require_replica_context("broadcast", "strategy.put").broadcast(tree)


def replica_id() -> jax.Array:
    """Returns the index of this replica, an int32 scalar from 0 up; 0 outside any strategy.

    Raises:
        RuntimeError: Called in the cross-replica context.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> [int(i) for i in strategy.run(jdist.replica_id).values]
        [0, 1]
    """
    return require_replica_context("replica_id", "strategy.num_replicas_in_sync").replica_id_in_sync_group


def num_replicas() -> int:
    """Returns the number of replicas that run together, a Python integer; 1 outside any strategy.

    Raises:
        RuntimeError: Called in the cross-replica context.

    Example:
        >>> jdist.num_replicas()
        1
    """
    return require_replica_context("num_replicas", "strategy.num_replicas_in_sync").num_replicas_in_sync


def require_replica_context(name: str, instead: str) -> ReplicaContext:
    """Returns the current context, in which the function `name` of the replica-context API is called.

    Raises:
        RuntimeError: It is the cross-replica context, in which `instead` can be used.
    """
    context = current_context()
    if not isinstance(context, ReplicaContext):
        raise RuntimeError(
            f"`jdist.{name}` can only be called inside a function run by `strategy.run` or `strategy.step`. In the "
            f"cross-replica context, use `{instead}`."
        )
    return context


def require_cross_replica_context(method: str, instead: str = "call it outside, and pass its result") -> None:
    """Raises RuntimeError if `method`, a method of strategies for the host program, is called in a replica function."""
    if isinstance(current_context(), ReplicaContext) and in_replica_function():
        raise RuntimeError(f"`strategy.{method}` cannot be called inside a replica function: {instead}.")
