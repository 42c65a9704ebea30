"""`Sharded`: one value, split over the replicas."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.devices.mesh import spans_devices
from jdist._src.values.arrays import device_put_copy, is_on_mesh, local_shards
from jdist._src.values.base import DistributedValues, cast_without_loss


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sharded(DistributedValues):
    """One value, split over the replicas along its first dimension: each holds, sees and writes its own part.

    Attributes:
        tree: On the host, a tree of whole arrays `[n, ...]`; in a replica function that replica's own part,
            `[n / replica, ...]`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> table = strategy.put(jdist.Sharded(np.arange(6)))
        >>> [part.tolist() for part in table.values], table.read().tolist()
        ([[0, 1, 2], [3, 4, 5]], [0, 1, 2, 3, 4, 5])
    """

    tree: PyTree

    @staticmethod
    def spec(axes: tuple[str, ...]) -> PartitionSpec:
        """The first dimension is split over the replica axes."""
        return PartitionSpec(axes)

    @staticmethod
    def check(name: str, leaf: Any, num_replicas: int) -> None:
        """Raises ValueError if `leaf` cannot be split into equal parts."""
        shape = np.shape(leaf)
        if not shape or shape[0] % num_replicas:
            raise ValueError(
                f"{name} is Sharded, of {dtype_and_shape(leaf)}, and its first dimension cannot be split into {num_replicas} equal parts. "
                "Pad it to a multiple, or leave it whole."
            )

    @staticmethod
    def leave(tree: PyTree) -> PyTree:
        """Each replica's part as it is.

        Raises:
            ValueError: A leaf has no dimension.
        """
        for name, leaf in named_leaves("value", tree):
            if not leaf.ndim:
                raise ValueError(
                    f"{name} of a Sharded is {dtype_and_shape(leaf)}: a replica's part of a value has a first dimension."
                )
        return tree

    def rows(self, num_replicas: int) -> PyTree:
        """Each replica's part, `[replica, n / replica, ...]`."""
        return jax.tree.map(lambda x: x.reshape(num_replicas, x.shape[0] // num_replicas, *x.shape[1:]), self.tree)

    @property
    def values(self) -> tuple[PyTree, ...]:
        """The part of each replica of this process, `[n / replica, ...]`, each on its own device.

        Raises:
            ValueError: It lies on no strategy's devices yet.
        """
        leaves, treedef = jax.tree.flatten(self._placed())
        return tuple(treedef.unflatten(parts) for parts in zip(*map(local_shards, leaves), strict=True))

    def read(self) -> PyTree:
        """The whole arrays."""
        return self.tree

    def map(self, fn: Callable[[PyTree], PyTree]) -> "Sharded":
        """The same placement of `fn` of each replica's part.

        Raises:
            ValueError: It lies on no strategy's devices yet.
        """
        where = jax.tree.leaves(self._placed())[0].sharding
        if spans_devices(where.mesh):
            return Sharded(jax.jit(fn)(self.tree))
        over_mesh = jax.shard_map(fn, mesh=where.mesh, in_specs=where.spec, out_specs=where.spec, check_vma=False)
        return Sharded(jax.jit(over_mesh)(self.tree))

    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, own: bool) -> jax.Array:
        """The whole value, or each replica's part as a row."""
        if own:  # [replica, n / replica, ...]
            value = jnp.reshape(value, (np.shape(value)[0] * np.shape(value)[1], *np.shape(value)[2:]))
        return device_put_copy(cast_without_loss(name, value, leaf.shape, leaf.dtype), leaf.sharding)

    def _placed(self) -> PyTree:
        if not all(map(is_on_mesh, jax.tree.leaves(self.tree))):
            raise ValueError(f"{self!r} is not split over any devices yet. Place it first: `strategy.put(value)`.")
        return self.tree
