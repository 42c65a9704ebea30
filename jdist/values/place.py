"""How trees come to lie on a mesh, and whether they do."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jdist._tree import PyTree, named_leaves, spec
from jdist.mesh import local_replicas, mirrored_sharding, per_replica_sharding
from jdist.values.aggregation import VariableAggregation
from jdist.values.arrays import Shape, Shapes, check_array, place, repeat
from jdist.values.base import DistributedValues, is_distributed
from jdist.values.per_replica import PerReplica
from jdist.values.row_slices import is_sparse

_NONE = VariableAggregation.NONE


def check_fit(name: str, node: Any, mesh: Mesh) -> None:
    """Raises ValueError if `node` is a wrapper that does not fit the replicas of `mesh`."""
    check_single(name, node)
    for leaf_name, leaf in named_leaves(name, node.tree) if is_distributed(node) else ():
        node.check(leaf_name, leaf, mesh.size)


def check_single(name: str, node: Any) -> None:
    """Raises TypeError if `node` is a wrapper with another inside, or one that would add up the indices of rows."""
    if not is_distributed(node):
        return
    for inner in jax.tree.leaves(node.tree, is_leaf=lambda x: is_distributed(x) or is_sparse(x)):
        if is_distributed(inner):
            raise TypeError(
                f"{name} is a {type(node).__name__} around {inner!r}: a value has one placement. Take one off."
            )
        if is_sparse(inner) and getattr(node, "aggregation", _NONE) is not _NONE:
            raise TypeError(
                f"{name} is a {type(node).__name__} of RowSlices, and its aggregation would add up their indices too. Keep "
                "the table: `value.dense()`."
            )


def check_one_shape(name: str, node: Any) -> None:
    """Raises ValueError if the replicas hold values of different shapes, which no one program can run on."""
    if isinstance(node, PerReplica) and node.shapes is not None:
        raise ValueError(
            f"{name} is {node!r}: the replicas hold values of different shapes, and a replica function has one. Fill them up "
            "and carry weights: `value, weights = value.padded()`; `jdist.mean(values, weights)` and metrics take them."
        )


def check_place(name: str, array: jax.Array, mesh: Mesh) -> None:
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


def put(tree: PyTree, mesh: Mesh) -> PyTree:
    """`tree` with every plain leaf on all devices of `mesh`, and every wrapper as its class says.

    Raises:
        ValueError: A wrapper does not fit the mesh; or the processes hand in different values.
    """
    _check_same([(name, spec(leaf), leaf) for name, leaf in named_leaves("value", tree)], mesh)

    def one(path: Any, node: Any) -> Any:
        if not is_distributed(node):
            return place(node, mirrored_sharding(mesh))
        check_fit("value" + jax.tree_util.keystr(path), node, mesh)
        sharding = NamedSharding(mesh, node.spec(mesh.axis_names))
        return node.with_tree(jax.tree.map(lambda x: place(x, sharding), node.tree))

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_distributed)


def put_on_each(node: PyTree, mesh: Mesh) -> PyTree:
    """A value as a replica function would write it, the same on every replica, on the devices of `mesh`."""
    check_single("value", node)
    if not isinstance(node, DistributedValues) or node.agrees:
        return put(node, mesh)
    rows = per_replica_sharding(mesh)
    whole = jax.tree.map(lambda x: repeat(place(x, mirrored_sharding(mesh)), mesh.size, rows), node.tree)
    return node.with_tree(whole)


def put_rows(trees: Sequence[PyTree], mesh: Mesh) -> PerReplica:
    """`PerReplica` of one tree for each replica of this process, each put directly on its own device.

    Raises:
        ValueError: The trees differ in structure, or a leaf in rank or dtype; the message names replica and leaf.
    """
    replicas = local_replicas(mesh)
    for name, leaf in named_leaves("value", list(trees)):
        check_array(name, leaf)
    if any(map(is_distributed, jax.tree.leaves(list(trees), is_leaf=is_distributed))):
        raise TypeError("A value for one replica is plain: return the arrays that `PerReplica` is made of.")
    for number, tree in zip(replicas, trees, strict=True):
        if difference := _difference(trees[0], tree):
            raise ValueError(
                f"The value of replica {number} {difference} of replica {min(replicas)}. Give every replica a value of the "
                "same structure, ranks and dtypes."
            )
    kinds = [(name, _kind(leaf), None) for name, leaf in named_leaves("value", trees[0])]
    _check_same(kinds, mesh)
    columns = [_Column(column, mesh) for column in zip(*map(jax.tree.leaves, trees), strict=True)]
    rows = jax.tree.unflatten(jax.tree.structure(trees[0]), [column.rows for column in columns])
    even = all(len(set(column.shapes)) == 1 for column in columns)
    return PerReplica(rows, None if even else tuple(column.shapes for column in columns))


class _Column:
    """One leaf of all replicas: the arrays of this process, made rows over the mesh."""

    def __init__(self, leaves: Sequence[Any], mesh: Mesh):
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        known = _exchanged([np.asarray(array.shape, np.int32) for array in arrays], mesh)
        self.shapes: Shapes = tuple(tuple(map(int, shape)) for shape in known)
        whole = tuple(map(max, zip(*self.shapes, strict=True)))
        self.rows = _put_each([_filled_up(array, whole) for array in arrays], mesh)


def _put_each(arrays: Sequence[Any], mesh: Mesh) -> jax.Array:
    """Rows of one array for each replica of this process."""
    devices = local_replicas(mesh).values()
    placed = [jax.device_put(array[None], device) for array, device in zip(arrays, devices, strict=True)]
    shape = (mesh.size, *placed[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, per_replica_sharding(mesh), placed)


def _exchanged(arrays: Sequence[Any], mesh: Mesh) -> Sequence[Any]:
    """The arrays of all replicas, of those of this process; the same on every process."""
    if len(arrays) == mesh.size:
        return arrays
    return list(np.asarray(jax.jit(jnp.copy, out_shardings=mirrored_sharding(mesh))(_put_each(arrays, mesh))))


def _check_same(leaves: Sequence[tuple[str, str, Any]], mesh: Mesh) -> None:
    """Raises ValueError, on every process, if the processes hand in different names, kinds or values."""
    here = len(local_replicas(mesh))
    if here == mesh.size:
        return
    kinds = zlib.crc32(repr([(name, kind) for name, kind, _ in leaves]).encode())
    if len({int(kind) for kind in _exchanged([np.uint32(kinds)] * here, mesh)}) > 1:
        listed = ", ".join(f"{name} {kind}" for name, kind, _ in leaves)
        raise ValueError(
            f"The processes hand in values of different structure or kind; this one has {listed}. Make them alike."
        )
    sums = np.array([zlib.crc32(_bytes(leaf)) for _, _, leaf in leaves], np.uint32)
    for (name, kind, _), numbers in zip(leaves, zip(*_exchanged([sums] * here, mesh), strict=True), strict=True):
        if len(set(map(int, numbers))) > 1:
            raise ValueError(
                f"{name} ({kind}) differs between the processes, and is to be the same on every replica. Compute it alike on "
                "all (the same seed), or hand it in as a `PerReplica`."
            )


def _bytes(leaf: Any) -> bytes:
    """What tells host values apart; an array that several processes hold is not looked into."""
    if leaf is None or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return b""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def _kind(leaf: Any) -> str:
    return f"{jnp.asarray(leaf).dtype} of rank {jnp.ndim(leaf)}"


def _filled_up(array: jax.Array, shape: Shape) -> jax.Array:
    if array.shape == shape:
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ValueError("Random keys cannot be filled up to one shape: give every replica as many.")
    return jnp.pad(array, [(0, size - own) for size, own in zip(shape, array.shape, strict=True)])


def _difference(like: PyTree, tree: PyTree) -> str | None:
    if jax.tree.structure(like) != jax.tree.structure(tree):
        return f"has the structure {jax.tree.structure(tree)}, and not the {jax.tree.structure(like)}"
    for (name, a), (_, b) in zip(named_leaves("value", like), named_leaves("value", tree), strict=True):
        if _kind(a) != _kind(b):
            return f"has {spec(jnp.asarray(b))} for {name}, and not the {spec(jnp.asarray(a))}"
    return None
