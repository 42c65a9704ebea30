"""`RowSlices`: a sparse table, with few nonzero rows."""

import dataclasses
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jdist._src.core.tree import dtype_and_shape
from jdist._src.values.array_checks import check_value


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowSlices:
    """Some rows of a table whose other rows are zero, such as the gradient of an embedding table.

    `jdist.all_reduce` and `Strategy.reduce` gather the rows of all replicas instead of adding dense tables, where that sends
    fewer bytes. An index may occur several times; its rows are added.

    Attributes:
        rows: `[row, ...]`.
        indices: `[row]`, integers in `[0, num_rows)`: the position of each row in the table.
        num_rows: The number of rows of the table.

    Example:
        >>> table = np.zeros((4, 2), np.float32)
        >>> update = RowSlices(
        ...     rows=np.float32([[1, 2], [3, 4]]), indices=np.int32([1, 1]), num_rows=4
        ... )
        >>> update.add_to(table).tolist()
        [[0.0, 0.0], [4.0, 6.0], [0.0, 0.0], [0.0, 0.0]]
    """

    rows: Any
    indices: Any
    num_rows: int = dataclasses.field(metadata={"static": True})

    def dense(self) -> jax.Array:
        """Returns the dense table, `[num_rows, ...]`."""
        return self.add_to(jnp.zeros((self.num_rows, *np.shape(self.rows)[1:]), jnp.asarray(self.rows).dtype))

    def add_to(self, table: Any) -> jax.Array:
        """Returns `table` with these rows added.

        Raises:
            ValueError: The shape of the table differs from `num_rows` and the shape of the rows.
            TypeError: The dtype of the table cannot represent the rows without loss.
        """
        self._check("value")
        table, rows = jnp.asarray(table), jnp.asarray(self.rows)
        if table.shape != (self.num_rows, *rows.shape[1:]):
            raise ValueError(
                f"The table is {dtype_and_shape(table)}, and these are rows {dtype_and_shape(rows)} of a table of "
                f"{self.num_rows} rows. Pass the table of these rows."
            )
        if not jnp.can_cast(rows.dtype, table.dtype, "same_kind"):
            raise TypeError(
                f"The table is {dtype_and_shape(table)} and cannot hold rows {dtype_and_shape(rows)} without loss. Cast the "
                "rows."
            )
        return table.at[jnp.asarray(self.indices)].add(rows.astype(table.dtype))

    def _check(self, name: str) -> None:
        """Raises ValueError if there is not one index per row or one is out of range, TypeError if one is not an integer."""
        check_value(f"{name}.rows", self.rows)
        check_value(f"{name}.indices", self.indices)
        rows, indices = jnp.asarray(self.rows), jnp.asarray(self.indices)
        if not rows.ndim or indices.shape != rows.shape[:1]:
            raise ValueError(
                f"{name} is RowSlices with rows {dtype_and_shape(rows)} and indices {dtype_and_shape(indices)}: it needs one "
                "index per row."
            )
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise TypeError(f"{name} is RowSlices with indices {dtype_and_shape(indices)}: indices must be integers.")
        if isinstance(indices, core.Tracer) or not indices.size or not indices.is_fully_addressable:
            return
        least, greatest = int(indices.min()), int(indices.max())
        if least < 0 or greatest >= self.num_rows:
            raise ValueError(
                f"{name} is RowSlices of a table of {self.num_rows} rows, with indices from {least} to {greatest}: indices "
                f"must be from 0 to {self.num_rows - 1}."
            )


def is_row_slices(node: object) -> bool:
    """Returns whether `node` is a `RowSlices`."""
    return isinstance(node, RowSlices)
