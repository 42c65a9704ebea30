"""`SyncOnRead`: one partial value per replica, aggregated when it is read."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np

from jdist._src.core.tree import PyTree, one_line
from jdist._src.devices.mesh import replicated_sharding
from jdist._src.values.aggregation import AggregationName, VariableAggregation, aggregate_rows
from jdist._src.values.array_checks import mesh_of
from jdist._src.values.array_copies import device_put_copy
from jdist._src.values.base import DistributedValues, cast_without_loss, is_distributed
from jdist._src.values.per_replica import PerReplica, assigned_rows, map_rows
from jdist._src.values.reduce_op import ReduceOp, check_reducible
from jdist._src.values.replica_rows import repeat_rows, split_into_shares


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class SyncOnRead(DistributedValues):
    """One partial value per replica, aggregated when it is read.

    A write uses no communication, so it suits metrics, batch statistics, and parameters that diverge between synchronization
    steps. In a replica function the value is the partial value of that replica; `read` aggregates.

    Attributes:
        tree: On the host, a tree of `[replica, ...]` arrays, sharded along the first dimension. In a replica function, and
            where `Strategy.init` creates it, the partial value `[...]` of that replica.
        aggregation: How `read` combines the partial values. With NONE, TensorFlow's default, only `values` can be read.
        trainable: Whether an optimizer may change it; see `jdist.trainable`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.init(lambda: jdist.SyncOnRead(np.float32(0), "sum"))
        >>> add = strategy.step(lambda total, x: (total + x.sum(), None))
        >>> state, _ = add(state, strategy.split(np.arange(4, dtype=np.float32)))
        >>> state, [float(x) for x in state.values], float(state.read())
        (SyncOnRead(float32[2], SUM), [1.0, 5.0], 6.0)
        >>> [float(x) for x in state.assign(5.0).values]
        [2.5, 2.5]
    """

    _is_stacked = True
    tree: PyTree
    aggregation: VariableAggregation = dataclasses.field(metadata={"static": True})
    trainable: bool = dataclasses.field(default=False, metadata={"static": True})

    if TYPE_CHECKING:

        def __init__(
            self, tree: PyTree, aggregation: VariableAggregation | AggregationName, trainable: bool = False
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.aggregation, VariableAggregation):
            object.__setattr__(self, "aggregation", VariableAggregation.of(self.aggregation))

    @property
    def values(self) -> tuple[PyTree, ...]:
        """One partial tree per replica of this process; leaves `[...]`, each on its own device."""
        return PerReplica(self._arrays).values

    def read(self) -> PyTree:
        """Returns the aggregated partial values: leaves `[...]`, replicated.

        Raises:
            ValueError: The aggregation is NONE.
            TypeError: The dtype of a leaf does not support the aggregation.
        """
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{one_line(self)} has no aggregation, so it cannot be read as one value. Read the value of each replica "
                "(`.values`), or use SUM, MEAN or ONLY_FIRST_REPLICA."
            )
        leaves, treedef = jax.tree.flatten(self._arrays)
        return treedef.unflatten([aggregate_rows(self.aggregation, "value", leaf) for leaf in leaves])

    def _for_num_replicas(self, num_replicas: int) -> "SyncOnRead":
        """Returns partial values for `num_replicas` replicas with the same aggregate: equal shares of a sum, else copies."""
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(self.tree)]
        is_readable = self.aggregation is not VariableAggregation.NONE
        if not is_readable or not all(shapes) or all(shape[0] == num_replicas for shape in shapes):
            return self
        to_rows = split_into_shares if self.aggregation is VariableAggregation.SUM else repeat_rows
        return self._with_tree(jax.tree.map(lambda x: to_rows(x, num_replicas, None), self.read()))

    def map(self, fn: Callable[[PyTree], PyTree]) -> "SyncOnRead":
        """Returns `fn` of each replica's partial tree, in the same placement."""
        return self._with_tree(map_rows(fn, self._arrays))

    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, is_per_replica: bool) -> jax.Array:
        """Returns one row per replica, whose aggregate is `value` if that is one value for all replicas.

        The rows of a SUM are equal shares; for integers, the first rows include the remainder.
        """
        if is_per_replica or self.aggregation is not VariableAggregation.SUM:
            return assigned_rows(name, leaf, value, is_per_replica)
        check_reducible(ReduceOp.SUM, name, leaf)
        value = cast_without_loss(name, value, leaf.shape[1:], leaf.dtype)
        return split_into_shares(
            device_put_copy(value, replicated_sharding(mesh_of(leaf))), leaf.shape[0], leaf.sharding
        )

    def _assign_source(self, wants_rows: bool) -> tuple[PyTree, bool]:
        """Returns the partial values for a value that stores one row per replica, else the aggregate."""
        return (self._arrays, True) if wants_rows else (self.read(), False)

    def _check_addition(self, method: str, value: PyTree) -> None:
        """Raises ValueError if the aggregation is SUM, and `value` is one value for all replicas."""
        is_shared = not is_distributed(value) or value._is_replicated
        if is_shared and self.aggregation is VariableAggregation.SUM:
            raise ValueError(
                f"`{method}` of one value to {one_line(self)} is ambiguous: it can be added on each replica, or once to their "
                "sum. To add it to the sum, write `value.assign(value.read() + x)`; to add it on each replica, "
                f"`value.{method}(PerReplica(rows))`."
            )
