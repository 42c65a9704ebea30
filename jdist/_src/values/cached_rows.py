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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BatchNumber:
    """The number of a batch in its sequence of batches, known to the host only: all are equal, so they select no program.

    Attributes:
        sequence: An object that identifies the sequence.
        number: The number.
        available: The number of successive batches, from this one on, that are on the devices in one array.
    """

    sequence: object
    number: int
    available: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchNumber)

    def __hash__(self) -> int:
        return 0


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class CachedRows(DistributedValues):
    """The examples of a batch, selected by index from an array that every device holds: a leaf of a batch.

    `Strategy.distribute_dataset(cache="device")` creates it. A program gathers the examples when it runs, and receives them as
    the `PerReplica` that it would receive without the cache. On the host it has the values and methods of this `PerReplica`;
    each access gathers the examples. As a pytree it consists of the three arrays.

    Attributes:
        array: All examples, `[example, ...]`, replicated; None if `batches` contains the examples.
        batches: The indices of the examples of several batches, `[batch, replica, row]`, sharded over the replicas. Unsigned,
            because JAX adds instructions for negative indices of other types. Without `array` the examples themselves,
            `[batch, replica, row, ...]`.
        index: The index of this batch among them, unsigned `[]`, replicated. The next batches of the sequence follow it.
        batch: The number of the batch, or None.
    """

    _is_stacked = True
    array: Any
    batches: Any
    index: Any
    batch: BatchNumber | None = dataclasses.field(default=None, metadata={"static": True})

    def gathered(self, mesh: Mesh, spec: PartitionSpec) -> PerReplica:
        """Returns the examples as a `PerReplica` `[replica, row, ...]`. Called while a program is traced.

        Args:
            mesh: The mesh of the arrays.
            spec: The partition spec of `[replica, row]` arrays.
        """

        def gather(array: jax.Array | None, batches: jax.Array, index: jax.Array) -> jax.Array:
            return _take(array, lax.dynamic_index_in_dim(batches, index, keepdims=False))

        return PerReplica(_on_each_device(gather, mesh, spec, spec)(self.array, self.batches, self.index))

    @property
    def tree(self) -> jax.Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The examples, `[replica, row, ...]`."""
        if not is_device_array(self.batches):  # in a `jax.jit` of the user
            return _take(self.array, self.batches[self.index])
        mesh, spec = mesh_of(self.batches), self.batches.sharding.spec
        rows = _gather(self, mesh, PartitionSpec(*spec[1:]))
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
        shape, dtype = self.batches.shape[1:], self.batches.dtype
        if self.array is not None:
            shape, dtype = (*shape, *self.array.shape[1:]), self.array.dtype
        return f"CachedRows({ReprText.of(jax.ShapeDtypeStruct(shape, dtype))!r})"


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
        first, start = batches[0], batches[0].batch
        if start is None or len(batches) > start.available:
            return None
        for number, rows in enumerate(batches, start.number):
            if not isinstance(rows, CachedRows) or rows.batch is None or rows.array is not first.array:
                return None
            if rows.batch.number != number or rows.batch.sequence is not start.sequence:
                return None
        return cls(first.array, first.batches, first.index, len(batches))

    def gathered(self, mesh: Mesh, spec: PartitionSpec) -> PerReplica:
        """Returns the examples of all batches as a `PerReplica` `[replica, batch, row, ...]`; see `CachedRows.gathered`."""

        def gather(array: jax.Array | None, batches: jax.Array, index: jax.Array) -> jax.Array:
            return _take(array, lax.dynamic_slice_in_dim(batches, index, self.num_steps).swapaxes(0, 1))

        out_spec = PartitionSpec(*spec[:1], None, *spec[1:])
        return PerReplica(_on_each_device(gather, mesh, spec, out_spec)(self.array, self.batches, self.index))


def gather_cached_rows(tree: PyTree, replicas: Replicas) -> PyTree:
    """Returns `tree` with a `PerReplica` in place of each `CachedRows` and `CachedSteps`. Called while a program is traced."""

    def gather(node: Any) -> Any:
        if not isinstance(node, (CachedRows, CachedSteps)):
            return node
        return node.gathered(replicas.mesh, replicas.batch_sharding(node.batches.shape[1:]).spec)

    return jax.tree.map(gather, tree, is_leaf=lambda node: is_distributed(node) or isinstance(node, CachedSteps))


def _on_each_device(
    gather: Callable[..., jax.Array], mesh: Mesh, spec: PartitionSpec, out_spec: PartitionSpec
) -> Callable[..., jax.Array]:
    """Returns `gather` in a `shard_map`, so that each device gathers its own rows, without communication."""
    in_specs = (PartitionSpec(), PartitionSpec(None, *spec), PartitionSpec())
    return jax.shard_map(gather, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)


def _take(array: jax.Array | None, selected: jax.Array) -> jax.Array:
    rows = selected if array is None else array.at[selected].get(mode="promise_in_bounds")
    # The barrier keeps XLA from fusing the gather into the step, which would round sums of examples differently.
    return lax.optimization_barrier(rows)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gather(rows: CachedRows, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return rows.gathered(mesh, spec).tree
