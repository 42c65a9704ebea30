"""Numbers of less than 8 bits, and of 8 bits, as bytes, for file formats without their dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def byte_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Returns the dtype of bytes with which numbers of a dtype are stored; None for larger numbers, and for booleans.

    Example:
        >>> byte_dtype(jnp.int4), byte_dtype(jnp.float8_e4m3), byte_dtype(jnp.float32)
        (dtype('int8'), dtype('uint8'), None)
    """
    if np.dtype(dtype).itemsize > 1 or dtype == np.bool_:
        return None
    return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)


def to_bytes(x: Any) -> Any:
    """Returns an array as bytes on the same devices or on the host: integers by their values, floats by their bits.

    Example:
        >>> to_bytes(np.asarray([-1, 3], jnp.int4)), to_bytes(np.asarray([1], jnp.float8_e4m3))
        (array([-1,  3], dtype=int8), array([56], dtype=uint8))
    """
    dtype = byte_dtype(x.dtype) or x.dtype
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(dtype)
    return x.view(dtype) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, dtype)


def from_bytes(x: Any, dtype: Any) -> Any:
    """Returns the array of a dtype that `to_bytes` has converted, on the same devices or on the host.

    Example:
        >>> float(from_bytes(to_bytes(np.asarray([1.5], jnp.float8_e4m3)), jnp.float8_e4m3)[0])
        1.5
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if isinstance(x, np.ndarray):
        return x.astype(dtype) if is_integer else x.view(dtype)
    return jax.device_put(x.astype(dtype) if is_integer else lax.bitcast_convert_type(x, dtype), x.sharding)
