"""`Mirrored`: a replicated value."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp

from jdist._src.core.tree import PyTree
from jdist._src.values.aggregation import AggregationName, VariableAggregation, aggregate_rows
from jdist._src.values.array_checks import is_device_array, is_on_mesh
from jdist._src.values.array_copies import device_put_copy, fully_replicated
from jdist._src.values.base import DistributedValues, cast_without_loss
from jdist._src.values.replica_rows import local_shards, repeat_rows


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Mirrored(DistributedValues):
    """A value that is the same on every replica, with the aggregation of the replicas' writes to it.

    In the state of a step, the values that the replicas return for it are aggregated before they are stored. A leaf that is
    returned unchanged is not written.

    Attributes:
        tree: A tree of arrays `[...]`, held by every device.
        aggregation: How the replicas' writes are combined. With NONE they must be proved replicated, as for a plain array.
        trainable: Whether an optimizer may change it; see `jdist.trainable`.

    Raises:
        TypeError: While tracing: the mean of integers would be stored as integers.
        ValueError: While tracing: a host number is written, whose sum over the replicas is undefined.

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

    _is_replicated = True
    tree: PyTree
    aggregation: VariableAggregation = dataclasses.field(default=VariableAggregation.NONE, metadata={"static": True})
    trainable: bool = dataclasses.field(default=True, metadata={"static": True})

    if TYPE_CHECKING:

        def __init__(
            self,
            tree: PyTree,
            aggregation: VariableAggregation | AggregationName = VariableAggregation.NONE,
            trainable: bool = True,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.aggregation, VariableAggregation):
            object.__setattr__(self, "aggregation", VariableAggregation.of(self.aggregation))

    def _rows(self, num_replicas: int) -> PyTree:
        """Returns the value repeated for each replica."""
        return jax.tree.map(lambda x: repeat_rows(jnp.asarray(x), num_replicas, None), self.tree)

    @property
    def values(self) -> tuple[PyTree, ...]:
        """One tree per replica of this process, each on its own device."""
        leaves, treedef = jax.tree.flatten(self._arrays)
        if not leaves or not all(map(is_on_mesh, leaves)):
            return (treedef.unflatten(leaves),)
        shards = map(local_shards, map(fully_replicated, leaves))
        return tuple(treedef.unflatten(copies) for copies in zip(*shards, strict=True))

    def read(self) -> PyTree:
        """Returns the arrays, moved to device memory if they are stored in another memory."""
        tree = self._arrays
        leaves, treedef = jax.tree.flatten(tree)
        on_devices = list(map(fully_replicated, leaves))
        is_unchanged = all(leaf is moved for leaf, moved in zip(leaves, on_devices, strict=True))
        return tree if is_unchanged else treedef.unflatten(on_devices)

    def map(self, fn: Callable[[PyTree], PyTree]) -> "Mirrored":
        """Returns `fn` of the tree, computed on every device."""
        tree = jax.tree.map(fully_replicated, self._arrays)
        leaves = jax.tree.leaves(tree)
        sharding = leaves[0].sharding if leaves and is_device_array(leaves[0]) else None
        return self._with_tree(jax.jit(fn, out_shardings=sharding)(tree))

    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, is_per_replica: bool) -> jax.Array:
        """Returns one value for all replicas, or the aggregation of one value per replica."""
        if is_per_replica and self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{name} is replicated, and received one value per replica without an aggregation to combine them. Reduce them "
                "first (`strategy.reduce`), or use `Mirrored(tree, aggregation)`."
            )
        value = aggregate_rows(self.aggregation, name, value) if is_per_replica else value
        return device_put_copy(cast_without_loss(name, value, leaf.shape, leaf.dtype), leaf.sharding)
