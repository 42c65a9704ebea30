"""`variable`: where a value is put that the replicas write, and which of a state's values an optimizer may change."""

from typing import Any

import jax

from jdist._src.core.tree import PyTree
from jdist._src.replica.context import ReplicaContext, current_context, in_replica_function
from jdist._src.strategies.current import get_strategy
from jdist._src.values.aggregation import VariableAggregation, VariableSynchronization, check_mean
from jdist._src.values.arrays import fully_replicated
from jdist._src.values.base import is_distributed
from jdist._src.values.device_put import check_devices_attached, put_on_every_replica
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.sharded import Sharded
from jdist._src.values.sync_on_read import SyncOnRead


def variable(
    value: Any,
    synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
    aggregation: VariableAggregation | str = VariableAggregation.NONE,
    trainable: bool | None = None,
) -> PyTree:
    """A value that is written, in the place that says when and how the replicas' writes become one.

    * `AUTO`: a plain array. What the replicas write has to be proved the same on all.
    * `ON_WRITE`: `Mirrored`. What they write is aggregated at once.
    * `ON_READ`: `SyncOnRead`. What they write stays with each, and is aggregated when the host program reads it. With
      aggregation `NONE` the host program reads one value per replica (`.values`).
    * `NONE`: `PerReplica`. What they write stays with each, and the host program reads one value a replica.

    `AUTO` with an aggregation is `ON_WRITE`. `NONE` needs none.

    Args:
        value: What every replica begins with: a tree of arrays and numbers `[...]`.
        synchronization: When writes become one value.
        aggregation: How they do.
        trainable: Whether an optimizer may change it; by default unless it is `ON_READ` or `NONE`. See `jdist.trainable`.

    Returns:
        In a replica function, as in `strategy.init`, this replica's own; on the host, the value on the devices of the
        strategy in force.

    Raises:
        ValueError: There is no such choice, or the choices contradict each other.
        TypeError: `value` is a wrapped value, `RowSlices` that would be aggregated, or only integers with aggregation `MEAN`.
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
        raise RuntimeError("`jdist.variable` is called in a `merge_call`. Make the value before, in `strategy.init`.")
    strategy = get_strategy()
    check_devices_attached(strategy.mesh)
    return strategy.put(put_on_every_replica(wrapped, strategy.replicas))


def trainable(state: PyTree) -> PyTree:
    """Which leaves of a state an optimizer may change: a mask for `optax.masked`.

    Plain arrays, `Mirrored` and `Sharded` values are trainable unless they say otherwise, a `SyncOnRead` only if it says so,
    and what each replica keeps for itself (`PerReplica`) is not.

    Returns:
        A tree of booleans like the state as a replica function sees it, without wrappers.

    Example:
        >>> jdist.trainable({"w": np.zeros(3), "seen": jdist.SyncOnRead(np.zeros(2), "sum")})
        {'seen': False, 'w': True}
    """

    def one(node: Any) -> PyTree:
        if not is_distributed(node):
            return True
        flag = getattr(node, "trainable", isinstance(node, Sharded))
        return jax.tree.map(lambda _: flag, node.tree)

    return jax.tree.map(one, state, is_leaf=is_distributed)


def read_values(tree: PyTree) -> PyTree:
    """`tree` with every wrapper read: what the replicas have together, as plain arrays.

    So a model is evaluated, or saved, whose parameters drift: `SyncOnRead(MEAN)` gives their mean. A `PerReplica` gives the
    rows of all replicas. What lies in the memory of the host comes to the devices.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.put({"w": jdist.SyncOnRead(np.float32([1, 3]), "mean"), "step": np.int32(7)})
        >>> {name: x.item() for name, x in jdist.read_values(state).items()}
        {'step': 7, 'w': 2.0}
    """
    return jax.tree.map(
        lambda node: node.read() if is_distributed(node) else fully_replicated(node), tree, is_leaf=is_distributed
    )


def _wrapped(
    value: PyTree, synchronization: VariableSynchronization, aggregation: VariableAggregation, trainable: bool | None
) -> PyTree:
    if synchronization is VariableSynchronization.NONE:
        if trainable:
            raise ValueError(
                "A value that is never synchronised is not trainable. Parameters that each replica trains by itself are read "
                'together in the end: `synchronization="on_read", trainable=True`.'
            )
        return PerReplica(value)
    if aggregation is VariableAggregation.MEAN and not is_distributed(value):
        check_mean("value", value)
    if synchronization is VariableSynchronization.ON_READ:
        return SyncOnRead(value, aggregation, bool(trainable))
    plain = synchronization is VariableSynchronization.AUTO and aggregation is VariableAggregation.NONE
    return value if plain and trainable in (None, True) else Mirrored(value, aggregation, trainable in (None, True))
