"""What goes into a checkpoint, and what comes out of it."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdist._src.checkpoint import storage
from jdist._src.checkpoint.fingerprint import fingerprints
from jdist._src.checkpoint.manifest import StoredArray, checked_json, make_manifest, stored_arrays, to_text
from jdist._src.checkpoint.process_sync import Facts, ProcessGroup
from jdist._src.checkpoint.restore_plan import Plan, name_of, plan, to_store, total
from jdist._src.checkpoint.tree_format import Leaf, check_distinct, from_json, is_inline, leaves_of, to_json
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.devices.mesh import Replicas
from jdist._src.values.arrays import check_array, device_put_copy
from jdist._src.values.device_put import check_wrapper


class SavePlan(NamedTuple):
    """The checked arguments of a save. Making them uses no collectives, so that it can fail on one process of several.

    Attributes:
        step: The step.
        position: The position in the data, as JSON.
        seed: The seed, as JSON.
        leaves: The leaves of the state, each with what `to_store` returned.
        beside: The leaves of `extra`, each with a copy.
        structures: The structures of both trees.
    """

    step: int
    position: Any
    seed: Any
    leaves: list[tuple[Leaf, Any]]
    beside: list[tuple[Leaf, Any]]
    structures: tuple[Any, Any]

    @property
    def facts(self) -> Facts:
        """What must be equal on all processes: `extra` may differ, except for arrays that several processes hold."""
        shared = [(leaf, x) for leaf, x in self.beside if isinstance(x, jax.Array) and not x.is_fully_addressable]
        return {
            "`step`": [str(self.step)],
            "`state`": [_described(leaf, x) for leaf, x in self.leaves],
            "`data_position`": [json.dumps(self.position)],
            "`seed`": [json.dumps(self.seed)],
            "`extra`": [_described(leaf, x) for leaf, x in shared],
        }


def checked(step: int, state: PyTree, position: Any, seed: Any, extra: PyTree) -> SavePlan:
    """Checks and copies what a checkpoint is to contain.

    Raises:
        ValueError: A leaf has no value any more, or two have one name.
        TypeError: A leaf, the position or the seed is nothing that can be saved.
    """
    position, seed = checked_json("data_position", position), checked_json("seed", seed)
    leaves, beside = leaves_of(state), [leaf for leaf in leaves_of(extra) if not is_inline(leaf.value)]
    check_distinct(leaves)
    structures = to_json(state), to_json(extra, inline=True, start=len(leaves))
    json.dumps(structures)
    return SavePlan(
        step,
        position,
        seed,
        [(leaf, to_store(leaf)) for leaf in leaves],
        [(leaf, _beside(leaf)) for leaf in beside],
        structures,
    )


def packed(contents: SavePlan) -> tuple[list[Any], str]:
    """Returns the arrays of a checkpoint and its manifest. All processes call it."""
    stored = [("state", leaf, total(leaf, x)) for leaf, x in contents.leaves]
    stored += [("extra", leaf, x) for leaf, x in contents.beside]
    bits = [_bits(x) for _, _, x in stored]
    entries = [
        StoredArray.of(
            number, "/".join((where, *leaf.keys)), x, name_of(leaf.wrapper) if where == "state" else "host", found
        )
        for number, ((where, leaf, x), found) in enumerate(zip(stored, fingerprints(bits), strict=True))
    ]
    manifest = make_manifest(contents.step, contents.seed, contents.position, entries, *contents.structures)
    return bits, to_text(manifest)


def saved_tree(manifest: Mapping[str, Any]) -> PyTree:
    """The state that was saved, with its entries for leaves."""
    return from_json(manifest["state"], stored_arrays(manifest).__getitem__)


def plans_of(
    saved: Sequence[Leaf], target: PyTree, replicas: Replicas, shardings: Sequence[NamedSharding]
) -> list[Plan]:
    """How each leaf of `target` comes back.

    Args:
        saved: The leaves of the saved state, with entries for values.
        target: One with shapes.
        replicas: Where it goes.
        shardings: How each of its leaves is laid out there.

    Raises:
        ValueError: A wrapper does not fit the replicas.
    """
    there = {leaf.keys: leaf for leaf in saved}
    wanted = leaves_of(target)
    for leaf in wanted:
        check_wrapper("state/" + leaf.path, leaf.wrapper, replicas)
    return [plan(there[leaf.keys], leaf, where, replicas) for leaf, where in zip(wanted, shardings, strict=True)]


def read(
    group: ProcessGroup, folder: pathlib.Path, step: int, manifest: Mapping[str, Any], plans: Sequence[Plan]
) -> tuple[list[jax.Array], PyTree]:
    """What is stored of the leaves, for their plans to finish, and what was kept beside the state.

    Raises:
        ValueError: Something is not what was saved.
    """
    beside = [entry for entry in stored_arrays(manifest) if entry.path.partition("/")[0] == "extra"]
    shapes = {
        each.entry.number: jax.ShapeDtypeStruct(each.entry.bits.shape, each.entry.bits.dtype, sharding=each.sharding)
        for each in plans
    }
    shapes |= {entry.number: np.zeros(entry.bits.shape, entry.bits.dtype) for entry in beside}
    stored = {number: shape for number, shape in shapes.items() if shape.size}
    found = group.told(lambda: storage.read(folder, step, stored))
    found |= {number: _empty(shape) for number, shape in shapes.items() if not shape.size}
    entries = [*(each.entry for each in plans), *beside]
    prints = fingerprints([found[entry.number] for entry in entries])
    for entry, number in zip(entries, prints, strict=True):
        if number != entry.fingerprint:
            raise ValueError(f"{entry.path} has other bits than were saved")
    leaves = [_of_bits(each.entry, found[each.entry.number]) for each in plans]
    kept = {entry.number: _of_bits(entry, found[entry.number]) for entry in beside}
    return leaves, from_json(manifest["extra"], kept.__getitem__)


def _described(leaf: Leaf, x: Any) -> str:
    wrapper = f" in {name_of(leaf.wrapper)}" if leaf.wrapper is not None else ""
    return f"{leaf.path} {dtype_and_shape(x)}{wrapper}"


def _beside(leaf: Leaf) -> Any:
    """A copy of a leaf that is kept beside the state."""
    name = f"extra/{leaf.path}"
    if leaf.wrapper is not None:
        raise TypeError(
            f"{name} is in a {type(leaf.wrapper).__name__}: what is kept beside the state is plain. Read it first."
        )
    check_array(name, leaf.value)
    return leaf.value if isinstance(leaf.value, jax.Array) else np.array(leaf.value)


def _bits(x: Any) -> Any:
    """What is written of `x`. On several processes, orbax takes an array of one process from the host only."""
    bits = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    is_of_one = jax.process_count() > 1 and isinstance(bits, jax.Array) and bits.is_fully_addressable
    return np.asarray(bits) if is_of_one else bits


def _of_bits(entry: StoredArray, bits: Any) -> Any:
    if entry.key is None:
        return bits
    keys = jax.random.wrap_key_data(bits, impl=entry.key)
    return keys if isinstance(bits, np.ndarray) else jax.device_put(keys, bits.sharding)


def _empty(shape: Any) -> Any:
    if isinstance(shape, np.ndarray):
        return shape
    return device_put_copy(np.zeros(shape.shape, shape.dtype), shape.sharding)
