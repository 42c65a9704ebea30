"""What callbacks keep of a state whose memory the next step takes over."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._tree import PyTree, named_leaves, spec
from jdist.strategies.base import Strategy
from jdist.values.arrays import is_placed, place


def copied(tree: PyTree) -> PyTree:
    """A copy of each array of `tree`, on the devices that it lies on."""
    leaves, treedef = jax.tree.flatten(tree)
    placed = [i for i, leaf in enumerate(leaves) if is_placed(leaf)]
    there = [leaves[i].sharding for i in placed]
    for i, leaf in zip(placed, jax.device_put([leaves[i] for i in placed], there, may_alias=False), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def leaves_to_save(tree: PyTree) -> list[Any]:
    """The leaves as arrays of numbers, as a checkpoint takes them."""
    return [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]


def from_saved(name: str, leaves: Sequence[Any], like: PyTree, strategy: Strategy) -> PyTree:
    """What `leaves_to_save` gave, as a tree like `like`, in the same places.

    Raises:
        ValueError: They do not fit; the message calls the tree `name`.
    """
    there = named_leaves(name, like)
    if len(leaves) != len(there):
        raise ValueError(f"{name} was saved with {len(leaves)} leaves, and has {len(there)} now. {_ANOTHER}")
    keyed = [_with_key(leaf, old) for leaf, (_, old) in zip(leaves, there, strict=True)]
    if any(jnp.shape(leaf) != old.shape for leaf, (_, old) in zip(keyed, there, strict=True)):
        # Rows of another number of replicas: the wrappers know which of them have a meaning for these.
        keyed = jax.tree.leaves(strategy.put(jax.tree.unflatten(jax.tree.structure(like), keyed)))
    for leaf, (path, old) in zip(keyed, there, strict=True):
        if leaf.shape != old.shape or leaf.dtype != old.dtype:
            raise ValueError(f"{path} was saved as {spec(leaf)}, and is {spec(old)} now. {_ANOTHER}")
    placed = [place(leaf, old.sharding) for leaf, (_, old) in zip(keyed, there, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def _with_key(leaf: Any, like: jax.Array) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(like)) if _is_key(like) else leaf


def _is_key(leaf: Any) -> bool:
    return is_placed(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


_ANOTHER = "Resume with the model that was saved, or without this callback's part."
