"""When the replicas' writes to a value become one value, and how."""

import enum

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.arguments import enum_member
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.devices.mesh import replicated_sharding
from jdist._src.values.arrays import check_range, first_row, is_on_mesh, mesh_of, reduce_rows
from jdist._src.values.reduce_op import ReduceOp, check_reducible


class VariableSynchronization(enum.Enum):
    """When the replicas' writes to a value become one.

    Wherever one is asked for, its name does as well, in any case.

    Attributes:
        AUTO: Never: the value has to be proved the same on every replica. A plain array.
        NONE: Never: each replica has a value of its own. `PerReplica`.
        ON_WRITE: When it is written. `Mirrored`.
        ON_READ: When the host program reads it. `SyncOnRead`.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"

    @classmethod
    def of(cls, synchronization: "VariableSynchronization | str") -> "VariableSynchronization":
        """The synchronization of that name.

        Raises:
            ValueError: There is none.
        """
        return enum_member(cls, synchronization, f"Invalid variable synchronization mode: {synchronization!r}")


class VariableAggregation(enum.Enum):
    """How the replicas' writes to a value become one.

    Wherever one is asked for, its name does as well, in any case.

    Attributes:
        NONE: They do not: where they have to agree, they have to be proved to.
        SUM: Their sum.
        MEAN: Their mean.
        ONLY_FIRST_REPLICA: What replica 0 wrote, on all.
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"

    @classmethod
    def of(cls, aggregation: "VariableAggregation | str") -> "VariableAggregation":
        """The aggregation of that name.

        Raises:
            ValueError: There is none.
        """
        return enum_member(cls, aggregation, f"Invalid variable aggregation mode: {aggregation!r}")


def check_mean(name: str, tree: PyTree) -> None:
    """Raises TypeError if `tree`, of which the mean over the replicas is to be stored, holds nothing but integers.

    A count beside floats may stay: the aggregation is for what a step writes.
    """
    leaves = named_leaves(name, tree)
    dtypes = [getattr(leaf, "dtype", None) or np.asarray(leaf).dtype for _, leaf in leaves]
    if leaves and all(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        leaf_name, leaf = leaves[0]
        raise TypeError(
            f"{leaf_name} is {dtype_and_shape(leaf)}, and the mean of integers is a float, which it cannot hold. Make it a float, or "
            "aggregate by SUM or ONLY_FIRST_REPLICA."
        )


def aggregate_rows(aggregation: VariableAggregation, name: str, rows: jax.Array) -> jax.Array:
    """One value of the replicas' rows `[replica, ...]`, on the devices where these lie."""
    check_range(name, rows)
    sharding = replicated_sharding(mesh_of(rows)) if is_on_mesh(rows) else None
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return first_row(rows, sharding)
    op = ReduceOp.of(aggregation.name)
    check_reducible(op, name, rows)
    return reduce_rows(op, name, jnp.asarray(rows), None, (), sharding)
