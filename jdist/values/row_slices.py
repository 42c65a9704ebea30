"""`RowSlices`: a table of which only some rows are not zero."""

import dataclasses
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jdist._tree import spec


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
        if np.shape(table) != (self.num_rows, *np.shape(self.rows)[1:]):
            raise ValueError(
                f"A table of {spec(table)} has no place for {self.num_rows} rows of {list(np.shape(self.rows)[1:])}: "
                f"these are {self}."
            )
        return jnp.asarray(table).at[self.indices].add(self.rows)

    def check(self, name: str) -> None:
        """Raises ValueError if there are not as many indices as rows; TypeError if they are no integers."""
        rows, indices = np.shape(self.rows), np.shape(self.indices)
        if not rows or indices != rows[:1]:
            raise ValueError(
                f"{name} is RowSlices with rows {spec(self.rows)} and indices {spec(self.indices)}: there is one index a row."
            )
        if not jnp.issubdtype(jnp.asarray(self.indices).dtype, jnp.integer):
            raise TypeError(f"{name} is RowSlices with indices of {spec(self.indices)}: rows are counted in integers.")


def is_sparse(node: object) -> bool:
    """Whether `node` is rows of a table."""
    return isinstance(node, RowSlices)
