"""Arrays on the devices of a mesh: how they get there, and what the host makes of one row a replica.

*Rows* are `[replica, ...]` arrays, split on their first dimension. Where the replicas hold arrays of different shapes, each
row is filled up with zeros to the largest, and `shapes` says what each one's true shape is.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.sharding import Mesh, NamedSharding, Sharding

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.devices.dispatch import is_bounded, wait_for_results
from jdist._src.devices.mesh import HOST_MEMORY, Replicas, local_mesh_devices, replicated_sharding, spans_devices
from jdist._src.values.reduce_op import ReduceOp

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[Shape, ...]  # a shape a replica


def is_device_array(leaf: object) -> bool:
    """Whether `leaf` is an array on devices, and not a host value or a tracer."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, core.Tracer)


def is_on_mesh(leaf: object) -> bool:
    """Whether `leaf` is an array that a strategy placed."""
    return is_device_array(leaf) and isinstance(leaf.sharding, NamedSharding)  # pyright: ignore[reportAttributeAccessIssue]


def check_array(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is no number or array of numbers."""
    if is_traceable(leaf) or isinstance(leaf, int):
        return
    if isinstance(leaf, np.ma.MaskedArray):  # numpy would drop the mask silently
        raise TypeError(f"{name} is a masked array, and devices hold no masks. Fill it: `x.filled(0)`.")
    if np.asarray(leaf).dtype.kind in "USOmM":
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}: devices hold numbers, booleans and random keys. Keep it on the host."
        )


def check_not_deleted(name: str, leaf: Any) -> None:
    """Raises ValueError if the memory of `leaf` was given away, or freed."""
    if is_device_array(leaf) and leaf.is_deleted():
        raise ValueError(
            f"{name} ({dtype_and_shape(leaf)}) has no value any more: a step took its memory over, or `delete` freed it. Pass the state "
            "that the last step or `fit` returned."
        )


def check_range(name: str, leaf: Any, kept: Any = None) -> None:
    """Raises ValueError if `leaf`, on the host, holds a whole number that does not fit the dtype `kept`, by default JAX's."""
    if is_traceable(leaf):
        return
    is_python = type(leaf) is int  # of any number of bits
    array = np.asarray(leaf, object if is_python else None)
    dtype = np.dtype(np.int64) if is_python else array.dtype
    if not array.size or dtype.kind not in "iu":
        return
    kept = jax.dtypes.canonicalize_dtype(dtype) if kept is None else kept
    limits = jnp.iinfo(kept)
    for extreme in () if kept == array.dtype else (array.min(), array.max()):
        if not limits.min <= extreme <= limits.max:
            raise ValueError(
                f"{name} holds {extreme}, which {kept} does not. Make the numbers smaller, or let JAX keep 64 bits: "
                '`jax.config.update("jax_enable_x64", True)`.'
            )


def check_not_leaked(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is a traced value, and no function is being traced."""
    if isinstance(leaf, core.Tracer) and not jax_compat.is_tracing():
        raise TypeError(
            f"{name} is a traced value ({dtype_and_shape(leaf)}) from a function that is no longer traced. Return it from that function, "
            "and use what the call returns."
        )


def is_jit_argument(leaf: Any) -> bool:
    """Whether `jax.jit` takes `leaf` without an error about a leaked tracer and without cutting a whole number."""
    try:
        check_not_leaked("", leaf)
        check_range("", leaf)
    except (TypeError, ValueError):
        return False
    return True


def check_value(name: str, leaf: Any) -> None:
    """Raises TypeError if `leaf` is no number or array of numbers, ValueError if it holds a whole number that JAX would cut."""
    check_not_leaked(name, leaf)
    check_array(name, leaf)
    check_range(name, leaf)


def is_traceable(leaf: Any) -> bool:
    """Whether JAX takes `leaf` as an array of its own, without a conversion on the host."""
    return isinstance(leaf, jax.Array) or hasattr(leaf, "__jax_array__")


def host_leaves(tree: PyTree) -> list[Any]:
    """The leaves that are not arrays on devices. Every call of a program asks, so no Python code runs per array."""
    leaves = jax.tree.leaves(tree)
    if _ARRAY_CLASSES.issuperset(map(type, leaves)):
        return []
    _ARRAY_CLASSES.update(type(leaf) for leaf in leaves if is_device_array(leaf))
    return [leaf for leaf in leaves if type(leaf) not in _ARRAY_CLASSES]


_ARRAY_CLASSES: set[type] = set()  # of arrays on devices; JAX has no public name for them


def mesh_of(leaf: jax.Array) -> Mesh:
    """The devices of an array that a strategy placed, in the order of the replicas."""
    assert isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh)
    return leaf.sharding.mesh


def num_replicas_on(mesh: Mesh) -> int:
    """How many replicas hold a value that lies on `mesh`, if each device holds at most one."""
    return 1 if spans_devices(mesh) else mesh.size


def device_put_copy(x: Any, sharding: Sharding) -> jax.Array:
    """A copy of `x` that lies as `sharding` says: a step takes over the memory of its state, and `x` is the caller's."""
    if isinstance(x, core.Tracer) or jax_compat.is_tracing():
        return x
    if isinstance(x, jax.Array) and (sharding.is_fully_addressable or not x.is_fully_addressable):
        if x.sharding.memory_kind != sharding.memory_kind and isinstance(x.sharding, NamedSharding):
            x = jax.device_put(x, x.sharding.with_memory_kind(sharding.memory_kind or "device"))
        return jax.device_put(x.copy(), sharding)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = device_put_copy(np.asarray(jax.random.key_data(x)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.array(x)  # no dtype of its own that may change, as a Python number would have
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fully_replicated(x: jax.Array) -> jax.Array:
    """`x` whole on every device that a replica has to itself, wherever parts of it may lie."""
    if not is_on_mesh(x) or spans_devices(mesh_of(x)):
        return x
    everywhere = replicated_sharding(mesh_of(x))
    return x if x.is_fully_replicated and x.sharding.memory_kind != HOST_MEMORY else jax.device_put(x, everywhere)


def local_shards(x: jax.Array) -> list[jax.Array]:
    """What each replica of this process holds of an array on a mesh, in the order of the replicas."""
    if spans_devices(mesh_of(x)):
        return [x]
    held = {shard.device: shard.data for shard in x.addressable_shards}
    return [held[device] for device in local_mesh_devices(mesh_of(x)).values()]


def local_rows(x: Any, shapes: Shapes | None = None) -> list[Any]:
    """The rows that this process holds, in the order of the replicas, each `[...]` of its true shape."""
    if is_on_mesh(x) and spans_devices(mesh_of(x)):
        numbers, rows = [0], [_first(x, None)]
    elif is_on_mesh(x):
        numbers = Replicas(mesh_of(x), len(x)).local
        held = {shard.device: (shard.index[0].start or 0, shard.data) for shard in x.addressable_shards}
        rows = [_row(*held[device], number) for number, device in numbers.items()]
    else:  # made by hand, or traced: every row is here
        numbers, rows = range(len(x)), list(x)
    return rows if shapes is None else [row[_box(shapes[i])] for i, row in zip(numbers, rows, strict=True)]


def _row(start: int, block: jax.Array, number: int) -> jax.Array:
    return block.reshape(block.shape[1:]) if len(block) == 1 else block[number - start]


@functools.partial(jax.jit, static_argnums=(1, 2))
def repeat_rows(x: jax.Array, times: int, sharding: Sharding | None) -> jax.Array:
    """Rows of the same `x` for each of `times` replicas."""
    return _laid(jnp.broadcast_to(x[None], (times, *x.shape)), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def split_into_shares(x: jax.Array, times: int, sharding: Sharding | None) -> jax.Array:
    """Rows that add up to `x`: the same share each, the first ones with one more of what does not divide."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return _laid(jnp.broadcast_to((x / times).astype(x.dtype)[None], (times, *x.shape)), sharding)
    number = jnp.arange(times, dtype=x.dtype).reshape((times,) + (1,) * x.ndim)
    return _laid(x // times + (number < x % times), sharding)


def reduce_rows(
    op: ReduceOp, name: str, x: jax.Array, shapes: Shapes | None, dims: Shape, sharding: Sharding | None
) -> jax.Array:
    """`[replica, ...]` to `[...]`: reduced over the replicas, and over `dims` of each one's value.

    A mean is over elements, so that no replica counts for more than it holds. A replica that holds none of them counts
    for nothing.

    Raises:
        ValueError: The shapes do not fit together, or there is nothing to take the mean, greatest or least of.
    """
    true = shapes or (x.shape[1:],) * x.shape[0]
    left = {tuple(size for dim, size in enumerate(shape) if dim not in dims) for shape in true}
    if len(left) > 1:
        raise ValueError(
            f"{name} has the shapes {_listed(true)} on the replicas, which differ beyond the dimensions {list(dims)} that are "
            f"reduced. Reduce over those that differ too, as in `axis=0`, or join the values: `strategy.gather`."
        )
    count = sum(math.prod(shape[dim] for dim in dims) for shape in true)
    if not count and op is not ReduceOp.SUM:
        raise ValueError(f"{name} is empty on every replica, and nothing has no {op.name}.")
    return _landed(_reduce(x, op, shapes, dims, count, sharding), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _reduce(
    x: jax.Array, op: ReduceOp, shapes: Shapes | None, dims: Shape, count: int, sharding: Sharding | None
) -> jax.Array:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    # 16-bit floats are added up as float32, and so are integers for their mean; a sum of small ones is int32, as in numpy.
    wide = jnp.promote_types(x.dtype, jnp.float32) if inexact or op is ReduceOp.MEAN else None
    reduction = _EXTREMES.get(op) or functools.partial(jnp.sum, dtype=wide)
    if shapes is None:
        total = reduction(x, axis=(0, *(dim + 1 for dim in dims)))
    else:
        # Rows with no element have no greatest one; what is left of the others has one shape.
        used = [i for i, shape in enumerate(shapes) if op is ReduceOp.SUM or all(shape[dim] for dim in dims)]
        full = [x[i][_box(shapes[i])] for i in used]
        total = reduction(jnp.stack([reduction(row, axis=dims) for row in full]), axis=(0,))
    if op is ReduceOp.MEAN:
        total = total / count
    return _laid(total.astype(x.dtype) if inexact else total, sharding)


def _extreme(extreme: Callable[..., jax.Array], x: jax.Array, axis: Shape) -> jax.Array:
    """The greatest or the least; NaN where an element is. XLA's all-reduce between CPU devices would drop the NaN."""
    found = extreme(x, axis=axis)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return found
    return jnp.where(jnp.isnan(x).any(axis=axis), jnp.asarray(jnp.nan, x.dtype), found)


_EXTREMES = {ReduceOp.MAX: functools.partial(_extreme, jnp.max), ReduceOp.MIN: functools.partial(_extreme, jnp.min)}


def join_rows(name: str, x: jax.Array, shapes: Shapes | None, dim: int, sharding: Sharding | None) -> jax.Array:
    """The rows one after the other along `dim`: `[replica, ..., n, ...]` to `[..., replica * n, ...]`.

    Raises:
        ValueError: The rows differ along another dimension.
    """
    if shapes is not None and len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        raise ValueError(
            f"{name} has the shapes {_listed(shapes)} on the replicas, and what is joined along dimension {dim} has the same "
            "sizes along all others. Join along the one that differs, or make the others alike."
        )
    return _landed(_join(x, shapes, dim, sharding), sharding)


def first_row(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    """`[replica, ...]` to `[...]`: what replica 0 holds."""
    return _landed(_first(x, sharding), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _join(x: jax.Array, shapes: Shapes | None, dim: int, sharding: Sharding | None) -> jax.Array:
    if shapes is not None:
        return _laid(jnp.concatenate([x[i][_box(shape)] for i, shape in enumerate(shapes)], axis=dim), sharding)
    shape = (*x.shape[1 : dim + 1], x.shape[0] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return _laid(jnp.moveaxis(x, 0, dim).reshape(shape), sharding)


@functools.partial(jax.jit, static_argnums=1)
def _first(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    return _laid(x[0], sharding)


def _laid(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def _landed(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    if isinstance(sharding, NamedSharding) and is_bounded(sharding.mesh):  # pyright: ignore[reportArgumentType]
        wait_for_results(x)
    return x


def _box(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
