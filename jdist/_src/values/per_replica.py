"""`PerReplica`: one value per replica."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist._src.core.tree import PyTree, ReprText, dtype_and_shape, one_line
from jdist._src.devices.mesh import replicated_sharding, spans_devices
from jdist._src.values.array_checks import is_device_array, is_on_mesh, mesh_of
from jdist._src.values.array_copies import device_put_copy
from jdist._src.values.base import DistributedValues, cast_without_loss
from jdist._src.values.replica_rows import Shapes, local_rows, repeat_rows
from jdist._src.values.unread_rows import UnreadRows


class _ReadOnDemand:
    """A value with an attribute `tree` that may not exist before it is read.

    `__getattr__` is called only where an attribute does not exist, so the other values cost nothing more.
    """

    __slots__ = ("_unread",)
    _unread: UnreadRows

    if not TYPE_CHECKING:  # a type checker would then accept every name

        def __getattr__(self, name: str) -> Any:
            if name == "tree" and (rows := unread_rows(self)) is not None:
                object.__setattr__(self, "tree", rows.read())
                with contextlib.suppress(AttributeError):  # another thread has read the same rows
                    object.__delattr__(self, "_unread")
                return self.tree
            return super().__getattr__(name)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class PerReplica(_ReadOnDemand, DistributedValues):
    """One value per replica.

    Returned by `Strategy.run` for results that vary between replicas, by `Strategy.distribute_dataset` for batches, and by
    `Strategy.distribute_values_from_function`. In the state that `Strategy.init` creates, it declares leaves that are not
    synchronized: in the replica function, `PerReplica(x)` holds the `x` of that replica.

    Attributes:
        tree: On the host, a tree of `[replica, ...]` arrays, sharded along the first dimension.
        shapes: None, or for each leaf the shape on each replica, where the replicas hold values of different shapes. The rows
            are then padded with zeros to one shape; `values` returns them without padding. See `padded`.
        spec: None, or the `PartitionSpec` of the leaves that `layout=` of `Strategy.split` specified, where it differs from the
            default of a batch. A step takes the leaves with this sharding.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> ids = strategy.run(jdist.replica_id)
        >>> ids
        PerReplica([0, 1], dtype=int32)
        >>> [int(i) for i in ids.values]
        [0, 1]
        >>> ids + 1
        Traceback (most recent call last):
        TypeError: `+` is not defined for PerReplica([0, 1], dtype=int32), whose values are ...
    """

    _is_stacked = True
    tree: PyTree
    shapes: tuple[Shapes, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    spec: PartitionSpec | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def values(self) -> tuple[PyTree, ...]:
        """One tree per replica of this process, in the order of the replicas; leaves `[...]`, each on its own device."""
        leaves, treedef = jax.tree.flatten(self._arrays)
        rows = [local_rows(leaf, shapes) for leaf, shapes in zip(leaves, self._leaf_shapes(), strict=True)]
        return tuple(treedef.unflatten(row) for row in zip(*rows, strict=True))

    def read(self) -> PyTree:
        """Returns the leaves, `[replica, ...]`, without aggregation.

        Raises:
            ValueError: The replicas hold values of different shapes, which are not rows of one array.
        """
        if self.shapes is None:
            return self._arrays
        raise ValueError(
            f"{one_line(self)} has different shapes on the replicas. Use `.values` or `.padded()`, or concatenate: "
            "`strategy.gather`."
        )

    def map(self, fn: Callable[[PyTree], PyTree]) -> "PerReplica":
        """Returns a `PerReplica` of `fn` of each replica's tree, computed on the devices of the values.

        Raises:
            ValueError: The replicas hold values of different shapes.
        """
        return PerReplica(map_rows(fn, self.read()))

    def padded(self) -> tuple["PerReplica", "PerReplica"]:
        """Returns `(value, weights)` with the same shape on all replicas, which a step requires.

        Returns:
            The value with every leaf `[replica, rows, ...]`, padded with zeros, and float32 weights `[replica, rows]`: 1 for
            a row of the value and 0 for padding. Pass the weights to `jdist.global_mean`, metrics and batch statistics for
            exact results.

        Raises:
            ValueError: The leaves of a replica differ in their number of rows, or the replicas differ in another dimension.

        Example:
            >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> uneven = strategy.distribute_values_from_function(
            ...     lambda c: np.ones(3 - 2 * c.replica_id_in_sync_group)
            ... )
            >>> uneven
            PerReplica(float32[3] | float32[1])
            >>> value, weights = uneven.padded()
            >>> weights.tree.tolist()
            [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
        """
        leaves, treedef = jax.tree.flatten(self._arrays)
        shapes = [s or (leaf.shape[1:],) * leaf.shape[0] for leaf, s in zip(leaves, self._leaf_shapes(), strict=True)]
        rows = {tuple(shape[0] if shape else None for shape in leaf) for leaf in shapes}
        if len(rows) != 1 or None in next(iter(rows)) or any(len({s[1:] for s in leaf}) > 1 for leaf in shapes):
            raise ValueError(
                f"{one_line(self)} cannot be padded by rows: its leaves differ in their number of rows, or in another "
                "dimension. Pad each replica's value to one shape where you create it."
            )
        counts = next(iter(rows))
        width = leaves[0].shape[1]
        weights = (np.arange(width)[None] < np.asarray(counts)[:, None]).astype(np.float32)
        if is_device_array(leaves[0]):
            weights = device_put_copy(weights, leaves[0].sharding)
        return PerReplica(treedef.unflatten([_zero_padding(x, weights) for x in leaves])), PerReplica(weights)

    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, is_per_replica: bool) -> jax.Array:
        """Returns the same row for every replica, or one row per replica."""
        return assigned_rows(name, leaf, value, is_per_replica)

    def _assign_source(self, wants_rows: bool) -> tuple[PyTree, bool]:
        """Returns the rows."""
        return self._arrays, True

    def _leaf_shapes(self) -> tuple[Shapes | None, ...]:
        """Returns for each leaf the shape on each replica; None if all rows have one shape."""
        return self.shapes or (None,) * len(jax.tree.leaves(self.tree))

    def __repr__(self) -> str:
        if self.shapes is None:
            return f"PerReplica({_numbers(self.tree) or repr(jax.tree.map(ReprText.of, self.tree))})"
        leaves, treedef = jax.tree.flatten(self.tree)
        texts = [
            ReprText(" | ".join(dtype_and_shape(jax.ShapeDtypeStruct(shape, leaf.dtype)) for shape in shapes))
            for leaf, shapes in zip(leaves, self.shapes, strict=True)
        ]
        return f"PerReplica({treedef.unflatten(texts)!r})"


_MAX_NUMBERS = 16


def _numbers(tree: PyTree) -> str:
    """Returns the numbers of an array of one number per replica as JAX shows them; an empty string for other trees."""
    if is_on_mesh(tree) and tree.ndim == 1 and tree.size <= _MAX_NUMBERS and tree.is_fully_addressable:
        with contextlib.suppress(Exception):  # it was donated, its computation has failed, or these are random keys
            return f"{np.array2string(np.asarray(tree), separator=', ', max_line_width=1000)}, dtype={tree.dtype}"
    return ""


def unread(rows: UnreadRows) -> PerReplica:
    """Returns a value whose tree is the array of `rows`, which is made when it is read."""
    value = object.__new__(PerReplica)
    _set_shapes(value, None)
    _set_spec(value, None)
    _set_unread(value, rows)
    return value


# As `object.__setattr__`, in less time. A class with slots has a descriptor for each.
_set_shapes, _set_spec = PerReplica.__dict__["shapes"].__set__, PerReplica.__dict__["spec"].__set__
_set_unread = _ReadOnDemand.__dict__["_unread"].__set__


def unread_rows(value: Any) -> UnreadRows | None:
    """Returns the rows of a value that `unread` has made and whose tree was not read, or None."""
    try:
        return object.__getattribute__(value, "_unread")
    except AttributeError:
        return None


@jax.jit
def _zero_padding(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns `rows` with zeros where the weight is 0: the padding may be nonzero after `map`."""
    is_row = weights.reshape(weights.shape + (1,) * (rows.ndim - weights.ndim)) != 0
    return jnp.where(is_row, rows, jnp.zeros((), rows.dtype))


def map_rows(fn: Callable[[PyTree], PyTree], rows: PyTree) -> PyTree:
    """Returns `fn` of each row, computed on the devices of the rows."""
    leaves = jax.tree.leaves(rows)
    if not leaves:
        return fn(rows)
    sharding = leaves[0].sharding if is_on_mesh(leaves[0]) and not spans_devices(mesh_of(leaves[0])) else None
    # Without `keep_unused`, a function that ignores its argument would run on the default device.
    return jax.jit(jax.vmap(fn), out_shardings=sharding, keep_unused=True)(rows)


def assigned_rows(name: str, leaf: jax.Array, value: Any, is_per_replica: bool) -> jax.Array:
    """Returns rows placed like `leaf`: the rows of `value` if `is_per_replica`, else `value` repeated for each replica."""
    value = cast_without_loss(name, value, leaf.shape if is_per_replica else leaf.shape[1:], leaf.dtype)
    if is_per_replica:
        return device_put_copy(value, leaf.sharding)
    return repeat_rows(device_put_copy(value, replicated_sharding(mesh_of(leaf))), leaf.shape[0], leaf.sharding)
