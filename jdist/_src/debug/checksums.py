"""Checksums of the copies of arrays: one number per array and device, computed on the devices that hold the copies."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._src.values.array_bits import bit_words, word_positions
from jdist._src.values.array_copies import to_device_memory


def checksum(x: jax.Array) -> jax.Array:
    """Returns a checksum of the bits of `x`, a uint32 scalar; 0 for an empty array.

    Each word is mixed with its position before the sum modulo 2**32, so that changes of several words do not cancel: with
    words that are multiplied by odd numbers, the sum does not change if two sign bits are flipped.

    Source:
        The mixing function is the finalizer of A. Appleby's MurmurHash3, a bijection of 32-bit words.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    words = bit_words(x)
    return jnp.sum(_mixed(words ^ _mixed(word_positions(words.shape))), dtype=jnp.uint32)


def _mixed(words: jax.Array) -> jax.Array:
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> shift)) * np.uint32(multiplier)
    return words ^ (words >> 16)


@functools.lru_cache(maxsize=256)
def checksum_program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., jax.Array]:
    """Returns a program from arrays over `mesh` with these partition specs to their checksums.

    The result is replicated, `[device, array]` uint32, with the devices in the order of the mesh: 4 bytes per array and
    device are sent.
    """

    def checksums(*blocks: jax.Array) -> jax.Array:
        local = jnp.stack([checksum(to_device_memory(block)) for block in blocks])
        return lax.all_gather(local, mesh.axis_names)

    return jax.jit(jax.shard_map(checksums, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))


def on_named_mesh(x: jax.Array) -> jax.Array:
    """Returns `x`; if its sharding does not have a mesh, an array of the same blocks over a mesh of the same devices."""
    if isinstance(x.sharding, NamedSharding):
        return x
    devices = sorted(x.sharding.device_set, key=lambda device: device.id)
    blocks = [shard.data.reshape(shard.data.shape or (1,)) for shard in x.addressable_shards]
    shape = (len(devices) * blocks[0].shape[0], *blocks[0].shape[1:])
    sharding = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)


@functools.lru_cache(maxsize=1024)
def devices_of_parts(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[list[jax.Device]]:
    """Returns, for each part of an array of this shape that several devices hold, these devices."""
    parts: dict[Any, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        parts.setdefault(str(index), []).append(device)
    return [devices for devices in parts.values() if len(devices) > 1]
