"""`Sharded`: one value, split over the replicas."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, one_line
from jdist._src.devices.mesh import replicated_sharding, spans_devices
from jdist._src.values.array_checks import is_on_mesh
from jdist._src.values.array_copies import device_put_copy
from jdist._src.values.base import DistributedValues, cast_without_loss
from jdist._src.values.replica_rows import local_shards


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sharded(DistributedValues):
    """One value, split over the replicas along its first dimension: each replica holds, reads and writes its own shard.

    Attributes:
        tree: On the host, a tree of full arrays `[n, ...]`; in a replica function, the shard of that replica,
            `[n / replica, ...]`.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> table = strategy.put(jdist.Sharded(np.arange(6)))
        >>> [shard.tolist() for shard in table.values], table.read().tolist()
        ([[0, 1, 2], [3, 4, 5]], [0, 1, 2, 3, 4, 5])
    """

    tree: PyTree

    @classmethod
    def _check_leaf(cls, name: str, leaf: Any, num_replicas: int) -> None:
        """Raises ValueError if `leaf` cannot be split into equal shards."""
        shape = np.shape(leaf)
        if not shape or shape[0] % num_replicas:
            raise ValueError(
                f"{name} is Sharded, of {dtype_and_shape(leaf)}, and its first dimension cannot be split into {num_replicas} "
                "equal shards. Pad it to a multiple, or do not shard it."
            )

    @classmethod
    def _to_block(cls, tree: PyTree) -> PyTree:
        """Returns the shard of each replica unchanged.

        Raises:
            ValueError: A leaf is a scalar.
        """
        for name, leaf in named_leaves("value", tree):
            if not leaf.ndim:
                raise ValueError(
                    f"{name} of a Sharded is {dtype_and_shape(leaf)}: the shard of a replica has at least one dimension."
                )
        return tree

    def _rows(self, num_replicas: int) -> PyTree:
        """Returns the shard of each replica, `[replica, n / replica, ...]`."""
        return jax.tree.map(lambda x: x.reshape(num_replicas, x.shape[0] // num_replicas, *x.shape[1:]), self.tree)

    @property
    def values(self) -> tuple[PyTree, ...]:
        """The shard of each replica of this process, `[n / replica, ...]`, each on its own device.

        Raises:
            ValueError: The value is not placed on the devices of a strategy yet.
        """
        leaves, treedef = jax.tree.flatten(self._placed_tree())
        return tuple(treedef.unflatten(shards) for shards in zip(*map(local_shards, leaves), strict=True))

    def read(self) -> PyTree:
        """Returns the full arrays."""
        return self.tree

    def map(self, fn: Callable[[PyTree], PyTree]) -> "Sharded":
        """Returns `fn` of each replica's shard, in the same placement.

        Raises:
            ValueError: The value is not placed on the devices of a strategy yet.
        """
        sharding = jax.tree.leaves(self._placed_tree())[0].sharding
        if spans_devices(sharding.mesh):
            on_mesh = lambda x: x if is_on_mesh(x) else device_put_copy(x, replicated_sharding(sharding.mesh))
            return Sharded(jax.tree.map(on_mesh, jax.jit(fn)(self.tree)))
        per_shard = jax.shard_map(
            fn, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
        )
        return Sharded(jax.jit(per_shard)(self.tree))

    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, is_per_replica: bool) -> jax.Array:
        """Returns the full value, also if `value` has one row per replica, the shard of that replica."""
        if is_per_replica:  # [replica, n / replica, ...]
            value = jnp.reshape(value, (np.shape(value)[0] * np.shape(value)[1], *np.shape(value)[2:]))
        return device_put_copy(cast_without_loss(name, value, leaf.shape, leaf.dtype), leaf.sharding)

    def _placed_tree(self) -> PyTree:
        if not all(map(is_on_mesh, jax.tree.leaves(self.tree))):
            raise ValueError(f"{one_line(self)} is not split over devices yet. Place it first: `strategy.put(value)`.")
        return self.tree
