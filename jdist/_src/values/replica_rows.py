"""Rows: `[replica, ...]` arrays, sharded along their first dimension. Their shards, and reductions by programs of the host.

Where the replicas hold arrays of different shapes, each row is padded with zeros to the largest, and `shapes` holds the shape
of each row without padding.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jdist._src.devices.dispatch import is_bounded, wait_for_results
from jdist._src.devices.mesh import (
    Replicas,
    has_model_axes,
    local_mesh_devices,
    num_replica_devices,
    replica_axes,
    spans_devices,
)
from jdist._src.values.array_checks import is_on_mesh, mesh_of
from jdist._src.values.reduce_op import ReduceOp

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[Shape, ...]  # one shape per replica


def local_shards(x: jax.Array) -> list[jax.Array]:
    """Returns the shard of each replica of this process of an array on a mesh, in the order of the replicas.

    Where a replica is a group of devices, its shard is an array on these devices.
    """
    mesh = mesh_of(x)
    if spans_devices(mesh):
        return [x]
    by_device = {shard.device: shard.data for shard in x.addressable_shards}
    if not has_model_axes(mesh):
        return [by_device[device] for device in local_mesh_devices(mesh).values()]
    dims, axes = PartitionSpec(*x.sharding.spec), replica_axes(mesh)  # pyright: ignore[reportAttributeAccessIssue]
    is_split = bool(dims) and dims[0] in (axes, axes[-1])
    shape = (x.shape[0] // num_replica_devices(mesh), *x.shape[1:]) if is_split else x.shape
    spec = PartitionSpec(None, *dims[1:]) if is_split else dims
    return [_on_group(mesh, number, shape, spec, by_device) for number in Replicas.from_mesh(mesh).local_devices]


def _row_on_group(x: jax.Array, number: int) -> jax.Array:
    """Returns the row of a replica that is a group of devices, on these devices."""
    mesh, dims = mesh_of(x), PartitionSpec(*x.sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
    blocks: dict[jax.Device, jax.Array] = {}
    for shard in x.addressable_shards:
        start, stop, _ = shard.index[0].indices(len(x))
        if start <= number < stop:
            blocks[shard.device] = shard.data[number - start]
    group = number // Replicas(mesh, len(x)).max_per_device
    return _on_group(mesh, group, x.shape[1:], PartitionSpec(*dims[1:]), blocks)


def _on_group(
    mesh: Mesh, number: int, shape: Shape, spec: PartitionSpec, by_device: Mapping[jax.Device, jax.Array]
) -> jax.Array:
    """Returns an array on a group of devices of `mesh`, given the block of each device of this process."""
    num_axes = len(replica_axes(mesh))
    grid = mesh.devices.reshape(-1, *mesh.devices.shape[num_axes:])[number]
    sharding = NamedSharding(Mesh(grid, mesh.axis_names[num_axes:], axis_types=mesh.axis_types[num_axes:]), spec)
    blocks = [by_device[device] for device in grid.flat if device in by_device]
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)


def local_rows(x: Any, shapes: Shapes | None = None) -> list[Any]:
    """Returns the rows that this process holds, in the order of the replicas, each `[...]` without padding."""
    if is_on_mesh(x) and spans_devices(mesh_of(x)):
        numbers, rows = [0], [_first(x, None)]
    elif is_on_mesh(x) and has_model_axes(mesh_of(x)):
        numbers = Replicas(mesh_of(x), len(x)).local_devices
        rows = [_row_on_group(x, number) for number in numbers]
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
    """Returns the maximum or minimum, NaN where an element is NaN.

    XLA's CPU programs drop NaN, also in one array: https://github.com/openxla/xla/issues/21461
    """
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
