"""`PerReplica`: one value a replica."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.devices.mesh import replicated_sharding, spans_devices
from jdist._src.values.arrays import (
    Shapes,
    device_put_copy,
    is_device_array,
    is_on_mesh,
    local_rows,
    mesh_of,
    repeat_rows,
)
from jdist._src.values.base import DistributedValues, ReprText, cast_without_loss


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class PerReplica(DistributedValues):
    """One value a replica.

    Made by `Strategy.run` for what differs between replicas, by `Strategy.distribute_dataset` for batches and by
    `Strategy.distribute_values_from_function`. Written in the state that `Strategy.init` makes, it says that these
    leaves are not kept in step: in the replica function, `PerReplica(x)` holds that replica's own `x`.

    Attributes:
        tree: On the host, a tree of `[replica, ...]` arrays, sharded on the first dimension.
        shapes: Where the replicas hold values of different shapes: for each leaf the true shape on each replica. The rows
            are filled up with zeros, and the host program sees only what is true. See `padded`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> ids = strategy.run(jdist.replica_id)
        >>> ids
        PerReplica(int32[2])
        >>> [int(i) for i in ids.values]
        [0, 1]
        >>> ids + 1
        Traceback (most recent call last):
        TypeError: `+` on a PerReplica(int32[2]): it lies on many devices, ...
    """

    stacked = True
    tree: PyTree
    shapes: tuple[Shapes, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    @staticmethod
    def spec(axes: tuple[str, ...]) -> PartitionSpec:
        """The first dimension is split over the replica axes."""
        return PartitionSpec(axes)

    @staticmethod
    def check(name: str, leaf: Any, num_replicas: int) -> None:
        """Raises ValueError if `leaf` has not one row for each replica."""
        check_rows(PerReplica, name, leaf, num_replicas)

    @staticmethod
    def enter(tree: PyTree) -> PyTree:
        """`[1, ...]` to `[...]`."""
        return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)

    @staticmethod
    def leave(tree: PyTree) -> PyTree:
        """`[...]` to `[1, ...]`."""
        return jax.tree.map(lambda x: lax.expand_dims(x, (0,)), tree)

    def rows(self, num_replicas: int) -> PyTree:
        """The leaves as they lie."""
        return self.tree

    @property
    def values(self) -> tuple[PyTree, ...]:
        """One tree a replica of this process, in the order of the replicas; leaves `[...]`, each on its own device."""
        leaves, treedef = jax.tree.flatten(self.tree)
        rows = [local_rows(leaf, shapes) for leaf, shapes in zip(leaves, self._leaf_shapes(), strict=True)]
        return tuple(treedef.unflatten(row) for row in zip(*rows, strict=True))

    def read(self) -> PyTree:
        """The leaves as they lie, `[replica, ...]`: nothing says how one value should be made of them.

        Raises:
            ValueError: The replicas hold values of different shapes, which are no rows of one array.
        """
        if self.shapes is None:
            return self.tree
        raise ValueError(f"{self!r} has no one shape. Take `.values`, or `.padded()`, or join them: `strategy.gather`.")

    def map(self, fn: Callable[[PyTree], PyTree]) -> "PerReplica":
        """`PerReplica` of `fn` of each replica's tree, computed where the values are.

        Raises:
            ValueError: The replicas hold values of different shapes.
        """
        return PerReplica(map_rows(fn, self.read()))

    def padded(self) -> tuple["PerReplica", "PerReplica"]:
        """`(value, weights)` of one shape on all replicas, as a step needs them.

        Returns:
            The value with every leaf `[replica, rows, ...]`, filled up with zeros, and float32 weights
            `[replica, rows]`: 1 for a true row and 0 for one that only fills up. `jdist.global_mean`, metrics and batch
            statistics take them, so that results are exact.

        Raises:
            ValueError: The leaves differ in their number of rows, or in more than that.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> uneven = strategy.distribute_values_from_function(lambda c: np.ones(3 - 2 * c.replica_id_in_sync_group))
            >>> uneven
            PerReplica(float32[3] | float32[1])
            >>> value, weights = uneven.padded()
            >>> weights.tree.tolist()
            [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
        """
        leaves = jax.tree.leaves(self.tree)
        shapes = [s or (leaf.shape[1:],) * leaf.shape[0] for leaf, s in zip(leaves, self._leaf_shapes(), strict=True)]
        rows = {tuple(shape[0] if shape else None for shape in leaf) for leaf in shapes}
        if len(rows) != 1 or None in next(iter(rows)) or any(len({s[1:] for s in leaf}) > 1 for leaf in shapes):
            raise ValueError(
                f"{self!r} cannot be padded by rows: its leaves differ in how many they have, or in another dimension. Pad "
                "each replica's value to one shape where it is made."
            )
        counts = next(iter(rows))
        width = leaves[0].shape[1]
        weights = (np.arange(width)[None] < np.asarray(counts)[:, None]).astype(np.float32)
        if is_device_array(leaves[0]):
            weights = device_put_copy(weights, leaves[0].sharding)
        return PerReplica(jax.tree.map(lambda x: _zero_where(x, weights), self.tree)), PerReplica(weights)

    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, own: bool) -> jax.Array:
        """The same for every replica, or to each its own."""
        return assigned_rows(name, leaf, value, own)

    def given(self, to_rows: bool) -> tuple[PyTree, bool]:
        """The rows."""
        return self.tree, True

    def _leaf_shapes(self) -> tuple[Shapes | None, ...]:
        """For each leaf the true shape on each replica; None if every row is whole."""
        return self.shapes or (None,) * len(jax.tree.leaves(self.tree))

    def __repr__(self) -> str:
        if self.shapes is None:
            return f"PerReplica({jax.tree.map(ReprText.of, self.tree)!r})"
        leaves, treedef = jax.tree.flatten(self.tree)
        texts = [
            ReprText(" | ".join(dtype_and_shape(jax.ShapeDtypeStruct(shape, leaf.dtype)) for shape in shapes))
            for leaf, shapes in zip(leaves, self.shapes, strict=True)
        ]
        return f"PerReplica({treedef.unflatten(texts)!r})"


@jax.jit
def _zero_where(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """`rows` with zeros where the weight is 0: they are no longer there once a function was mapped over them."""
    keep = weights.reshape(weights.shape + (1,) * (rows.ndim - weights.ndim)) != 0
    return jnp.where(keep, rows, jnp.zeros((), rows.dtype))


def check_rows(kind: type, name: str, leaf: Any, num_replicas: int) -> None:
    """Raises ValueError if `leaf`, of a wrapper of this kind, has not one row for each replica."""
    shape = np.shape(leaf)
    if not shape or shape[0] != num_replicas:
        raise ValueError(
            f"{name} is a {kind.__name__} of {dtype_and_shape(leaf)}, for {shape[0] if shape else 'no'} replicas; this strategy has "
            f"{num_replicas}. A {kind.__name__} belongs to the strategy that made it: distribute the data with this one, or "
            "read the other's with `.values`."
        )


def map_rows(fn: Callable[[PyTree], PyTree], rows: PyTree) -> PyTree:
    """`fn` of each row, computed where the rows are."""
    leaves = jax.tree.leaves(rows)
    if not leaves:
        return fn(rows)
    where = leaves[0].sharding if is_on_mesh(leaves[0]) and not spans_devices(mesh_of(leaves[0])) else None
    # An argument that is not used would not say on which devices to compute.
    return jax.jit(jax.vmap(fn), out_shardings=where, keep_unused=True)(rows)


def assigned_rows(name: str, leaf: jax.Array, value: Any, own: bool) -> jax.Array:
    """Rows laid out as `leaf`: of one value for all, or of each replica's own."""
    value = cast_without_loss(name, value, leaf.shape if own else leaf.shape[1:], leaf.dtype)
    if own:
        return device_put_copy(value, leaf.sharding)
    return repeat_rows(device_put_copy(value, replicated_sharding(mesh_of(leaf))), leaf.shape[0], leaf.sharding)
