"""Changes the copy of an array that one device holds, as defective memory does."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def bits_per_element(dtype):
    """Returns the number of bits of an element that carry its value."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return 1
    for info in (ml_dtypes.iinfo, ml_dtypes.finfo):
        try:
            return info(dtype).bits
        except ValueError:
            pass
    return 8 * dtype.itemsize


def flip(element=0, bit=0):
    """Returns a function that flips one bit of one element of an array in place."""

    def change(block):
        of_elements = block.reshape(-1).view(np.uint8).reshape(block.size, -1)
        of_elements[element, bit // 8] ^= np.uint8(1 << (bit % 8))

    return change


def corrupt(x, device, change):
    """Returns `x` with `change` applied to the copy on `device`; the other devices keep their copies."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(corrupt(jax.random.key_data(x), device, change), impl=jax.random.key_impl(x))
    blocks = []
    for shard in x.addressable_shards:
        block = np.array(shard.data)
        if shard.device == device:
            change(block)
        memory = jax.sharding.SingleDeviceSharding(shard.device, memory_kind=x.sharding.memory_kind)
        blocks.append(jax.device_put(block, memory))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks)


def corrupt_leaf(tree, number, device, change=None):
    """Returns `tree` with one flipped bit in the copy of its leaf `number` on `device`."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves[number] = corrupt(leaves[number], device, change or flip())
    return treedef.unflatten(leaves)
