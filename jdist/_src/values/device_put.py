"""How trees come to lie on a mesh, and whether they do."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import Mesh, NamedSharding, Sharding

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.devices.mesh import Replicas
from jdist._src.devices.topology import is_topology_device
from jdist._src.values.aggregation import VariableAggregation, check_mean
from jdist._src.values.arrays import Shape, Shapes, check_not_deleted, check_value, device_put_copy, repeat_rows
from jdist._src.values.base import DistributedValues, is_distributed, named_values
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.process_checks import check_same_on_processes, exchange_rows, put_local_rows
from jdist._src.values.row_slices import is_row_slices

_NONE = VariableAggregation.NONE


def check_wrapper(name: str, node: Any, replicas: Replicas) -> None:
    """Raises ValueError if `node` is a wrapper that does not fit so many replicas."""
    check_not_nested(name, node)
    for leaf_name, leaf in named_leaves(name, node.tree) if is_distributed(node) else ():
        node.check(leaf_name, leaf, replicas.size)


def check_not_nested(name: str, node: Any) -> None:
    """Raises TypeError if `node` is a wrapper with another inside, or one whose aggregation its leaves do not have."""
    if not is_distributed(node):
        return
    for inner in jax.tree.leaves(node.tree, is_leaf=lambda x: is_distributed(x) or is_row_slices(x)):
        if is_distributed(inner):
            raise TypeError(
                f"{name} is a {type(node).__name__} around {inner!r}: a value has one placement. Take one off."
            )
        if is_row_slices(inner) and getattr(node, "aggregation", _NONE) is not _NONE:
            raise TypeError(
                f"{name} is a {type(node).__name__} of RowSlices, and its aggregation would add up their indices too. Keep "
                "the table: `value.dense()`."
            )
    if isinstance(node, Mirrored) and node.aggregation is VariableAggregation.MEAN:
        check_mean(name, node.tree)


def check_uniform_shape(name: str, node: Any) -> None:
    """Raises ValueError if the replicas hold values of different shapes, which no one program can run on."""
    if isinstance(node, PerReplica) and node.shapes is not None:
        raise ValueError(
            f"{name} is {node!r}: the replicas hold values of different shapes, and a replica function has one. Fill them up "
            "and carry weights: `value, weights = value.padded()`; `jdist.global_mean(values, weights)` and metrics take them."
        )


def check_same_devices(name: str, array: jax.Array, mesh: Mesh) -> None:
    """Raises ValueError if `array` does not lie on the devices of `mesh`, in their order."""
    ours = list(mesh.devices.flat)
    theirs = sorted(array.sharding.device_set, key=lambda device: device.id)
    if isinstance(array.sharding, NamedSharding):
        theirs = list(array.sharding.mesh.devices.flat)  # pyright: ignore[reportOptionalMemberAccess]
    elif set(theirs) == set(ours):
        theirs = ours
    if theirs != ours:
        there, here = (", ".join(map(str, devices)) for devices in (theirs, ours))
        raise ValueError(
            f"{name} lies on {there}, and this strategy on {here}. If another strategy made it, let this one make it; if "
            "it is a plain array, hand it in as a numpy array, or place it with `strategy.put`."
        )


def check_devices_attached(mesh: Mesh) -> None:
    """Raises RuntimeError if the devices are described, and not there."""
    if is_topology_device(mesh.devices.flat[0]):
        raise RuntimeError(
            f"The {mesh.size} devices of this strategy ({mesh.devices.flat[0].device_kind}) are described by a topology, and "
            "not there: it compiles programs for them (`strategy.compile(step, state_shapes, batch_shapes)`), and runs none. "
            "To run, make a strategy for devices that are there: `jdist.auto_strategy()`."
        )


def put(
    tree: PyTree,
    replicas: Replicas,
    shardings: Callable[[PyTree], Sequence[Sharding]],
    names: Sequence[str] | None = None,
) -> PyTree:
    """`tree` on the devices of the replicas, each leaf as `shardings` of the tree says.

    A `SyncOnRead` of another number of replicas is read, and shared out anew.

    Args:
        tree: A tree of arrays and numbers, some in wrappers.
        replicas: The replicas.
        shardings: From the tree to the sharding of each leaf.
        names: Where `tree` is a tuple of arguments, what messages call each of them.

    Raises:
        TypeError: A leaf is no number or array of numbers.
        ValueError: A wrapper does not fit the replicas; the processes hand in different values; or a whole number does not fit
            what JAX keeps of it.
    """
    roots = [("value", tree)] if names is None else list(zip(names, tree, strict=True))
    _check_leaves([leaf for name, part in roots for leaf in named_values(name, part)], replicas)

    def fitting(path: Any, node: Any) -> Any:
        node = node.over(replicas.size) if is_distributed(node) else node
        root, keys = ("value", path) if names is None else (str(names[path[0].idx]), path[1:])
        check_wrapper(root + jax.tree_util.keystr(keys), node, replicas)
        return node

    fit = jax.tree_util.tree_map_with_path(fitting, tree, is_leaf=is_distributed)
    leaves, treedef = jax.tree.flatten(fit)
    return treedef.unflatten(map(device_put_copy, leaves, shardings(fit)))


def _check_leaves(leaves: Sequence[tuple[str, Any]], replicas: Replicas) -> None:
    """Raises TypeError or ValueError if a leaf cannot be placed, or differs between the processes."""
    if leaves and not jax_compat.is_tracing() and not any(isinstance(leaf, core.Tracer) for _, leaf in leaves):
        check_devices_attached(replicas.mesh)
        for name, leaf in leaves:
            check_not_deleted(name, leaf)
        check_same_on_processes([(name, dtype_and_shape(leaf), leaf) for name, leaf in leaves], replicas)
    # After all processes have compared: what is wrong with a value is then wrong on all of them.
    for name, leaf in leaves:
        check_value(name, leaf)


def split_batch(batch: PyTree, replicas: Replicas, shardings: Callable[[PyTree], Sequence[Sharding]]) -> PyTree:
    """Returns a global batch, leaves `[batch, ...]`, with a `PerReplica` `[replica, batch / replica, ...]` for each leaf.

    Args:
        batch: A tree of plain arrays, the same on every process.
        replicas: The replicas.
        shardings: From the split tree to the sharding of each leaf.

    Raises:
        TypeError: A leaf is wrapped already, or is not an array of numbers.
        ValueError: A leaf has no dimension of examples, the leaves have different numbers of them, or they cannot be split.
    """
    leaves = named_values("batch", batch)
    _check_leaves(leaves, replicas)
    for node in jax.tree.leaves(batch, is_leaf=is_distributed):
        if is_distributed(node):
            raise TypeError(
                f"`split` takes one global batch of plain arrays `[batch, ...]`, got {node!r}: it is split already."
            )
    for name, leaf in leaves:
        sizes = np.shape(leaf)[:1]
        if not any(sizes) or sizes != np.shape(leaves[0][1])[:1]:
            other = (
                f"{sizes[0]} examples, and {leaves[0][0]} has {np.shape(leaves[0][1])[0]}"
                if any(sizes)
                else "no examples"
            )
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)}: it has {other}. Every leaf of a batch is `[batch, ...]`; pass a value that all "
                "replicas share as another argument of the step."
            )
        if left := sizes[0] % replicas.num_parts:
            raise ValueError(
                f"{name} is {dtype_and_shape(leaf)}: its {sizes[0]} examples do not split over {replicas.num_parts} "
                f"{'devices' if replicas.split else 'replicas'} ({left} left over). Use a multiple of {replicas.num_parts}, or "
                '`strategy.distribute_dataset(data, batch_size, remainder="pad")`, which pads the batch and returns weights.'
            )
    treedef = jax.tree.structure(batch)
    split = treedef.unflatten([PerReplica(_rows(leaf, replicas.size)) for _, leaf in leaves])
    placed = map(device_put_copy, jax.tree.leaves(split), shardings(split))
    return treedef.unflatten([PerReplica(leaf) for leaf in placed])


def _rows(leaf: Any, count: int) -> Any:
    """Returns `[batch, ...]` as `[count, batch / count, ...]`."""
    array = leaf if hasattr(leaf, "reshape") else np.asarray(leaf)
    return array.reshape((count, array.shape[0] // count, *array.shape[1:]))


def put_replicated(tree: PyTree, replicas: Replicas) -> PyTree:
    """`tree` with every leaf whole on all devices of the replicas."""
    return put(tree, replicas, lambda tree: [replicas.whole for _ in jax.tree.leaves(tree)])


def put_on_every_replica(node: PyTree, replicas: Replicas) -> PyTree:
    """A value as a replica function would write it, the same on every replica, on their devices."""
    check_not_nested("value", node)
    if not isinstance(node, DistributedValues) or node.agrees:
        return put_replicated(node, replicas)
    for name, leaf in named_values("value", node):
        check_value(name, leaf)
    whole = jax.tree.map(
        lambda x: repeat_rows(device_put_copy(x, replicas.whole), replicas.size, replicas.rows), node.tree
    )
    return node._with_tree(whole)


def put_per_replica(trees: Sequence[PyTree], replicas: Replicas) -> PerReplica:
    """`PerReplica` of one tree for each replica of this process, each put directly on its own device.

    Raises:
        ValueError: The trees differ in structure, or a leaf in rank or dtype; the message names replica and leaf.
    """
    check_devices_attached(replicas.mesh)
    problem = _problem(trees, list(replicas.local))
    # All processes compare before one of them raises, or the others would wait for it.
    kinds = [] if problem else [(name, _kind(leaf), None) for name, leaf in named_leaves("value", trees[0])]
    check_same_on_processes([(str(problem), "", None)] if problem else kinds, replicas)
    if problem:
        raise problem
    columns = [_Column(column, replicas) for column in zip(*map(jax.tree.leaves, trees), strict=True)]
    rows = jax.tree.unflatten(jax.tree.structure(trees[0]), [column.rows for column in columns])
    even = all(len(set(column.shapes)) == 1 for column in columns)
    return PerReplica(rows, None if even else tuple(column.shapes for column in columns))


class _Column:
    """One leaf of all replicas: the arrays of this process, made rows over the mesh."""

    def __init__(self, leaves: Sequence[Any], replicas: Replicas):
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        known = exchange_rows([np.asarray(array.shape, np.int32) for array in arrays], replicas)
        self.shapes: Shapes = tuple(tuple(map(int, shape)) for shape in known)
        whole = tuple(map(max, zip(*self.shapes, strict=True)))
        self.rows = put_local_rows([_filled_up(array, whole) for array in arrays], replicas)


def _kind(leaf: Any) -> str:
    return f"{jnp.asarray(leaf).dtype} of rank {jnp.ndim(leaf)}"


def _filled_up(array: jax.Array, shape: Shape) -> jax.Array:
    if array.shape == shape:
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ValueError("Random keys cannot be filled up to one shape: give every replica as many.")
    return jnp.pad(array, [(0, size - own) for size, own in zip(shape, array.shape, strict=True)])


def _problem(trees: Sequence[PyTree], replicas: Sequence[int]) -> Exception | None:
    """What is wrong with values that are to be one row a replica."""
    for node in jax.tree.leaves(list(trees), is_leaf=is_distributed):
        if is_distributed(node):
            return TypeError(f"A value for one replica is plain, got {node!r}. Return the arrays that it is made of.")
    try:
        for name, leaf in named_leaves("value", list(trees)):
            check_value(name, leaf)
    except (TypeError, ValueError) as error:
        return error
    for number, tree in zip(replicas, trees, strict=True):
        if difference := _difference(trees[0], tree):
            return ValueError(
                f"The value of replica {number} {difference} of replica {min(replicas)}. Give every replica a value of the "
                "same structure, ranks and dtypes."
            )
    return None


def _difference(like: PyTree, tree: PyTree) -> str | None:
    if jax.tree.structure(like) != jax.tree.structure(tree):
        return f"has the structure {jax.tree.structure(tree)}, and not the {jax.tree.structure(like)}"
    for (name, a), (_, b) in zip(named_leaves("value", like), named_leaves("value", tree), strict=True):
        if _kind(a) != _kind(b):
            return f"has {dtype_and_shape(jnp.asarray(b))} for {name}, and not the {dtype_and_shape(jnp.asarray(a))}"
    return None
