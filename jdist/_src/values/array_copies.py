"""Copies of arrays: to a sharding, to the host, and for programs that donate their arguments."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.sharding import NamedSharding, Sharding

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import HOST_MEMORY, has_model_axes, replicated_sharding, spans_devices
from jdist._src.values.array_checks import is_device_array, is_in_host_memory, is_on_mesh, mesh_of
from jdist._src.values.remote_array import materialize

T = TypeVar("T")


def to_device_memory(x: Any) -> Any:
    """Returns `x`, which may be in host memory, in device memory with the same sharding. It may be traced."""
    return jax.device_put(x, jax.memory.Space.Device) if is_in_host_memory(x) else x


def device_put_copy(x: Any, sharding: Sharding) -> jax.Array:
    """Returns a copy of `x` with this sharding. A copy, because a step donates its state, and the caller may still use `x`."""
    if isinstance(x, core.Tracer) or jax_compat.is_tracing():
        return x
    if isinstance(x, jax.Array) and (sharding.is_fully_addressable or not x.is_fully_addressable):
        if x.sharding.memory_kind != sharding.memory_kind and isinstance(x.sharding, NamedSharding):
            x = jax.device_put(x, x.sharding.with_memory_kind(sharding.memory_kind or "device"))
        is_weak = jax.typeof(x).weak_type if not jnp.issubdtype(x.dtype, jax.dtypes.extended) else False
        # The state that a step returns is strongly typed: a weak type would trace the second step again.
        return jax.device_put(lax.convert_element_type(x, x.dtype) if is_weak else x.copy(), sharding)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = device_put_copy(np.asarray(jax.random.key_data(x)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.array(x)  # unlike a Python number, an array is not weakly typed
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def to_numpy(x: jax.Array) -> np.ndarray:
    """Returns the value of an array on the host.

    After `np.asarray(x)`, the array would hold this copy for its lifetime: https://github.com/jax-ml/jax/issues/26216

    Example:
        >>> x = jdist.ShardedStrategy().put(np.arange(8))
        >>> to_numpy(x), x._npy_value
        (array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32), None)
    """
    shards = [shard.data for shard in x.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards))


def read_replicated(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Returns the values of replicated arrays. One shard of each is read, in half the time of `jax.device_get`."""
    shards = [x.addressable_data(0) for x in materialize(arrays)]
    if not all(device.platform == "cpu" for x in shards[:1] for device in x.devices()):
        for shard in shards:  # a copy from a GPU takes 0.3 ms, mostly a wait: one wait for all of them
            shard.copy_to_host_async()
    return list(map(np.asarray, shards))


def copy_arrays(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns copies of arrays, with the same shardings."""
    if all(x.is_fully_addressable for x in arrays):
        return jax.device_put(list(arrays), [x.sharding for x in arrays], may_alias=False)
    return [x.copy() for x in arrays]  # `jax.device_put` does not copy an array of several processes


def copy_tree(tree: PyTree) -> PyTree:
    """Returns `tree` with a copy of each array on devices, with the same sharding."""
    leaves, treedef = jax.tree.flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if is_device_array(leaf)]
    for i, leaf in zip(indices, copy_arrays([leaves[i] for i in indices]), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def call_donating(fn: Callable[..., T], donated: PyTree, *args: Any) -> T:
    """Returns `fn(donated, *args)`, which donates its first argument, or a copy of it, if something else uses its memory."""
    try:
        return fn(donated, *args)
    except Exception as error:
        if not jax_compat.is_shared_memory_error(error):
            raise
    return fn(copy_tree(donated), *args)


def fully_replicated(x: jax.Array) -> jax.Array:
    """Returns `x` replicated in device memory; `x` itself if one replica spans several devices of its mesh."""
    x = materialize(x)
    if not is_on_mesh(x) or spans_devices(mesh_of(x)) or has_model_axes(mesh_of(x)):
        return x
    if x.is_fully_replicated and x.sharding.memory_kind != HOST_MEMORY:
        return x
    return jax.device_put(x, replicated_sharding(mesh_of(x)))
