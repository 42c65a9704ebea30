"""`RowSlices`: a table of which only some rows are not zero."""

import dataclasses
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jdist._src.core.tree import dtype_and_shape
from jdist._src.values.arrays import check_value


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowSlices:
    """Some rows of a table that is zero elsewhere: what the gradient of an embedding is.

    `jdist.all_reduce` and `Strategy.reduce` join the rows of all replicas instead of adding whole tables, where that is
    less to send. An index may stand several times; its rows add up.

    Attributes:
        rows: `[row, ...]`.
        indices: `[row]`, integers from 0 up to `num_rows`: which row of the table each one is.
        num_rows: How many rows the table has.

    Example:
        >>> table = np.zeros((4, 2), np.float32)
        >>> update = RowSlices(rows=np.float32([[1, 2], [3, 4]]), indices=np.int32([1, 1]), num_rows=4)
        >>> update.add_to(table).tolist()
        [[0.0, 0.0], [4.0, 6.0], [0.0, 0.0], [0.0, 0.0]]
    """

    rows: Any
    indices: Any
    num_rows: int = dataclasses.field(metadata={"static": True})

    def dense(self) -> jax.Array:
        """The whole table, `[num_rows, ...]`."""
        return self.add_to(jnp.zeros((self.num_rows, *np.shape(self.rows)[1:]), jnp.asarray(self.rows).dtype))

    def add_to(self, table: Any) -> jax.Array:
        """`table` with these rows added.

        Raises:
            ValueError: They are no rows of such a table.
        """
        self.check("value")
        table, rows = jnp.asarray(table), jnp.asarray(self.rows)
        if table.shape != (self.num_rows, *rows.shape[1:]):
            raise ValueError(
                f"A table of {dtype_and_shape(table)} has no place for rows of {dtype_and_shape(rows)} of a table of {self.num_rows} rows. Give the "
                "table that they were taken from."
            )
        if not jnp.can_cast(rows.dtype, table.dtype, "same_kind"):
            raise TypeError(
                f"A table of {dtype_and_shape(table)} cannot hold rows of {dtype_and_shape(rows)} without loss. Cast the rows first."
            )
        return table.at[jnp.asarray(self.indices)].add(rows.astype(table.dtype))

    def check(self, name: str) -> None:
        """Raises ValueError if there is not one index a row, or one is of no row; TypeError if they are no integers."""
        for part, leaf in (("rows", self.rows), ("indices", self.indices)):
            check_value(f"{name}.{part}", leaf)
        rows, indices = jnp.asarray(self.rows), jnp.asarray(self.indices)
        if not rows.ndim or indices.shape != rows.shape[:1]:
            raise ValueError(
                f"{name} is RowSlices with rows {dtype_and_shape(rows)} and indices {dtype_and_shape(indices)}: there is one index a row."
            )
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise TypeError(
                f"{name} is RowSlices with indices of {dtype_and_shape(indices)}: rows are counted in integers."
            )
        if isinstance(indices, core.Tracer) or not indices.size or not indices.is_fully_addressable:
            return
        least, greatest = int(indices.min()), int(indices.max())
        if least < 0 or greatest >= self.num_rows:
            raise ValueError(
                f"{name} is RowSlices of a table of {self.num_rows} rows, with indices from {least} to {greatest}: they are "
                f"from 0 to {self.num_rows - 1}."
            )


def is_row_slices(node: object) -> bool:
    """Whether `node` is rows of a table."""
    return isinstance(node, RowSlices)
