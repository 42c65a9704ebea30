"""Fingerprints of arrays: a 32-bit checksum of the bits, which does not depend on the sharding.

The bits of an array, as 32-bit words, are each multiplied by an odd number that depends on the position, and added up modulo
2**32. This sum is exact in any order, so an array has the same fingerprint on any number of devices and processes, and every
change of a single bit changes it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.values.array_bits import bit_words, word_positions
from jdist._src.values.array_checks import is_in_host_memory, is_on_mesh, mesh_of
from jdist._src.values.array_copies import to_device_memory

_MULTIPLIER = np.uint32(0x9E3779B1)


def fingerprints(arrays: Sequence[Any]) -> list[int]:
    """Returns the fingerprint of each array, computed on the devices that hold it.

    Example:
        >>> fingerprints([np.float32([1, 2]), np.float32([2, 1])])
        [2139095040, 2810183680]
    """
    groups: dict[Any, list[int]] = {}
    for index, x in enumerate(arrays):
        groups.setdefault(_group_key(x, index), []).append(index)
    sums = [0] * len(arrays)
    for indices in groups.values():
        group_sums = _fingerprints([_device_words(arrays[index]) for index in indices])
        for index, group_sum in zip(indices, jax.device_get(group_sums), strict=True):
            sums[index] = int(group_sum)
    return sums


def _group_key(x: Any, index: int) -> Any:
    """Returns a key that is equal for arrays whose fingerprints one program computes: those on the same devices.

    An array in host memory has its own program, because several of them may be too large for the memory of the devices.
    """
    if not isinstance(x, jax.Array):
        return None
    return index if is_in_host_memory(x) else mesh_of(x) if is_on_mesh(x) else x.sharding


def _device_words(x: Any) -> Any:
    """Returns `x` in device memory. A numpy array of 64-bit numbers becomes 32-bit words: JAX may disable 64-bit types."""
    if is_in_host_memory(x):
        return to_device_memory(x)
    is_wide = isinstance(x, np.ndarray) and x.dtype.itemsize >= 8 and x.dtype.kind in "iufc"
    return np.ascontiguousarray(x).reshape(-1).view(np.uint32) if is_wide else x


@jax.jit
def _fingerprints(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [_weighted_sum(bit_words(x)) for x in arrays]


def _weighted_sum(words: jax.Array) -> jax.Array:
    weights = word_positions(words.shape) * _MULTIPLIER | np.uint32(1)
    return jnp.sum(words * weights, dtype=jnp.uint32)
