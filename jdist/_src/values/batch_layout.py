"""`BatchLayout`: the dimensions along which the leaves of a global batch are split over the devices.

Without a layout a batch `[batch, ...]` is split along its first dimension. A layout contains a `PartitionSpec` for each leaf,
in terms of the dimensions of the global batch, such as `[batch, sequence, features]`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.core.tree import PyTree, describe_tree, dtype_and_shape, named_leaves, one_line
from jdist._src.devices.mesh import REPLICA_AXIS, Replicas
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.replica_rows import Shape

Dims = tuple[tuple[str, ...], ...]  # the mesh axes that split each dimension


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The placement of a leaf `[batch, ...]` of a global batch.

    Attributes:
        shape: The shape of the stored array: `[replica, ...]`; `[batch, ...]` if the leaf is the same for all replicas.
        sharding: The sharding of the stored array.
        num_replicas: The number of replicas.
        split_dim: The dimension of the leaf that is split over the replicas, or None.
        is_per_replica: Whether the stored array is `[replica, ...]`.
        is_default: Whether a batch has this sharding without a layout.
    """

    shape: Shape
    sharding: NamedSharding
    num_replicas: int
    split_dim: int | None
    is_per_replica: bool
    is_default: bool

    def stored(self, x: Any) -> Any:
        """Returns the leaf `x`, `[batch, ...]`, as it is stored; a view of a numpy array."""
        if self.split_dim is None:
            return x[None] if self.is_per_replica else x
        dim = self.split_dim
        parts = x.reshape(*x.shape[:dim], self.num_replicas, x.shape[dim] // self.num_replicas, *x.shape[dim + 1 :])
        return parts.transpose(dim, *range(dim), *range(dim + 1, parts.ndim))

    def wrap(self, array: Any) -> Any:
        """Returns the stored array in its wrapper."""
        if not self.is_per_replica:
            return array
        return PerReplica(array, spec=None if self.is_default else self.sharding.spec)


class BatchLayout:
    """The argument `layout` of `Strategy.split` and `Strategy.distribute_dataset`.

    Args:
        layout: A `PartitionSpec` for all leaves, or a tree of them that is a prefix of the batch. None in the tree: the leaf is
            split along its first dimension, as without a layout.
        replicas: The replicas.

    Attributes:
        default_axes: The axes that split the first dimension of a batch without a layout.

    Raises:
        TypeError: A leaf of `layout` is not a `PartitionSpec`.
        ValueError: A spec names an axis that does not exist, or twice, or a part of the replica axes, or another axis before
            them.
    """

    def __init__(self, layout: PyTree, replicas: Replicas):
        self._replicas = replicas
        self._replica_axes = replicas.mesh_axes
        self.default_axes = replicas.batch_axes or self._replica_axes
        to_dims = lambda spec: self._dims(PartitionSpec(self.default_axes) if spec is None else spec)
        self._dims_tree = jax.tree.map(lambda spec: _Leaf(to_dims(spec)), layout, is_leaf=lambda node: node is None)

    @staticmethod
    def of_axis(axis: int, replicas: Replicas) -> "BatchLayout":
        """Returns the layout in which the dimension `axis` is split over the replicas, or over the devices of one replica."""
        return BatchLayout(PartitionSpec(*[None] * axis, replicas.batch_axes or replicas.mesh_axes), replicas)

    @property
    def row_axes(self) -> tuple[str, ...] | None:
        """The axes that split the first dimension; None if they differ between the leaves."""
        axes = {(dims or ((),))[0] for dims in map(_dims_of, jax.tree.leaves(self._dims_tree))}
        return axes.pop() if len(axes) == 1 else None

    def leaves(self, batch: PyTree) -> list[LeafLayout]:
        """Returns the placement of each leaf of a global batch of arrays or shapes, `[batch, ...]`.

        Raises:
            ValueError: The layout does not have the structure of the batch, an axis does not divide a dimension, or all leaves
                are the same for all replicas.
        """
        per_leaf: list[Dims] = []
        try:
            add = lambda leaf, part: per_leaf.extend([leaf.dims] * len(jax.tree.leaves(part)))
            jax.tree.map(add, self._dims_tree, batch)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "`layout` must be a `PartitionSpec` for all leaves, or a tree of them with the structure of the batch, "
                f"{describe_tree(batch)}: {str(error).splitlines()[0]}"
            ) from None
        pairs = zip(named_leaves("batch", batch), per_leaf, strict=True)
        layouts = [self._leaf(name, leaf, dims) for (name, leaf), dims in pairs]
        if self._replicas.size > 1 and layouts and not any(layout.is_per_replica for layout in layouts):
            raise ValueError(
                f"No leaf of the batch, {describe_tree(batch)}, is split over the replicas. Name {REPLICA_AXIS!r} for a "
                "dimension that a leaf has. A value that is the same for all replicas is passed to a step as it is."
            )
        return layouts

    def weights(self, shape: Shape) -> LeafLayout:
        """Returns the placement of the weights of a batch, `[batch]`."""
        return self._leaf("weights", jax.ShapeDtypeStruct(shape, np.float32), (self.row_axes or (),))

    def _leaf(self, name: str, leaf: Any, dims: Dims) -> LeafLayout:
        replicas, shape = self._replicas, np.shape(leaf)
        dims = dims[: len(shape)]
        for dim, axes in enumerate(dims):
            parts = self.num_parts(axes)
            if shape[dim] % parts:
                raise ValueError(
                    f"{name} is {dtype_and_shape(leaf)}: its dimension {dim} is split over {_listed(axes)}, and {shape[dim]} "
                    f"is not a multiple of {parts}. Pad it, or split another dimension."
                )
        is_split = (
            [axes[: len(self._replica_axes)] == self._replica_axes for axes in dims] if self._replica_axes else []
        )
        split_dim = is_split.index(True) if any(is_split) else None
        rest = [axes[len(self._replica_axes) :] if dim == split_dim else axes for dim, axes in enumerate(dims)]
        is_per_replica = split_dim is not None or not self._replica_axes
        if is_per_replica:
            rest = [replicas.per_replica_axes if self._replica_axes else (), *rest]
        num_split = max((dim + 1 for dim, axes in enumerate(rest) if axes), default=0)
        spec = PartitionSpec(*[axes[0] if len(axes) == 1 else axes or None for axes in rest[:num_split]])
        stored_shape = shape
        if split_dim is not None:
            sizes = [size // replicas.size if dim == split_dim else size for dim, size in enumerate(shape)]
            stored_shape = (replicas.size, *sizes)
        elif is_per_replica:
            stored_shape = (1, *shape)
        sharding = NamedSharding(replicas.mesh, spec)
        default = replicas.batch_sharding(stored_shape)
        is_default = is_per_replica and not split_dim and sharding.is_equivalent_to(default, len(stored_shape))
        sharding = default if is_default else sharding
        return LeafLayout(stored_shape, sharding, replicas.size, split_dim, is_per_replica, is_default)

    def num_parts(self, axes: Sequence[str]) -> int:
        """Returns the number of parts of a dimension that these axes split."""
        num_replicas = self._replicas.size if set(axes) & set(self._replica_axes) else 1
        others = [self._replicas.mesh.shape[axis] for axis in axes if axis not in self._replica_axes]
        return num_replicas * math.prod(others)

    def _dims(self, spec: Any) -> Dims:
        """Returns the axes of each dimension, with all replica axes in place of `"replica"`."""
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                "`layout` must be a `jax.sharding.PartitionSpec`, or a tree of them with the structure of the batch, got "
                f"{one_line(spec)}."
            )
        replica_axes, mesh = self._replica_axes, self._replicas.mesh
        aliases = {REPLICA_AXIS, *self._replicas.axes} if replica_axes else set()
        other_axes = [axis for axis in mesh.axis_names if axis not in replica_axes]
        dims: list[tuple[str, ...]] = []
        for entry in spec:
            names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            for name in names:
                if name not in aliases and name not in other_axes and name not in replica_axes:
                    known = [REPLICA_AXIS, *other_axes] if replica_axes else other_axes
                    raise ValueError(
                        f"`layout` has {spec}, which names the axis {name!r}, and this strategy has {_listed(known)}."
                    )
            of_replicas = [name for name in names if name in aliases or name in replica_axes]
            others = tuple(name for name in names if name in other_axes)
            if of_replicas and names != (*of_replicas, *others):
                raise ValueError(
                    f"`layout` has {spec}, in which {others[0]!r} is before {REPLICA_AXIS!r}. Name {REPLICA_AXIS!r} first."
                )
            if of_replicas and not aliases.intersection(of_replicas) and tuple(of_replicas) != replica_axes:
                raise ValueError(
                    f"`layout` has {spec}, which splits a dimension over {_listed(of_replicas)} only. Name {REPLICA_AXIS!r}, "
                    "which names all replicas."
                )
            dims.append((*(replica_axes if of_replicas else ()), *others))
        flat = [axis for axes in dims for axis in axes]
        if len(set(flat)) < len(flat):
            raise ValueError(f"`layout` has {spec}, which names an axis twice. Name each axis once.")
        return tuple(dims)


@dataclasses.dataclass(frozen=True)
class _Leaf:  # a leaf of the tree of a layout: tuples would be nodes
    dims: Dims


def _dims_of(leaf: _Leaf) -> Dims:
    return leaf.dims


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(map(repr, axes))
