"""`variable`, `trainable` and `read_values`: choose the wrapper of a value, select trainable leaves, and read a state."""

from typing import Any, Literal

import jax

from jdist._src.core.nn_modules import from_array_tree, to_array_tree
from jdist._src.core.tree import PyTree
from jdist._src.replica.context import ReplicaContext, current_context, in_replica_function
from jdist._src.strategies.current import get_strategy
from jdist._src.values.aggregation import VariableAggregation, VariableSynchronization, check_mean
from jdist._src.values.array_copies import fully_replicated
from jdist._src.values.base import is_distributed
from jdist._src.values.device_put import check_devices_attached, put_on_every_replica
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.sharded import Sharded
from jdist._src.values.sync_on_read import SyncOnRead


def variable(
    value: Any,
    *,
    synchronization: VariableSynchronization | Literal["auto", "none", "on_write", "on_read"] = (
        VariableSynchronization.AUTO
    ),
    aggregation: VariableAggregation | Literal["none", "sum", "mean", "only_first_replica"] = VariableAggregation.NONE,
    trainable: bool | None = None,
) -> PyTree:
    """Returns `value` in the wrapper that selects when, and by which aggregation, the replicas' writes become one value.

    * `AUTO`: a plain array. A new value has to be proved to be the same on every replica.
    * `ON_WRITE`: `Mirrored`. The values that the replicas write are aggregated at each write.
    * `ON_READ`: `SyncOnRead`. The value that a replica writes stays local, and the host program aggregates when it reads. With
      aggregation `NONE` the host program reads one value per replica (`.values`).
    * `NONE`: `PerReplica`. The value that a replica writes stays local, and the host program reads one value per replica.

    `AUTO` with an aggregation is `ON_WRITE`. `NONE` does not need an aggregation.

    Args:
        value: The initial value of every replica: a tree of arrays and numbers `[...]`.
        synchronization: When writes become one value.
        aggregation: The operation that combines them.
        trainable: Whether an optimizer may change it; by default True, except for `ON_READ` and `NONE`. See `jdist.trainable`.

    Returns:
        In a replica function, as in `strategy.init`, the value of this replica. On the host, the value on the devices of the
        current strategy.

    Raises:
        ValueError: A choice is unknown, or the choices contradict each other.
        TypeError: `value` is a wrapped value, `RowSlices` that would be aggregated, or integers with aggregation `MEAN`.
        RuntimeError: Called in a `merge_call`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     seen = jdist.variable(0.0, synchronization="on_read", aggregation="sum")
        >>> seen
        SyncOnRead(float32[2], SUM)
    """
    wrapped = _wrapped(
        value, VariableSynchronization.of(synchronization), VariableAggregation.of(aggregation), trainable
    )
    if isinstance(current_context(), ReplicaContext) and in_replica_function():
        return wrapped
    if in_replica_function():
        raise RuntimeError("`jdist.variable` is called in a `merge_call`. Create the value before, in `strategy.init`.")
    strategy = get_strategy()
    check_devices_attached(strategy.mesh)
    return strategy.put(put_on_every_replica(wrapped, strategy.replicas))


def trainable(state: PyTree) -> PyTree:
    """Returns a mask of the leaves of a state that an optimizer may change, for `optax.masked`.

    Plain arrays, `Mirrored` and `Sharded` values are trainable unless they are declared otherwise. A `SyncOnRead` is trainable
    only if it is declared so, and a `PerReplica` never.

    Returns:
        A tree of booleans like the state as a replica function sees it, without wrappers.

    Example:
        >>> jdist.trainable({"w": np.zeros(3), "seen": jdist.SyncOnRead(np.zeros(2), "sum")})
        {'seen': False, 'w': True}
    """

    def mask(node: Any) -> PyTree:
        if not is_distributed(node):
            return True
        flag = getattr(node, "trainable", isinstance(node, Sharded))
        return jax.tree.map(lambda _: flag, node.tree)

    return jax.tree.map(mask, state, is_leaf=is_distributed)


def read_values(tree: PyTree) -> PyTree:
    """Returns `tree` with every wrapper read: the aggregated values, as plain arrays.

    Use it to evaluate or save a model whose parameters differ between the replicas: a `SyncOnRead(MEAN)` becomes their mean. A
    `PerReplica` becomes the rows of all replicas. Leaves in host memory are copied to the devices.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.put(
        ...     {"w": jdist.SyncOnRead(np.float32([1, 3]), "mean"), "step": np.int32(7)}
        ... )
        >>> {name: x.item() for name, x in jdist.read_values(state).items()}
        {'step': 7, 'w': 2.0}
    """
    read = lambda node: node.read() if is_distributed(node) else fully_replicated(node)
    return from_array_tree(jax.tree.map(read, to_array_tree(tree), is_leaf=is_distributed))


def _wrapped(
    value: PyTree, synchronization: VariableSynchronization, aggregation: VariableAggregation, trainable: bool | None
) -> PyTree:
    if synchronization is VariableSynchronization.NONE:
        if trainable:
            raise ValueError(
                "A value with synchronization NONE cannot be trainable. For parameters that each replica trains on its own, "
                'and that are aggregated when they are read: `synchronization="on_read", trainable=True`.'
            )
        return PerReplica(value)
    if aggregation is VariableAggregation.MEAN and not is_distributed(value):
        check_mean("value", value)
    if synchronization is VariableSynchronization.ON_READ:
        return SyncOnRead(value, aggregation, bool(trainable))
    is_plain = synchronization is VariableSynchronization.AUTO and aggregation is VariableAggregation.NONE
    return value if is_plain and trainable in (None, True) else Mirrored(value, aggregation, trainable in (None, True))
