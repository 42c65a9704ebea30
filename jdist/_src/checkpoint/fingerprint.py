"""A number that tells arrays apart by their bits, however they lie on devices.

The words of an array, each times an odd number of its place, are added up modulo 2**32. That is exact in any order, so the
same array has the same fingerprint over any number of devices and processes, and no single bit can change without it.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdist._src.devices.mesh import HOST_MEMORY
from jdist._src.values.arrays import is_on_mesh, mesh_of

_SPREAD = np.uint32(0x9E3779B1)
_WORD = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}


def fingerprints(arrays: Sequence[Any]) -> list[int]:
    """The fingerprint of each array, computed where it lies.

    Example:
        >>> fingerprints([np.float32([1, 2]), np.float32([2, 1])])
        [2139095040, 2810183680]
    """
    groups: dict[Any, list[int]] = {}
    for number, x in enumerate(arrays):
        groups.setdefault(_place_of(x, number), []).append(number)
    found = [0] * len(arrays)
    for numbers in groups.values():
        for number, one in zip(numbers, _of_group([arrays[number] for number in numbers]), strict=True):
            found[number] = int(one)
    return found


def _place_of(x: Any, number: int) -> Any:
    """Arrays of one place are looked at by one program. Those in the memory of the host may be too large for the devices."""
    if not isinstance(x, jax.Array):
        return None
    return number if _is_on_host(x) else mesh_of(x) if is_on_mesh(x) else x.sharding


def _of_group(arrays: Sequence[Any]) -> list[jax.Array]:
    arrays = [jax.device_put(x, x.sharding.with_memory_kind("device")) if _is_on_host(x) else _cut(x) for x in arrays]
    numbers = _fingerprints(arrays)
    jax.block_until_ready(numbers)
    return numbers


def _cut(x: Any) -> Any:
    """`x`; of numpy's long words the halves, as JAX has only these."""
    is_long = isinstance(x, np.ndarray) and x.dtype.itemsize >= 8 and x.dtype.kind in "iufc"
    return np.ascontiguousarray(x).reshape(-1).view(np.uint32) if is_long else x


def _is_on_host(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.sharding.memory_kind == HOST_MEMORY


@jax.jit
def _fingerprints(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [_fingerprint(_words(x)) for x in arrays]


def _fingerprint(words: jax.Array) -> jax.Array:
    strides = [math.prod(words.shape[dim + 1 :]) % 2**32 for dim in range(words.ndim)]
    # Not one iota over all words: to shape it like the array would gather an array that is split.
    counts = [lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(s) for dim, s in enumerate(strides)]
    place = sum(counts, np.uint32(0))
    return jnp.sum(words * (place * _SPREAD | np.uint32(1)), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of `x` as whole numbers, in another dim if one element has several."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag], -1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = (jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo)(x.dtype).bits
    if bits < 8:
        x, bits = x.astype(jnp.float32), 32  # exact, for so few bits
    return lax.bitcast_convert_type(x, _WORD[bits]).astype(jnp.uint32)
