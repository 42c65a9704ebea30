"""`VariableSynchronization` and `VariableAggregation`: when and how the replicas' writes to a value are combined."""

import enum
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.arguments import enum_member
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, one_line
from jdist._src.devices.mesh import row_sharding
from jdist._src.values.array_checks import check_range, is_on_mesh
from jdist._src.values.reduce_op import ReduceOp, check_reducible
from jdist._src.values.replica_rows import first_row, reduce_rows

SynchronizationName: TypeAlias = Literal["auto", "none", "on_write", "on_read", "AUTO", "NONE", "ON_WRITE", "ON_READ"]
AggregationName: TypeAlias = Literal[
    "none", "sum", "mean", "only_first_replica", "NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"
]


class VariableSynchronization(enum.Enum):
    """When the replicas' writes to a value are combined.

    Functions that take a `VariableSynchronization` also accept its name, in any case: `"on_read"`.

    Attributes:
        AUTO: Never: the value must be proved replicated. A plain array.
        NONE: Never: each replica has its own value. `PerReplica`.
        ON_WRITE: At the write. `Mirrored`.
        ON_READ: When the host program reads the value. `SyncOnRead`.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"

    @classmethod
    def of(cls, synchronization: "VariableSynchronization | str") -> "VariableSynchronization":
        """Returns the synchronization with this name.

        Raises:
            ValueError: No synchronization has this name.
        """
        return enum_member(cls, synchronization, f"Invalid variable synchronization mode: {one_line(synchronization)}")


class VariableAggregation(enum.Enum):
    """How the replicas' writes to a value are combined.

    Functions that take a `VariableAggregation` also accept its name, in any case: `"mean"`.

    Attributes:
        NONE: Not at all: where the replicas must hold the same value, it must be proved replicated.
        SUM: Their sum.
        MEAN: Their mean.
        ONLY_FIRST_REPLICA: The value of replica 0, on all replicas.
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"

    @classmethod
    def of(cls, aggregation: "VariableAggregation | str") -> "VariableAggregation":
        """Returns the aggregation with this name.

        Raises:
            ValueError: No aggregation has this name.
        """
        return enum_member(cls, aggregation, f"Invalid variable aggregation mode: {one_line(aggregation)}")


def check_mean(name: str, tree: PyTree) -> None:
    """Raises TypeError if all leaves of `tree`, whose mean over the replicas will be stored in it, are integers.

    An integer leaf beside floats is accepted: the aggregation applies only to leaves that a step writes.
    """
    leaves = named_leaves(name, tree)
    dtypes = [getattr(leaf, "dtype", None) or np.asarray(leaf).dtype for _, leaf in leaves]
    if leaves and all(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        leaf_name, leaf = leaves[0]
        raise TypeError(
            f"{leaf_name} is {dtype_and_shape(leaf)}, and the mean of integers is a float, which it cannot hold. Make it a "
            "float, or aggregate by SUM or ONLY_FIRST_REPLICA."
        )


def aggregate_rows(aggregation: VariableAggregation, name: str, rows: jax.Array) -> jax.Array:
    """Returns the aggregation of the replicas' rows `[replica, ...]`, replicated on the devices of `rows`."""
    check_range(name, rows)
    sharding = row_sharding(rows.sharding) if is_on_mesh(rows) else None  # pyright: ignore[reportArgumentType]
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return first_row(rows, sharding)
    op = ReduceOp.of(aggregation.name)
    check_reducible(op, name, rows)
    return reduce_rows(op, name, jnp.asarray(rows), None, (), sharding)
