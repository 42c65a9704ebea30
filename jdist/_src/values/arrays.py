"""Arrays on the devices of a mesh: checks, placement, and operations of the host on rows.

*Rows* are `[replica, ...]` arrays, sharded along their first dimension. Where the replicas hold arrays of different shapes,
each row is padded with zeros to the largest, and `shapes` holds the shape of each row without padding.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.sharding import Mesh, NamedSharding, Sharding

from jdist._src.core import jax_compat
from jdist._src.core.nn_modules import is_nnx_object
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.devices.dispatch import is_bounded, wait_for_results
from jdist._src.devices.mesh import HOST_MEMORY, Replicas, local_mesh_devices, replicated_sharding, spans_devices
from jdist._src.values.reduce_op import ReduceOp
from jdist._src.values.remote_array import RemoteArray, materialize

T = TypeVar("T")
Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[Shape, ...]  # one shape per replica


def is_device_array(leaf: object) -> bool:
    """Returns whether `leaf` is an array on devices, and not a host value or a tracer."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, core.Tracer)


def is_on_mesh(leaf: object) -> bool:
    """Returns whether `leaf` is an array that a strategy placed on its mesh."""
    return is_device_array(leaf) and isinstance(leaf.sharding, NamedSharding)  # pyright: ignore[reportAttributeAccessIssue]


def check_array(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is not a number or an array of numbers."""
    check_not_ref(name, leaf)
    if is_traceable(leaf) or isinstance(leaf, int):
        return
    if isinstance(leaf, np.ma.MaskedArray):  # numpy would drop the mask silently
        raise TypeError(f"{name} is a masked array, which JAX does not support. Fill it: `x.filled(0)`.")
    if is_nnx_object(leaf):
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}, an nnx object that is not a pytree. Remove `pytree=False` from its class, or "
            "separate its arrays: `nnx.split(module)`."
        )
    if callable(leaf):
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}, a function: devices hold numbers, booleans and random keys. Separate arrays "
            "and functions: `eqx.partition(tree, eqx.is_array)` of equinox, an `nnx` or equinox module, or a static field of a "
            "dataclass, `jax.tree_util.register_dataclass` with `meta_fields`."
        )
    if np.asarray(leaf).dtype.kind in "USOmM":
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}: devices hold numbers, booleans and random keys. Store it on the host."
        )


def check_not_ref(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is a mutable reference."""
    if isinstance(leaf, jax.Ref):
        raise TypeError(
            f"{name} is a `jax.Ref`, which has no placement on several devices. Pass its value, `ref[...]`."
        )


def check_not_deleted(name: str, leaf: Any) -> None:
    """Raises ValueError if `leaf` was donated to a step, or deleted."""
    if is_device_array(leaf) and leaf.is_deleted():
        raise ValueError(
            f"{name} ({dtype_and_shape(leaf)}) was deleted: it was donated to a step, or `delete` was called. Pass the state "
            "that the last step or `fit` returned. A step with `donate=False` leaves the old state valid."
        )


def check_range(name: str, leaf: Any, to_dtype: Any = None) -> None:
    """Raises ValueError if `leaf`, on the host, holds an integer that is out of the range of `to_dtype`, by default JAX's."""
    check_not_ref(name, leaf)
    if is_traceable(leaf):
        return
    is_python = type(leaf) is int  # of any number of bits
    array = np.asarray(leaf, object if is_python else None)
    dtype = np.dtype(np.int64) if is_python else array.dtype
    if not array.size or dtype.kind not in "iu":
        return
    to_dtype = jax.dtypes.canonicalize_dtype(dtype) if to_dtype is None else to_dtype
    limits = jnp.iinfo(to_dtype)
    for extreme in () if to_dtype == array.dtype else (array.min(), array.max()):
        if not limits.min <= extreme <= limits.max:
            raise ValueError(
                f"{name} holds {extreme}, which is out of the range of {to_dtype}. Use smaller numbers, or enable 64-bit "
                'types: `jax.config.update("jax_enable_x64", True)`.'
            )


def check_not_leaked(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is a leaked tracer: a traced value while no function is being traced."""
    if isinstance(leaf, core.Tracer) and not jax_compat.is_tracing():
        raise TypeError(
            f"{name} is a traced value ({dtype_and_shape(leaf)}) from a function that is no longer traced. Return it from that "
            "function, and use the result of the call."
        )


def is_jit_argument(leaf: Any) -> bool:
    """Returns whether `leaf` can be passed to `jax.jit`: it is not a leaked tracer, and no integer would be truncated."""
    try:
        check_not_leaked("", leaf)
        check_range("", leaf)
    except (TypeError, ValueError):
        return False
    return True


def check_value(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is not a number or an array of numbers, ValueError if JAX would truncate an integer in it."""
    check_not_leaked(name, leaf)
    check_array(name, leaf)
    check_range(name, leaf)


def is_traceable(leaf: Any) -> bool:
    """Returns whether JAX accepts `leaf` as an array without a conversion on the host."""
    return isinstance(leaf, jax.Array) or hasattr(leaf, "__jax_array__")


def host_leaves(tree: PyTree) -> list[Any]:
    """Returns the leaves that are not arrays on devices. Runs at every call of a program: without a loop over arrays."""
    leaves = jax.tree.leaves(tree)
    if _ARRAY_CLASSES.issuperset(map(type, leaves)):
        return []
    _ARRAY_CLASSES.update(type(leaf) for leaf in leaves if is_device_array(leaf) or isinstance(leaf, RemoteArray))
    return [leaf for leaf in leaves if type(leaf) not in _ARRAY_CLASSES]


_ARRAY_CLASSES: set[type] = set()  # of arrays on devices, which JAX does not export, and on other machines


def mesh_of(leaf: jax.Array) -> Mesh:
    """Returns the mesh of an array that a strategy placed; its devices are in the order of the replicas."""
    assert isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh)
    return leaf.sharding.mesh


def device_put_copy(x: Any, sharding: Sharding) -> jax.Array:
    """Returns a copy of `x` with this sharding. A copy, because a step donates its state, and the caller may still use `x`."""
    if isinstance(x, core.Tracer) or jax_compat.is_tracing():
        return x
    if isinstance(x, jax.Array) and (sharding.is_fully_addressable or not x.is_fully_addressable):
        if x.sharding.memory_kind != sharding.memory_kind and isinstance(x.sharding, NamedSharding):
            x = jax.device_put(x, x.sharding.with_memory_kind(sharding.memory_kind or "device"))
        return jax.device_put(x.copy(), sharding)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = device_put_copy(np.asarray(jax.random.key_data(x)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.array(x)  # unlike a Python number, an array is not weakly typed
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def to_numpy(x: jax.Array) -> np.ndarray:
    """Returns the value of an array on the host. After `np.asarray(x)`, the array would hold this copy for its lifetime.

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
        for shard in shards:  # a copy from a GPU takes 0.3 ms, most of which is a wait: one wait for all of them
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
    """Returns `x` replicated in device memory; `x` itself if one replica spans the devices of its mesh."""
    x = materialize(x)
    if not is_on_mesh(x) or spans_devices(mesh_of(x)):
        return x
    if x.is_fully_replicated and x.sharding.memory_kind != HOST_MEMORY:
        return x
    return jax.device_put(x, replicated_sharding(mesh_of(x)))


def local_shards(x: jax.Array) -> list[jax.Array]:
    """Returns the shard of each replica of this process of an array on a mesh, in the order of the replicas."""
    if spans_devices(mesh_of(x)):
        return [x]
    by_device = {shard.device: shard.data for shard in x.addressable_shards}
    return [by_device[device] for device in local_mesh_devices(mesh_of(x)).values()]


def local_rows(x: Any, shapes: Shapes | None = None) -> list[Any]:
    """Returns the rows that this process holds, in the order of the replicas, each `[...]` without padding."""
    if is_on_mesh(x) and spans_devices(mesh_of(x)):
        numbers, rows = [0], [_first(x, None)]
    elif is_on_mesh(x):
        numbers = Replicas(mesh_of(x), len(x)).local_devices
        by_device = {shard.device: (shard.index[0].start or 0, shard.data) for shard in x.addressable_shards}
        blocks = [(number, *by_device[device]) for number, device in numbers.items()]
        rows = [
            block.reshape(block.shape[1:]) if len(block) == 1 else block[number - start]
            for number, start, block in blocks
        ]
    else:  # a host array, or traced: this process has every row
        numbers, rows = range(len(x)), list(x)
    return rows if shapes is None else [row[_unpadded(shapes[i])] for i, row in zip(numbers, rows, strict=True)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def repeat_rows(x: jax.Array, times: int, sharding: Sharding | None) -> jax.Array:
    """Returns `x` repeated as rows of `times` replicas."""
    return _constrain(jnp.broadcast_to(x[None], (times, *x.shape)), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def split_into_shares(x: jax.Array, times: int, sharding: Sharding | None) -> jax.Array:
    """Returns rows of `times` replicas whose sum is `x`: equal shares; the first rows include the remainder of integers."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return _constrain(jnp.broadcast_to((x / times).astype(x.dtype)[None], (times, *x.shape)), sharding)
    number = jnp.arange(times, dtype=x.dtype).reshape((times,) + (1,) * x.ndim)
    return _constrain(x // times + (number < x % times), sharding)


def reduce_rows(
    op: ReduceOp, name: str, x: jax.Array, shapes: Shapes | None, dims: Shape, sharding: Sharding | None
) -> jax.Array:
    """Returns `[...]`, given `[replica, ...]`: reduced over the replicas, and over `dims` of each replica's value.

    A mean is over elements: a replica's weight is its number of elements, and a replica without elements has no effect.

    Raises:
        ValueError: The shapes differ in a dimension that is not reduced, or MEAN, MAX or MIN is computed without elements.
    """
    row_shapes = shapes or (x.shape[1:],) * x.shape[0]
    if len({tuple(size for dim, size in enumerate(shape) if dim not in dims) for shape in row_shapes}) > 1:
        raise ValueError(
            f"{name} has the shapes {_listed(row_shapes)} on the replicas, which also differ in dimensions other than the "
            f"reduced ones, {list(dims)}. Reduce over these too, as in `axis=0`, or concatenate the values: `strategy.gather`."
        )
    count = sum(math.prod(shape[dim] for dim in dims) for shape in row_shapes)
    if not count and op is not ReduceOp.SUM:
        raise ValueError(f"Cannot compute the {op.name} of {name}: it is empty on every replica.")
    return _wait_if_bounded(_reduce(x, op, shapes, dims, count, sharding), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _reduce(
    x: jax.Array, op: ReduceOp, shapes: Shapes | None, dims: Shape, count: int, sharding: Sharding | None
) -> jax.Array:
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    # Sums of 16-bit floats and means of integers are computed in float32; a sum of small integers is int32, as in numpy.
    sum_dtype = jnp.promote_types(x.dtype, jnp.float32) if is_inexact or op is ReduceOp.MEAN else None
    reduction = EXTREMES.get(op) or functools.partial(jnp.sum, dtype=sum_dtype)
    if shapes is None:
        total = reduction(x, axis=(0, *(dim + 1 for dim in dims)))
    else:
        # MAX and MIN of a row without elements are undefined. All other rows have one shape once `dims` are reduced.
        nonempty = [i for i, shape in enumerate(shapes) if op is ReduceOp.SUM or all(shape[dim] for dim in dims)]
        rows = [x[i][_unpadded(shapes[i])] for i in nonempty]
        total = reduction(jnp.stack([reduction(row, axis=dims) for row in rows]), axis=(0,))
    if op is ReduceOp.MEAN:
        total = total / count
    return _constrain(total.astype(x.dtype) if is_inexact else total, sharding)


def _extreme(extreme: Callable[..., jax.Array], x: jax.Array, axis: Shape) -> jax.Array:
    """Returns the maximum or minimum, NaN where an element is NaN: XLA's CPU programs drop NaN, also in one array."""
    result = extreme(x, axis=axis)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return result
    return jnp.where(jnp.isnan(x).any(axis=axis), jnp.asarray(jnp.nan, x.dtype), result)


EXTREMES = {ReduceOp.MAX: functools.partial(_extreme, jnp.max), ReduceOp.MIN: functools.partial(_extreme, jnp.min)}


def join_rows(name: str, x: jax.Array, shapes: Shapes | None, dim: int, sharding: Sharding | None) -> jax.Array:
    """Returns the rows concatenated along `dim`: `[..., replica * n, ...]`, given `[replica, ..., n, ...]`.

    Raises:
        ValueError: The rows differ along another dimension.
    """
    if shapes is not None and len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        raise ValueError(
            f"{name} has the shapes {_listed(shapes)} on the replicas, and arrays that are concatenated along dimension {dim} "
            "must have the same sizes in all others. Concatenate along the dimension that differs, or pad the others."
        )
    return _wait_if_bounded(_join(x, shapes, dim, sharding), sharding)


def first_row(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    """Returns the row of replica 0: `[...]`, given `[replica, ...]`."""
    return _wait_if_bounded(_first(x, sharding), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _join(x: jax.Array, shapes: Shapes | None, dim: int, sharding: Sharding | None) -> jax.Array:
    if shapes is not None:
        return _constrain(
            jnp.concatenate([x[i][_unpadded(shape)] for i, shape in enumerate(shapes)], axis=dim), sharding
        )
    shape = (*x.shape[1 : dim + 1], x.shape[0] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return _constrain(jnp.moveaxis(x, 0, dim).reshape(shape), sharding)


@functools.partial(jax.jit, static_argnums=1)
def _first(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    return _constrain(x[0], sharding)


def _constrain(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def _wait_if_bounded(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    if isinstance(sharding, NamedSharding) and is_bounded(sharding.mesh):  # pyright: ignore[reportArgumentType]
        wait_for_results(x)
    return x


def _unpadded(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
