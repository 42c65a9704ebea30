"""Tables from which a step reads few rows, such as embeddings."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jdist._src.core.tree import dtype_and_shape
from jdist._src.jaxpr.marks import LOOKUP_MARK
from jdist._src.values.array_checks import check_array


def lookup(table: jax.Array, ids: Any) -> jax.Array:
    """Returns rows of a table: `table[ids]`.

    Under `jdist.ParameterServerStrategy` a worker reads only these rows, and sends gradients of these rows, with repeated rows
    added. The servers update only them, with their optimizer state: Adam is then *lazy*, because the moments of the other rows
    do not decay. Under other strategies it is an ordinary index.

    Args:
        table: `[row, ...]`.
        ids: Integers `[...]`, computed from the inputs of the step. As in `table[ids]`, negative ones count from the last row,
            and ids out of range are clipped.

    Returns:
        The rows, `[*ids.shape, ...]`.

    Raises:
        TypeError: `ids` are not integers.
        ValueError: `table` is a scalar.

    Example:
        >>> jdist.lookup(jnp.asarray([[1, 2], [3, 4], [5, 6]]), jnp.asarray([2, 0])).tolist()
        [[5, 6], [1, 2]]
    """
    check_array("table", table)
    check_array("ids", ids)
    table, ids = jnp.asarray(table), jnp.asarray(ids)
    if not table.ndim:
        raise ValueError(f"`table` is {dtype_and_shape(table)}, and a table is [row, ...].")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"`ids` must contain integers, the numbers of rows, got {dtype_and_shape(ids)}.")
    ids = ids if ids.dtype.itemsize >= 4 else ids.astype(jnp.int32)  # the number of rows may exceed a small dtype
    return checkpoint_name(table, LOOKUP_MARK).at[ids].get(mode="clip")
