"""`CachedRows`: the examples of a batch, gathered from an array on the devices by the program that uses the batch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jdist._src.core.tree import PyTree
from jdist._src.devices.dispatch import is_bounded, wait_for_results
from jdist._src.devices.mesh import Replicas
from jdist._src.values.arrays import is_device_array, mesh_of
from jdist._src.values.base import DistributedValues, ReprText, is_distributed
from jdist._src.values.per_replica import PerReplica, assigned_rows


class _HostOnly:
    """Base of properties of a batch that are used on the host only: all are equal, so they select no program."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BatchGroup(_HostOnly):
    """Successive batches that are on the devices in one array.

    Attributes:
        sequence: An object that identifies the sequence of batches.
        first: The number of the first batch in the sequence.
        available: The number of successive batches, from the first on, in the array.
    """

    sequence: object
    first: int
    available: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BatchOffset(_HostOnly):
    """The number of batches before a batch in its group."""

    value: int


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False, init=False)
class CachedRows(DistributedValues):
    """The examples of a batch, selected by index from an array that every device holds: a leaf of a batch.

    `Strategy.distribute_dataset(cache="device")` creates it. A program gathers the examples when it runs, and receives them as
    the `PerReplica` that it would receive without the cache. On the host it has the values and methods of this `PerReplica`;
    each access gathers the examples. As a pytree it consists of the three arrays.

    Attributes:
        array: All examples, `[example, ...]`, replicated; None if `batches` contains the examples.
        batches: The indices of the examples of several batches, `[replica, batch, row]`, sharded over the replicas. Unsigned,
            because JAX adds instructions for negative indices of other types. Without `array` the examples themselves,
            `[replica, batch, row, ...]`.
        index: The index of this batch among them, unsigned `[]`, replicated. The next batches of the sequence follow it.
        batch: The group of the batch and its offset in it, or None.
    """

    _is_stacked = True
    array: Any
    batches: Any
    index: Any
    batch: tuple[BatchGroup, BatchOffset] | None = dataclasses.field(metadata={"static": True})

    def __init__(self, array: Any, batches: Any, index: Any, batch: tuple[BatchGroup, BatchOffset] | None = None):
        # A training loop creates these objects. The `__init__` of a frozen dataclass takes twice the time.
        _set_array(self, array)
        _set_batches(self, batches)
        _set_index(self, index)
        _set_batch(self, batch)

    def gathered(self, mesh: Mesh, spec: PartitionSpec) -> PerReplica:
        """Returns the examples as a `PerReplica` `[replica, row, ...]`. Called while a program is traced.

        Args:
            mesh: The mesh of the arrays.
            spec: The partition spec of `[replica, row]` arrays.
        """

        def gather(array: jax.Array | None, batches: jax.Array, index: jax.Array) -> jax.Array:
            return _take(array, lax.dynamic_index_in_dim(batches, index, axis=1, keepdims=False))

        return PerReplica(_on_each_device(gather, mesh, spec, spec)(self.array, self.batches, self.index))

    @property
    def tree(self) -> jax.Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The examples, `[replica, row, ...]`."""
        if not is_device_array(self.batches):  # in a `jax.jit` of the user
            return _take(self.array, self.batches[:, self.index])
        mesh, spec = mesh_of(self.batches), self.batches.sharding.spec
        rows = _gather(self, mesh, PartitionSpec(*spec[:1], *spec[2:]))
        if is_bounded(mesh):
            wait_for_results(rows)
        return rows

    _partition_spec = staticmethod(PerReplica._partition_spec)
    _check_leaf = staticmethod(PerReplica._check_leaf)

    def _rows(self, num_replicas: int) -> PyTree:
        """Returns the examples."""
        return self.tree

    @property
    def values(self) -> tuple[PyTree, ...]:
        """The examples of each replica of this process, each `[row, ...]` on its own device."""
        return PerReplica(self.tree).values

    def read(self) -> PyTree:
        """Returns the examples, `[replica, row, ...]`."""
        return self.tree

    def map(self, fn: Callable[[PyTree], PyTree]) -> Any:
        """Returns a `PerReplica` of `fn` of each replica's examples."""
        return PerReplica(self.tree).map(fn)

    def _for_num_replicas(self, num_replicas: int) -> Any:
        """Returns the examples as a `PerReplica`."""
        return PerReplica(self.tree)

    def _with_tree(self, tree: PyTree) -> Any:
        """Returns a `PerReplica` of other examples."""
        return PerReplica(tree)

    def _assigned_leaf(self, name: str, leaf: jax.Array, value: Any, is_per_replica: bool) -> jax.Array:
        """Returns the same row for every replica, or one row per replica."""
        return assigned_rows(name, leaf, value, is_per_replica)

    def _assign_source(self, wants_rows: bool) -> tuple[PyTree, bool]:
        """Returns the examples."""
        return self.tree, True

    def __repr__(self) -> str:
        shape, dtype = _shape_of_batch(self.batches), self.batches.dtype
        if self.array is not None:
            shape, dtype = (*shape, *self.array.shape[1:]), self.array.dtype
        return f"CachedRows({ReprText.of(jax.ShapeDtypeStruct(shape, dtype))!r})"


_set_array, _set_batches, _set_index, _set_batch = (
    vars(CachedRows)[field.name].__set__ for field in dataclasses.fields(CachedRows)
)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CachedSteps:
    """The `CachedRows` of successive batches, with their arrays once.

    Attributes:
        array, batches, index: See `CachedRows`; `index` is the index of the first batch.
        num_steps: The number of batches.
    """

    array: Any
    batches: Any
    index: Any
    num_steps: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, batches: Sequence[Any]) -> "CachedSteps | None":
        """Returns `batches` as one value; None if they are not successive batches whose indices are on the devices together."""
        first = batches[0]
        if first.batch is None:
            return None
        group, offset = first.batch
        if offset.value + len(batches) > group.available:
            return None
        array, sequence = first.array, group.sequence
        for number, rows in enumerate(batches, group.first + offset.value):
            if not isinstance(rows, CachedRows) or rows.batch is None or rows.array is not array:
                return None
            group, offset = rows.batch
            if group.sequence is not sequence or group.first + offset.value != number:
                return None
        return cls(first.array, first.batches, first.index, len(batches))

    def gathered(self, mesh: Mesh, spec: PartitionSpec) -> PerReplica:
        """Returns the examples of all batches as a `PerReplica` `[replica, batch, row, ...]`; see `CachedRows.gathered`."""

        def gather(array: jax.Array | None, batches: jax.Array, index: jax.Array) -> jax.Array:
            return _take(array, lax.dynamic_slice_in_dim(batches, index, self.num_steps, axis=1))

        out_spec = spec_of_batches(spec)
        return PerReplica(_on_each_device(gather, mesh, spec, out_spec)(self.array, self.batches, self.index))


def gather_cached_rows(tree: PyTree, replicas: Replicas) -> PyTree:
    """Returns `tree` with a `PerReplica` in place of each `CachedRows` and `CachedSteps`. Called while a program is traced."""

    def gather(node: Any) -> Any:
        if not isinstance(node, (CachedRows, CachedSteps)):
            return node
        return node.gathered(replicas.mesh, replicas.batch_sharding(_shape_of_batch(node.batches)).spec)

    return jax.tree.map(gather, tree, is_leaf=lambda node: is_distributed(node) or isinstance(node, CachedSteps))


def _on_each_device(
    gather: Callable[..., jax.Array], mesh: Mesh, spec: PartitionSpec, out_spec: PartitionSpec
) -> Callable[..., jax.Array]:
    """Returns `gather` in a `shard_map`, so that each device gathers its own rows, without communication."""
    in_specs = (PartitionSpec(), spec_of_batches(spec), PartitionSpec())
    return jax.shard_map(gather, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)


def spec_of_batches(spec: PartitionSpec) -> PartitionSpec:
    """Returns the partition spec of `[replica, batch, row]` arrays, given that of `[replica, row]` arrays."""
    return PartitionSpec(*spec[:1], None, *spec[1:])


def _shape_of_batch(batches: jax.Array) -> tuple[int, ...]:
    return batches.shape[:1] + batches.shape[2:]


def _take(array: jax.Array | None, selected: jax.Array) -> jax.Array:
    rows = selected if array is None else array.at[selected].get(mode="promise_in_bounds")
    # The barrier keeps XLA from fusing the gather into the step, which would round sums of examples differently.
    return lax.optimization_barrier(rows)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gather(rows: CachedRows, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return rows.gathered(mesh, spec).tree
