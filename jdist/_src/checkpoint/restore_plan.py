"""The plan of a restore: for each leaf of the new state, the stored array, the sharding it is read in, and its value.

A leaf that is stored as one value is read directly in the sharding of the new state; a `SyncOnRead` SUM is split into equal
shares. Values per replica are restored bit for bit on the same number of replicas. On another number, a `SyncOnRead` is
aggregated, and every replica gets the result; a `PerReplica` is an error.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.checkpoint import storage
from jdist._src.checkpoint.fingerprint import fingerprints
from jdist._src.checkpoint.leaf_selection import (
    check_each_path,
    is_below,
    pruned,
    renamed_leaves,
    shortened,
    unchanged_leaves,
    with_keys_of,
)
from jdist._src.checkpoint.manifest import StoredArray, stored_arrays, with_fingerprint
from jdist._src.checkpoint.process_sync import Facts, ProcessGroup
from jdist._src.checkpoint.tree_format import Leaf, from_json, leaves_of, pair_renamed
from jdist._src.core.nn_modules import from_array_tree, to_array_tree
from jdist._src.core.tree import PyTree, dtype_and_shape, has_dtype
from jdist._src.devices.dispatch import is_bounded, wait_for_results
from jdist._src.devices.mesh import Replicas
from jdist._src.strategies.base import Strategy
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.array_checks import check_array, mesh_of
from jdist._src.values.array_copies import device_put_copy
from jdist._src.values.base import cast_without_loss, is_distributed
from jdist._src.values.device_put import check_not_nested, check_uniform_shape, check_wrapper
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.reduce_op import ReduceOp, check_reducible
from jdist._src.values.replica_rows import first_row, reduce_rows, repeat_rows, split_into_shares
from jdist._src.values.state_sharding import StateSharding


class _LeafPlan(NamedTuple):
    """The restore of one leaf: the stored array, the sharding it is read in, and a function from it to the leaf."""

    stored: StoredArray
    sharding: NamedSharding
    finish: Callable[[jax.Array], jax.Array]


class RestorePlan(NamedTuple):
    """The restore of one checkpoint.

    Attributes:
        folder: The folder of checkpoints.
        manifest: The manifest.
        treedef: The structure of the new state.
        leaves: The restore of its leaves, by their numbers in `treedef`.
        unchanged: Its other leaves, which are those of `like`, by their numbers.
        unrestored: The paths of these other leaves.
        unused: The paths of the saved leaves that are not restored.
    """

    folder: pathlib.Path
    manifest: Mapping[str, Any]
    treedef: Any
    leaves: dict[int, _LeafPlan]
    unchanged: dict[int, Any]
    unrestored: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.manifest["step"]

    def read(self, group: ProcessGroup) -> tuple[list[jax.Array], PyTree]:
        """Reads the stored array of each leaf, and `extra`, and checks the fingerprints.

        Raises:
            ValueError: The bits of an array are not the saved ones.
            CheckpointError: A file cannot be read.
        """
        extra = [array for array in stored_arrays(self.manifest) if array.path.partition("/")[0] == "extra"]
        shapes = {
            leaf.stored.number: jax.ShapeDtypeStruct(
                leaf.stored.bits.shape, leaf.stored.bits.dtype, sharding=leaf.sharding
            )
            for leaf in self.leaves.values()
        }
        shapes |= {array.number: np.zeros(array.bits.shape, array.bits.dtype) for array in extra}
        nonempty = {number: shape for number, shape in shapes.items() if shape.size}
        bits = group.run(lambda: storage.read_arrays(self.folder, self.step, nonempty))
        bits |= {number: _empty(shape) for number, shape in shapes.items() if not shape.size}
        arrays = [*(leaf.stored for leaf in self.leaves.values()), *extra]
        read = fingerprints([bits[array.number] for array in arrays])

        def check() -> None:  # `extra` may be damaged where one process has read it
            for array, fingerprint in zip(arrays, read, strict=True):
                if fingerprint != array.fingerprint:
                    raise ValueError(f"The bits of {array.path} are not the saved ones")

        group.run(check)
        extra_values = {array.number: array.from_bits(bits[array.number]) for array in extra}
        return (
            [leaf.stored.from_bits(bits[leaf.stored.number]) for leaf in self.leaves.values()],
            from_json(self.manifest["extra"], extra_values.__getitem__),
        )

    def finish(self, arrays: Sequence[jax.Array]) -> PyTree:
        """Returns the state from the arrays that `read` returned."""
        finished = [leaf.finish(array) for leaf, array in zip(self.leaves.values(), arrays, strict=True)]
        leaves = dict(zip(self.leaves, finished, strict=True)) | self.unchanged
        return from_array_tree(self.treedef.unflatten([leaves[number] for number in range(len(leaves))]))


def make_restore_plan(
    folder: pathlib.Path,
    manifest: Mapping[str, Any],
    saved: PyTree,
    strategy: Strategy,
    like: PyTree,
    only: Sequence[str] | None,
    rename: Mapping[str, str],
) -> tuple[RestorePlan, Facts]:
    """Returns the plan of a restore, and facts that must be equal on all processes. Uses no collectives.

    Args:
        folder: The folder of checkpoints.
        manifest: The manifest of the checkpoint.
        saved: The saved state, with a `StoredArray` for each leaf.
        strategy: The strategy of the new state.
        like: A state with the structure of the new state; None for the structure of the checkpoint.
        only: The paths above the leaves that are restored; None for all leaves.
        rename: The new paths by the saved paths.

    Raises:
        ValueError: The saved state does not match `like`, or does not fit the strategy; or a path in `only` or `rename` does
            not exist.
    """
    name = f"The checkpoint of step {manifest['step']} in {folder}"
    replicas = strategy.replicas
    like = to_array_tree(like)
    if like is None and rename:
        raise ValueError("`rename` needs the new structure: `restore(strategy, like=state, rename=...)`.")
    all_saved = renamed_leaves(name, leaves_of(saved), rename)
    if like is None:
        check_each_path(name, only, all_saved, saved)
        wanted = _saved_shapes(pruned(saved, only), replicas.size)
    else:
        wanted = _shapes_of_like(like, replicas.size)
    all_wanted = leaves_of(wanted)
    selected = {number: leaf for number, leaf in enumerate(all_wanted) if is_below(leaf.path, only)}
    wanted_leaves = list(selected.values())
    saved_leaves: Sequence[Leaf] = [leaf for leaf in all_saved if is_below(leaf.path, only)]
    if like is not None:
        check_each_path(name, only, [*all_wanted, *all_saved], saved)
        saved_leaves = _with_names_of_like(name, with_keys_of(saved_leaves, wanted_leaves), wanted_leaves)
        if differences := _differences(saved_leaves, wanted_leaves):
            raise ValueError(
                f"{name} does not match `like`. {' '.join(differences)} Pass the state of the same model and optimizer as "
                '`like`; restore a part that matches, `only="params"`, or leaves with other names, `rename={"old": "new"}`; '
                "or restore without `like` and use the leaves that match."
            )
    for leaf in wanted_leaves:
        check_wrapper(f"state/{leaf.path}", leaf.wrapper, replicas)
    saved_by_keys = {leaf.keys: leaf for leaf in saved_leaves}
    shardings = [x for x in jax.tree.leaves(strategy.shardings(wanted)) if isinstance(x, NamedSharding)]
    plans = {
        number: _plan_leaf(saved_by_keys[leaf.keys], leaf, shardings[number], replicas)
        for number, leaf in selected.items()
    }
    unchanged = unchanged_leaves(like, all_wanted, set(selected))
    facts = {
        "`step`": [str(manifest["step"])],
        "the manifest of the checkpoint": [with_fingerprint(manifest)["fingerprint"]],
        "`like`": [f"{leaf.path} {dtype_and_shape(leaf.value)}" for leaf in all_wanted],
        "`only` and `rename`": [f"{leaf.path} from {saved_by_keys[leaf.keys].value.path}" for leaf in wanted_leaves],
    }
    unrestored = tuple(all_wanted[number].path for number in unchanged)
    unused = tuple(leaf.value.path.partition("/")[2] for leaf in all_saved if not is_below(leaf.path, only))
    return RestorePlan(folder, manifest, jax.tree.structure(wanted), plans, unchanged, unrestored, unused), facts


def _saved_shapes(tree: PyTree, num_replicas: int) -> PyTree:
    """Returns the shapes of a saved state on another number of replicas; the leaves of `tree` are `StoredArray`s."""

    def convert(node: Any) -> Any:
        rows = (num_replicas,) if is_distributed(node) and node._is_stacked else ()
        wrapper = node if is_distributed(node) else None
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(rows + _shape_per_replica(Leaf((), array, wrapper)), array.array.dtype),
            node,
        )

    return jax.tree.map(convert, tree, is_leaf=is_distributed)


def _shapes_of_like(tree: PyTree, num_replicas: int) -> PyTree:
    """Returns the shapes of `like` on another number of replicas."""

    def convert(path: Any, node: Any) -> Any:
        name = "like" + jax.tree_util.keystr(path)
        check_not_nested(name, node)
        check_uniform_shape(name, node)
        rows = (num_replicas,) if is_distributed(node) and node._is_stacked else ()

        def shape_of(x: Any) -> jax.ShapeDtypeStruct:
            if not has_dtype(x):
                check_array("like", x)
                x = np.asarray(x)
            is_on_host = isinstance(x, np.ndarray | np.generic)
            dtype = jax.dtypes.canonicalize_dtype(x.dtype) if is_on_host else x.dtype
            return jax.ShapeDtypeStruct(rows + x.shape[len(rows) :], dtype)

        return jax.tree.map(shape_of, node)

    return jax.tree_util.tree_map_with_path(convert, tree, is_leaf=is_distributed)


def _with_names_of_like(name: str, saved: Sequence[Leaf], wanted: Sequence[Leaf]) -> Sequence[Leaf]:
    """Returns the saved leaves with the names of the wanted ones, where these differ in counters of layers only.

    Raises:
        ValueError: The names can be paired in several ways.
    """
    saved_kinds, wanted_kinds = ({leaf.keys: _spec_per_replica(leaf) for leaf in x} for x in (saved, wanted))
    try:
        pairs = pair_renamed(saved_kinds, wanted_kinds)
    except ValueError as error:
        raise ValueError(
            f"{name} has layers with other names than `like`, and they can be paired in several ways: {error}. Give "
            "the layers fixed names when the model is built (`name=`), or call `keras.utils.clear_session()` before, "
            "so that the names match the checkpoint."
        ) from None
    if pairs is None:
        return saved
    wanted_keys = {saved_keys: keys for keys, saved_keys in pairs.items()}
    return [leaf._replace(keys=wanted_keys[leaf.keys]) for leaf in saved]


def _differences(saved: Sequence[Leaf], wanted: Sequence[Leaf]) -> list[str]:
    """Returns sentences that name the leaves in which a saved state differs from `like`."""
    saved_by_keys, wanted_by_keys = ({leaf.keys: leaf for leaf in leaves} for leaves in (saved, wanted))
    text = lambda leaf: f"{leaf.path or 'the state itself'} {_spec_per_replica(leaf)}"
    missing = [text(leaf) for keys, leaf in wanted_by_keys.items() if keys not in saved_by_keys]
    surplus = [text(leaf) for keys, leaf in saved_by_keys.items() if keys not in wanted_by_keys]
    changed = [
        f"{leaf.path} is {_spec_per_replica(saved_by_keys[keys])} in the checkpoint and {_spec_per_replica(leaf)} in `like`"
        for keys, leaf in wanted_by_keys.items()
        if keys in saved_by_keys and not _matches(saved_by_keys[keys], leaf)
    ]
    groups = {"Only in `like`": missing, "Only in the checkpoint": surplus, "Different shape or dtype": changed}
    return [f"{title}: {shortened(names)}." for title, names in groups.items() if names]


def _matches(saved: Leaf, wanted: Leaf) -> bool:
    if _shape_per_replica(saved) != _shape_per_replica(wanted):
        return False
    if str(saved.value.dtype) == str(wanted.value.dtype):
        return True
    # A sum of small integers is stored with a larger dtype, as numpy computes sums.
    is_sum = getattr(saved.wrapper, "aggregation", None) is VariableAggregation.SUM
    dtypes = (saved.value.bits.dtype, wanted.value.dtype)
    return is_sum and saved.value.key is None and all(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes)


def _plan_leaf(saved: Leaf, wanted: Leaf, sharding: NamedSharding, replicas: Replicas) -> _LeafPlan:
    """Returns the restore of a leaf.

    Args:
        saved: The saved leaf; its value is a `StoredArray`.
        wanted: The new leaf; its value is a shape and dtype.
        sharding: The sharding of the new leaf.
        replicas: The replicas of the new state.

    Raises:
        ValueError: The checkpoint has one value per replica of another number of replicas, without an aggregation.
    """
    stored: StoredArray = saved.value
    if not _has_row_per_replica(saved):
        if not wanted.is_stacked:
            return _LeafPlan(stored, sharding, lambda x: _cast_and_place(wanted, x, sharding))
        return _LeafPlan(stored, _sharding_of_row(sharding), lambda x: _to_rows(wanted, x, sharding, replicas))
    aggregation = getattr(saved.wrapper, "aggregation", None)
    is_same_wrapper = type(saved.wrapper) is type(wanted.wrapper)
    is_same_wrapper &= aggregation is getattr(wanted.wrapper, "aggregation", None)
    if is_same_wrapper and stored.shape[0] == replicas.size:
        return _LeafPlan(stored, sharding, lambda rows: rows)
    if isinstance(saved.wrapper, PerReplica) or aggregation is VariableAggregation.NONE:
        count = stored.shape[0]
        raise ValueError(
            f"{stored.path} has one value for each of {count} replicas, and cannot be restored as {wanted.wrapper_name} on "
            f"{replicas.size} replicas. Restore it on {count} replicas, such as with "
            f"`jdist.MirroredStrategy(devices, virtual_replicas={count})` on fewer devices, and compute the new value from it."
        )
    return _plan_aggregated_leaf(saved, wanted, sharding, replicas)


def _plan_aggregated_leaf(saved: Leaf, wanted: Leaf, sharding: NamedSharding, replicas: Replicas) -> _LeafPlan:
    """Returns the restore of a `SyncOnRead` of another number of replicas: one value, aggregated from all of them.

    The stored array is read sharded as evenly as possible, because no device may have the memory for all of it.
    """
    mesh = replicas.mesh
    largest_axis = max(mesh.shape, key=lambda axis: mesh.shape[axis])
    read_sharding = StateSharding(mesh, largest_axis, "all", {}).array_sharding(saved.value.array)
    row_sharding = _sharding_of_row(sharding) if wanted.is_stacked else sharding
    on_mesh = NamedSharding(mesh, row_sharding.spec) if row_sharding.mesh == mesh else replicas.replicated_sharding

    def finish(rows: jax.Array) -> jax.Array:
        name = f"state/{saved.path}"
        if getattr(saved.wrapper, "aggregation", None) is VariableAggregation.ONLY_FIRST_REPLICA:
            value = first_row(rows, on_mesh)
        else:
            check_reducible(ReduceOp.MEAN, name, rows)
            value = reduce_rows(ReduceOp.MEAN, name, rows, None, (), on_mesh)
        if wanted.is_stacked:
            return _to_rows(wanted, value, sharding, replicas)
        return _cast_and_place(wanted, value, sharding)

    return _LeafPlan(saved.value, read_sharding, finish)


def _to_rows(wanted: Leaf, x: jax.Array, sharding: NamedSharding, replicas: Replicas) -> jax.Array:
    """Returns one value per replica, which read as `x`: equal shares for a SUM, otherwise copies."""
    x = _cast_and_place(wanted, x, _sharding_of_row(sharding))
    rows = (split_into_shares if wanted.is_sum else repeat_rows)(x, replicas.size, sharding)
    if is_bounded(mesh_of(rows)):
        wait_for_results(rows)
    return rows


def _cast_and_place(wanted: Leaf, x: jax.Array, sharding: NamedSharding) -> jax.Array:
    dtype = wanted.value.dtype
    x = x if x.dtype == dtype else cast_without_loss(f"state/{wanted.path}", x, x.shape, dtype)
    return x if x.sharding == sharding else jax.device_put(x, sharding)


def _sharding_of_row(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def _has_row_per_replica(saved: Leaf) -> bool:
    return saved.is_stacked and not saved.is_sum


def _shape_per_replica(leaf: Leaf) -> tuple[int, ...]:
    is_stacked = _has_row_per_replica(leaf) if isinstance(leaf.value, StoredArray) else leaf.is_stacked
    return tuple(leaf.value.shape[is_stacked:])


def _spec_per_replica(leaf: Leaf) -> str:
    return f"{leaf.value.dtype}[{','.join(map(str, _shape_per_replica(leaf)))}]"


def _empty(shape: Any) -> Any:
    """Returns an array without elements, which orbax does not store."""
    if isinstance(shape, np.ndarray):
        return shape
    return device_put_copy(np.zeros(shape.shape, shape.dtype), shape.sharding)
