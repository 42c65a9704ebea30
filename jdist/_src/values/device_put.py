"""Places trees on the devices of a mesh, and checks that values can be placed there."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import Mesh, NamedSharding, Sharding

from jdist._src.core import jax_compat
from jdist._src.core.nn_modules import from_array_tree, to_array_tree
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, one_line, short_line
from jdist._src.devices.mesh import Replicas
from jdist._src.devices.topology import is_topology_device
from jdist._src.values.aggregation import VariableAggregation, check_mean
from jdist._src.values.array_checks import check_not_deleted, check_value, is_on_mesh
from jdist._src.values.array_copies import device_put_copy
from jdist._src.values.base import DistributedValues, is_distributed, named_values
from jdist._src.values.batch_layout import BatchLayout
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.process_checks import check_same_on_processes, exchange_rows, put_local_rows
from jdist._src.values.replica_rows import Shape, Shapes, repeat_rows
from jdist._src.values.row_slices import is_row_slices
from jdist._src.values.sync_on_read import SyncOnRead


def check_wrapper(name: str, node: Any, replicas: Replicas) -> None:
    """Raises ValueError if `node` is a wrapper whose leaves cannot be divided among the replicas."""
    check_not_nested(name, node)
    for leaf_name, leaf in named_leaves(name, node.tree) if is_distributed(node) else ():
        node._check_leaf(leaf_name, leaf, replicas.size)


def check_not_nested(name: str, node: Any) -> None:
    """Raises TypeError if `node` is a wrapper around another wrapper, or around leaves that do not support its aggregation."""
    if not is_distributed(node):
        return
    aggregation = getattr(node, "aggregation", VariableAggregation.NONE)
    for child in jax.tree.leaves(node.tree, is_leaf=lambda x: is_distributed(x) or is_row_slices(x)):
        if is_distributed(child):
            raise TypeError(
                f"{name} is a {type(node).__name__} around {one_line(child)}: a value has one placement. Remove a wrapper."
            )
        if is_row_slices(child) and aggregation is not VariableAggregation.NONE:
            raise TypeError(
                f"{name} is a {type(node).__name__} of RowSlices, and its aggregation would also add their indices. Store "
                "the dense table: `value.dense()`."
            )
    if isinstance(node, Mirrored) and node.aggregation is VariableAggregation.MEAN:
        check_mean(name, node.tree)


def check_uniform_shape(name: str, node: Any) -> None:
    """Raises ValueError if the replicas hold values of different shapes: a program has one shape for all replicas."""
    if isinstance(node, PerReplica) and node.shapes is not None:
        raise ValueError(
            f"{name} is {one_line(node)}: the replicas hold values of different shapes, and a replica function needs one "
            "shape. Pad them and use weights: `value, weights = value.padded()`, then `jdist.global_mean(values, weights)` "
            "or a metric with `weights=`."
        )


def check_same_devices(name: str, array: jax.Array, mesh: Mesh) -> None:
    """Raises ValueError if `array` is not placed on the devices of `mesh`, in their order."""
    mesh_devices = list(mesh.devices.flat)
    array_devices = sorted(array.sharding.device_set, key=lambda device: device.id)
    if isinstance(array.sharding, NamedSharding):
        array_devices = list(array.sharding.mesh.devices.flat)  # pyright: ignore[reportOptionalMemberAccess]
    elif set(array_devices) == set(mesh_devices):
        array_devices = mesh_devices
    if array_devices != mesh_devices:
        raise ValueError(
            f"{name} is on {', '.join(map(str, array_devices))}, and this strategy uses {', '.join(map(str, mesh_devices))}. "
            "If another strategy created it, create it with this strategy; if it is a plain array, pass it as a numpy "
            "array, or "
            "place it with `strategy.put`."
        )


def check_devices_attached(mesh: Mesh) -> None:
    """Raises RuntimeError if the devices are topology devices, which cannot run programs."""
    if is_topology_device(mesh.devices.flat[0]):
        raise RuntimeError(
            f"The {mesh.size} devices of this strategy ({mesh.devices.flat[0].device_kind}) come from a "
            "topology description: programs can be compiled for them (`strategy.compile(step, state_shapes, "
            "batch_shapes)`), but not run. "
            "To run a program, make a strategy for attached devices: `jdist.auto_strategy()`."
        )


def put(
    tree: PyTree,
    replicas: Replicas,
    shardings: Callable[[PyTree], Sequence[Sharding]],
    names: Sequence[str] | None = None,
) -> PyTree:
    """Returns `tree` on the devices of the replicas, each leaf with its sharding from `shardings(tree)`.

    A `SyncOnRead` of a strategy with another number of replicas is read, and split into partial values for these replicas.

    Args:
        tree: A tree of arrays and numbers, some in wrappers.
        replicas: The replicas.
        shardings: A function from the tree to the sharding of each leaf.
        names: If `tree` is a tuple of arguments, their names in error messages.

    Raises:
        TypeError: A leaf is not a number or an array of numbers.
        ValueError: The leaves of a wrapper cannot be divided among the replicas, the processes pass different values, or an
            integer is out of the range of JAX's dtype.
    """
    tree = to_array_tree(tree) if names is None else tuple(map(to_array_tree, tree))
    roots = [("value", tree)] if names is None else list(zip(names, tree, strict=True))
    _check_leaves([leaf for name, part in roots for leaf in named_values(name, part)], replicas)

    def for_replicas(path: Any, node: Any) -> Any:
        root, keys = ("value", path) if names is None else (str(names[path[0].idx]), path[1:])
        name = root + jax.tree_util.keystr(keys)
        _check_rows_of_strategy(name, node, replicas)
        node = node._for_num_replicas(replicas.size) if is_distributed(node) else node
        check_wrapper(name, node, replicas)
        return node

    tree = jax.tree_util.tree_map_with_path(for_replicas, tree, is_leaf=is_distributed)
    leaves, treedef = jax.tree.flatten(tree)
    placed = treedef.unflatten(map(device_put_copy, leaves, shardings(tree)))
    return from_array_tree(placed) if names is None else tuple(map(from_array_tree, placed))


def _check_rows_of_strategy(name: str, node: Any, replicas: Replicas) -> None:
    """Raises ValueError if `node` is a `SyncOnRead` for another number of replicas that no strategy made.

    The first dimension of a leaf counts replicas. In a value that the user wrapped, it may be a dimension of the data.
    """
    if not isinstance(node, SyncOnRead):
        return
    for leaf_name, leaf in named_leaves(name, node.tree):
        shape = np.shape(leaf)
        if shape and shape[0] != replicas.size and not is_on_mesh(leaf):
            raise ValueError(
                f"{leaf_name} is a SyncOnRead of {dtype_and_shape(leaf)}. The first dimension of a SyncOnRead counts replicas, "
                f"{shape[0]} here, and this strategy has {replicas.size}. To start with a value of shape {list(shape)} on each "
                "replica, create it in a replica function: `strategy.init(lambda: jdist.SyncOnRead(x, aggregation))`. If these "
                "are the rows of another strategy, pass the value that this strategy made, or assign `value.read()`."
            )


def _check_leaves(leaves: Sequence[tuple[str, Any]], replicas: Replicas) -> None:
    """Raises TypeError or ValueError if a leaf cannot be placed, or differs between the processes."""
    if leaves and not jax_compat.is_tracing() and not any(isinstance(leaf, core.Tracer) for _, leaf in leaves):
        check_devices_attached(replicas.mesh)
        kinds, error = [], None
        try:
            for name, leaf in leaves:
                check_not_deleted(name, leaf)
            kinds = [(name, dtype_and_shape(leaf), leaf) for name, leaf in leaves]
        except Exception as raised:  # of any type: the other processes compare
            error = raised
        check_same_on_processes(kinds, replicas, error)
    # After the comparison between processes: a check that fails here fails on all of them.
    for name, leaf in leaves:
        check_value(name, leaf)


def split_batch(batch: PyTree, replicas: Replicas, shardings: Callable[[PyTree], Sequence[Sharding]]) -> PyTree:
    """Returns a global batch `[batch, ...]` with a `PerReplica` `[replica, batch / replica, ...]` in place of each leaf.

    Args:
        batch: A tree of plain arrays, the same on every process.
        replicas: The replicas.
        shardings: A function from the split tree to the sharding of each leaf.

    Raises:
        TypeError: A leaf is already in a wrapper, or is not an array of numbers.
        ValueError: A leaf is a scalar, or the numbers of examples differ or cannot be split.
    """
    leaves = named_values("batch", batch)
    _check_leaves(leaves, replicas)
    _check_not_split(batch)
    for name, leaf in leaves:
        sizes = np.shape(leaf)[:1]
        if not any(sizes) or sizes != np.shape(leaves[0][1])[:1]:
            first_name, first_leaf = leaves[0]
            counts = (
                f"{sizes[0]} examples, and {first_name} has {np.shape(first_leaf)[0]}" if any(sizes) else "no examples"
            )
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)}: it has {counts}. Every leaf of a batch is `[batch, ...]`; pass a value "
                "that is shared by all replicas as another argument of the step."
            )
        if remainder := sizes[0] % replicas.num_parts:
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)}: its {sizes[0]} examples cannot be split over {replicas.num_parts} "
                f"{'devices' if replicas.batch_axes else 'replicas'} ({remainder} left over). Use a multiple of "
                f"{replicas.num_parts}, or "
                '`strategy.distribute_dataset(data, batch_size, remainder="pad")`, which pads the batch and returns weights.'
            )
    treedef = jax.tree.structure(batch)
    arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for _, leaf in leaves]
    rows = [x.reshape((replicas.size, x.shape[0] // replicas.size, *x.shape[1:])) for x in arrays]
    placed = map(device_put_copy, rows, shardings(treedef.unflatten(map(PerReplica, rows))))
    return treedef.unflatten(map(PerReplica, placed))


def split_by_layout(batch: PyTree, layout: BatchLayout, replicas: Replicas) -> PyTree:
    """Returns a global batch, each leaf placed as the layout specifies. See `split_batch`."""
    leaves = named_values("batch", batch)
    _check_leaves(leaves, replicas)
    _check_not_split(batch)
    arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for _, leaf in leaves]
    treedef = jax.tree.structure(batch)
    pairs = zip(layout.leaves(treedef.unflatten(arrays)), arrays, strict=True)
    return treedef.unflatten([leaf.wrap(device_put_copy(leaf.stored(x), leaf.sharding)) for leaf, x in pairs])


def _check_not_split(batch: PyTree) -> None:
    for node in jax.tree.leaves(batch, is_leaf=is_distributed):
        if is_distributed(node):
            raise TypeError(
                f"`split` takes one global batch of plain arrays `[batch, ...]`, got {one_line(node)}, which is already split."
            )


def put_on_every_replica(node: PyTree, replicas: Replicas) -> PyTree:
    """Returns a wrapper around the value of one replica, with this value on every replica; a plain tree is replicated."""
    check_not_nested("value", node)
    if not isinstance(node, DistributedValues) or node._is_replicated:
        return put(node, replicas, lambda tree: [replicas.replicated_sharding for _ in jax.tree.leaves(tree)])
    for name, leaf in named_values("value", node):
        check_value(name, leaf)
    to_rows = lambda x: repeat_rows(
        device_put_copy(x, replicas.replicated_sharding), replicas.size, replicas.per_replica_sharding
    )
    return node._with_tree(jax.tree.map(to_rows, node.tree))


def put_per_replica(trees: Sequence[PyTree], replicas: Replicas) -> PerReplica:
    """Returns a `PerReplica`, given one tree for each replica of this process. Each tree is put directly on its own device.

    Raises:
        TypeError: A leaf is a wrapper, or is not a number or an array of numbers.
        ValueError: The trees differ in structure, or a leaf in rank or dtype; the message names replica and leaf.
    """
    check_devices_attached(replicas.mesh)
    error = _error_of(trees, list(replicas.local_devices))
    # All processes compare before one of them raises, or the others would wait for it.
    kinds = [] if error else [(name, _dtype_and_rank(leaf), None) for name, leaf in named_leaves("value", trees[0])]
    check_same_on_processes(kinds, replicas, error)
    rows_and_shapes = [_padded_rows(leaves, replicas) for leaves in zip(*map(jax.tree.leaves, trees), strict=True)]
    rows = jax.tree.unflatten(jax.tree.structure(trees[0]), [leaf_rows for leaf_rows, _ in rows_and_shapes])
    is_uniform = all(len(set(shapes)) == 1 for _, shapes in rows_and_shapes)
    return PerReplica(rows, None if is_uniform else tuple(shapes for _, shapes in rows_and_shapes))


def _padded_rows(leaves: Sequence[Any], replicas: Replicas) -> tuple[jax.Array, Shapes]:
    """Returns rows over the mesh, padded to one shape, and the shape on each replica, given one leaf per local replica."""
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    exchanged = exchange_rows([np.asarray(array.shape, np.int32) for array in arrays], replicas)
    shapes: Shapes = tuple(tuple(map(int, shape)) for shape in exchanged)
    largest = tuple(map(max, zip(*shapes, strict=True)))
    return put_local_rows([_padded_to(largest, array) for array in arrays], replicas), shapes


def _padded_to(shape: Shape, array: jax.Array) -> jax.Array:
    if array.shape == shape:
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ValueError("Random keys cannot be padded to one shape: pass the same number of keys for every replica.")
    return jnp.pad(array, [(0, to - size) for to, size in zip(shape, array.shape, strict=True)])


def _dtype_and_rank(leaf: Any) -> str:
    return f"{jnp.asarray(leaf).dtype} of rank {jnp.ndim(leaf)}"


def _error_of(trees: Sequence[PyTree], replicas: Sequence[int]) -> Exception | None:
    """Returns the error of values, one per replica, that cannot be the rows of one value; None if they can."""
    for node in jax.tree.leaves(list(trees), is_leaf=is_distributed):
        if is_distributed(node):
            return TypeError(
                f"The value of one replica must not be in a wrapper, got {one_line(node)}. Return plain arrays."
            )
    try:
        for name, leaf in named_leaves("value", list(trees)):
            check_value(name, leaf)
    except (TypeError, ValueError) as error:
        return error
    for index, tree in zip(replicas, trees, strict=True):
        if difference := _difference(trees[0], tree):
            return ValueError(
                f"The value of replica {index} {difference} of replica {min(replicas)}. Return values of the same structure, "
                "ranks and dtypes for all replicas."
            )
    return None


def _difference(first: PyTree, tree: PyTree) -> str | None:
    if jax.tree.structure(first) != jax.tree.structure(tree):
        return f"has the structure {short_line(jax.tree.structure(tree))}, and not the {short_line(jax.tree.structure(first))}"
    for (name, a), (_, b) in zip(named_leaves("value", first), named_leaves("value", tree), strict=True):
        if _dtype_and_rank(a) != _dtype_and_rank(b):
            return f"has {dtype_and_shape(jnp.asarray(b))} for {name}, and not the {dtype_and_shape(jnp.asarray(a))}"
    return None
