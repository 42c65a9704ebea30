"""`Mirrored`: the same value on every replica."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist._src.core.tree import PyTree
from jdist._src.values.aggregation import VariableAggregation, aggregate_rows
from jdist._src.values.arrays import (
    device_put_copy,
    fully_replicated,
    is_device_array,
    is_on_mesh,
    local_shards,
    repeat_rows,
)
from jdist._src.values.base import DistributedValues, cast_without_loss


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Mirrored(DistributedValues):
    """The same value on every replica, and how writes agree on it.

    In the state of a step, what the replicas return for it is aggregated before it is stored. A leaf that is returned as
    it came is not written.

    Attributes:
        tree: A tree of arrays `[...]`, held by every device.
        aggregation: What becomes of the replicas' writes. Under NONE they have to be proved to be the same, as for a plain
            array.
        trainable: Whether an optimizer may change it; see `jdist.trainable`.

    Raises:
        TypeError: While tracing: the mean of integers is to be stored as integers.
        ValueError: While tracing: a host number is written, of which the replicas have no sum.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> state = strategy.init(lambda: jdist.Mirrored(np.float32(0), "mean"))
        >>> count = strategy.step(lambda state: (state + jdist.replica_id(), None))
        >>> state, _ = count(state)
        >>> state
        Mirrored(float32[], MEAN)
        >>> float(state.read())
        0.5
    """

    agrees = True
    tree: PyTree
    aggregation: VariableAggregation = dataclasses.field(default=VariableAggregation.NONE, metadata={"static": True})
    trainable: bool = dataclasses.field(default=True, metadata={"static": True})

    def __post_init__(self) -> None:
        if not isinstance(self.aggregation, VariableAggregation):
            object.__setattr__(self, "aggregation", VariableAggregation.of(self.aggregation))

    @staticmethod
    def spec(axes: tuple[str, ...]) -> PartitionSpec:
        """Whole on every device."""
        return PartitionSpec()

    @staticmethod
    def check(name: str, leaf: Any, num_replicas: int) -> None:
        """Any array fits any number of replicas."""

    def rows(self, num_replicas: int) -> PyTree:
        """The value once for each replica."""
        return jax.tree.map(lambda x: repeat_rows(jnp.asarray(x), num_replicas, None), self.tree)

    @property
    def values(self) -> tuple[PyTree, ...]:
        """One tree a replica of this process, each on its own device."""
        leaves, treedef = jax.tree.flatten(self.tree)
        if not leaves or not all(map(is_on_mesh, leaves)):
            return (self.tree,)
        shards = map(local_shards, map(fully_replicated, leaves))
        return tuple(treedef.unflatten(copies) for copies in zip(*shards, strict=True))

    def read(self) -> PyTree:
        """The arrays, on the devices if they lie in another memory."""
        leaves, treedef = jax.tree.flatten(self.tree)
        there = list(map(fully_replicated, leaves))
        alike = all(one is other for one, other in zip(leaves, there, strict=True))
        return self.tree if alike else treedef.unflatten(there)

    def map(self, fn: Callable[[PyTree], PyTree]) -> "Mirrored":
        """`fn` of the tree, on every device."""
        tree = jax.tree.map(fully_replicated, self.tree)
        leaves = jax.tree.leaves(tree)
        where = leaves[0].sharding if leaves and is_device_array(leaves[0]) else None
        return self._with_tree(jax.jit(fn, out_shardings=where)(tree))

    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, own: bool) -> jax.Array:
        """One value for all, or the aggregation of each replica's own."""
        if own and self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{name} is the same on every replica, and got one value a replica with no aggregation to make one of them. "
                "Reduce them first (`strategy.reduce`), or make it `Mirrored(tree, aggregation)`."
            )
        value = aggregate_rows(self.aggregation, name, value) if own else value
        return device_put_copy(cast_without_loss(name, value, leaf.shape, leaf.dtype), leaf.sharding)
