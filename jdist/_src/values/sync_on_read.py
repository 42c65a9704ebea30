"""`SyncOnRead`: one partial value a replica, aggregated when it is read."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import replicated_sharding
from jdist._src.values.aggregation import VariableAggregation, aggregate_rows
from jdist._src.values.arrays import device_put_copy, mesh_of, repeat_rows, split_into_shares
from jdist._src.values.base import DistributedValues, cast_without_loss, is_distributed
from jdist._src.values.per_replica import PerReplica, assigned_rows, check_rows, map_rows
from jdist._src.values.reduce_op import ReduceOp, check_reducible


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class SyncOnRead(DistributedValues):
    """One partial value a replica, aggregated when it is read.

    Writing costs no communication, so this is the place for metrics and batch statistics, and for parameters that drift
    between synchronisations. Within a replica function there is that replica's own partial value; `read` aggregates.

    Attributes:
        tree: On the host, a tree of `[replica, ...]` arrays, sharded on the first dimension; in a replica function, as
            where `Strategy.init` makes it, that replica's own `[...]`.
        aggregation: How `read` makes one value of them. With NONE, TensorFlow's default, there is no one value: only `values`.
        trainable: Whether an optimizer may change it; see `jdist.trainable`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.init(lambda: jdist.SyncOnRead(np.float32(0), "sum"))
        >>> count = strategy.step(lambda seen: (seen + 10 + jdist.replica_id(), None))
        >>> state, _ = count(state)
        >>> state, [float(x) for x in state.values], float(state.read())
        (SyncOnRead(float32[2], SUM), [10.0, 11.0], 21.0)
        >>> [float(x) for x in state.assign(5.0).values]
        [2.5, 2.5]
    """

    stacked = True
    tree: PyTree
    aggregation: VariableAggregation = dataclasses.field(metadata={"static": True})
    trainable: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        if not isinstance(self.aggregation, VariableAggregation):
            object.__setattr__(self, "aggregation", VariableAggregation.of(self.aggregation))

    @staticmethod
    def spec(axes: tuple[str, ...]) -> PartitionSpec:
        """The first dimension is split over the replica axes."""
        return PartitionSpec(axes)

    @staticmethod
    def check(name: str, leaf: Any, num_replicas: int) -> None:
        """Raises ValueError if `leaf` has not one row for each replica."""
        check_rows(SyncOnRead, name, leaf, num_replicas)

    enter = staticmethod(PerReplica.enter)
    leave = staticmethod(PerReplica.leave)

    def rows(self, num_replicas: int) -> PyTree:
        """The leaves as they lie."""
        return self.tree

    @property
    def values(self) -> tuple[PyTree, ...]:
        """One partial tree a replica of this process; leaves `[...]`, each on its own device."""
        return PerReplica(self.tree).values

    def read(self) -> PyTree:
        """The partial values, aggregated: leaves `[...]`, held by every replica.

        Raises:
            ValueError: The aggregation is NONE.
            TypeError: A leaf has no such aggregation.
        """
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self!r} has no aggregation, so it cannot be read as one value. Take the value of each replica (`.values`), "
                "or make it with SUM, MEAN or ONLY_FIRST_REPLICA."
            )
        leaves, treedef = jax.tree.flatten(self.tree)
        return treedef.unflatten([aggregate_rows(self.aggregation, "value", leaf) for leaf in leaves])

    def over(self, num_replicas: int) -> "SyncOnRead":
        """Partial values for so many replicas that read the same: a sum is split into equal shares, else each has it all."""
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(self.tree)]
        is_read = self.aggregation is not VariableAggregation.NONE
        if not is_read or not all(shapes) or all(shape[0] == num_replicas for shape in shapes):
            return self
        shared = split_into_shares if self.aggregation is VariableAggregation.SUM else repeat_rows
        return self._with_tree(jax.tree.map(lambda x: shared(x, num_replicas, None), self.read()))

    def map(self, fn: Callable[[PyTree], PyTree]) -> "SyncOnRead":
        """The same placement of `fn` of each replica's partial tree."""
        return self._with_tree(map_rows(fn, self.tree))

    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, own: bool) -> jax.Array:
        """To each its own; or what reads as `value`: equal shares of a sum (integers keep their remainder), else itself."""
        if own or self.aggregation is not VariableAggregation.SUM:
            return assigned_rows(name, leaf, value, own)
        check_reducible(ReduceOp.SUM, name, leaf)
        value = device_put_copy(
            cast_without_loss(name, value, leaf.shape[1:], leaf.dtype), replicated_sharding(mesh_of(leaf))
        )
        return split_into_shares(value, leaf.shape[0], leaf.sharding)

    def given(self, to_rows: bool) -> tuple[PyTree, bool]:
        """The partial values to what has rows, and what they read as to anything else."""
        return (self.tree, True) if to_rows else (self.read(), False)

    def _check_addition(self, word: str, value: PyTree) -> None:
        """Raises ValueError if the value is read as a sum, and there is one `value` for all replicas."""
        shared = not is_distributed(value) or value.agrees
        if shared and self.aggregation is VariableAggregation.SUM:
            raise ValueError(
                f"`{word}` of one value to {self!r}: is it meant for each replica, or once for their sum? Say which: "
                f"`value.assign(value.read() + x)`, or `value.{word}(PerReplica(rows))`."
            )
