"""What callbacks keep of a state whose memory the next step takes over."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._src.checkpoint.renaming import pair_renamed
from jdist._src.checkpoint.tree_format import Leaf, leaves_of
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.strategies.base import Strategy
from jdist._src.values.arrays import device_put_copy, is_device_array


def copied(tree: PyTree) -> PyTree:
    """A copy of each array of `tree`, on the devices that it lies on."""
    leaves, treedef = jax.tree.flatten(tree)
    placed = [i for i, leaf in enumerate(leaves) if is_device_array(leaf)]
    there = [leaves[i].sharding for i in placed]
    for i, leaf in zip(placed, jax.device_put([leaves[i] for i in placed], there, may_alias=False), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def leaves_to_save(tree: PyTree) -> dict[str, Any]:
    """Returns the names and the leaves, as arrays of numbers, as a checkpoint takes them."""
    leaves = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]
    return with_names(leaves_of(tree), leaves)


def with_names(places: Sequence[Leaf], leaves: Sequence[Any]) -> dict[str, Any]:
    """Returns values with the names of the leaves that they belong to, as a checkpoint takes them."""
    return {"names": [list(place.keys) for place in places], "leaves": list(leaves)}


def in_order(saved: Mapping[str, Any] | Sequence[Any], places: Sequence[Leaf]) -> list[Any]:
    """Returns the values that `with_names` returned, in the order of `places`.

    Names may differ in the counters of layers: the order of leaves is that of names, and changes with these. Checkpoints of
    jdist's first format have no names: their values come in the order in which they were saved.

    Raises:
        ValueError: There are other names.
    """
    if not isinstance(saved, Mapping):
        return jax.tree.leaves(list(saved))
    values = {tuple(keys): value for keys, value in zip(saved["names"], saved["leaves"], strict=True)}
    # The counters decide: the state, of which these are parts, was restored, so its names are certain.
    pairs = pair_renamed(dict.fromkeys(values, ""), {place.keys: "" for place in places}, must_be_certain=False)
    if pairs is None and len(values) != len(places):
        raise ValueError(f"was saved with {len(values)} leaves, and has {len(places)} now")
    if pairs is None:
        other = next("/".join(keys) for keys in values if all(place.keys != keys for place in places))
        raise ValueError(f"was saved with a leaf {other}, and has none of this name now")
    return [values[pairs[place.keys]] for place in places]


def from_saved(name: str, saved: Mapping[str, Any] | Sequence[Any], like: PyTree, strategy: Strategy) -> PyTree:
    """What `leaves_to_save` gave, as a tree like `like`, in the same places.

    Raises:
        ValueError: They do not fit; the message calls the tree `name`.
    """
    there = named_leaves(name, like)
    try:
        leaves = in_order(saved, leaves_of(like))
    except ValueError as error:
        raise ValueError(f"{name} {error}. {_ANOTHER}") from None
    if len(leaves) != len(there):
        raise ValueError(f"{name} was saved with {len(leaves)} leaves, and has {len(there)} now. {_ANOTHER}")
    keyed = [_with_key(leaf, old) for leaf, (_, old) in zip(leaves, there, strict=True)]
    if any(jnp.shape(leaf) != old.shape for leaf, (_, old) in zip(keyed, there, strict=True)):
        # Rows of another number of replicas: the wrappers know which of them have a meaning for these.
        keyed = jax.tree.leaves(strategy.put(jax.tree.unflatten(jax.tree.structure(like), keyed)))
    for leaf, (path, old) in zip(keyed, there, strict=True):
        if leaf.shape != old.shape or leaf.dtype != old.dtype:
            raise ValueError(
                f"{path} was saved as {dtype_and_shape(leaf)}, and is {dtype_and_shape(old)} now. {_ANOTHER}"
            )
    placed = [device_put_copy(leaf, old.sharding) for leaf, (_, old) in zip(keyed, there, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def _with_key(leaf: Any, like: jax.Array) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(like)) if _is_key(like) else leaf


def _is_key(leaf: Any) -> bool:
    return is_device_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


_ANOTHER = "Resume with the model that was saved, or without this callback's part."
