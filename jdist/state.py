"""What a step may do to its state: give every leaf a new value, and nothing else."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist._tree import PyTree, named_leaves, spec
from jdist.values import is_distributed


def settled(state: PyTree) -> PyTree:
    """`state` with array leaves of a definite dtype: a Python number would let the next step change it."""
    return jax.tree.map(_strong, state)


def split_result(result: Any) -> tuple[PyTree, PyTree]:
    """The state and the outputs that a step returned.

    Raises:
        TypeError: It returned no pair.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    got = f"a tuple of {len(result)}" if isinstance(result, tuple) else spec(result)
    raise TypeError(
        f"A step returns a pair `(state, outputs)`, and this one returned {got}. A step with nothing to report "
        "returns `(state, None)`."
    )


def kept_in_place(placed: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """The new state, in the wrappers of the old one.

    Args:
        placed: The state that was handed to the step, wrappers and all.
        before: The same without wrappers, as the replica function got it.
        after: What the replica function returned for it.

    Raises:
        TypeError: `after` has another structure, or a leaf of another shape or dtype; the message names it.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(_structure_change(before, after))
    for number, (was, now) in enumerate(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)):
        old, new = jax.typeof(was), jax.typeof(now)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            name, _ = named_leaves("state", before)[number]
            raise TypeError(
                f"The step changes {name} from {spec(was)} to {spec(now)}. A state keeps its shapes and dtypes, or "
                "every step would be another program: cast the new value (`.astype`), or begin with this shape."
            )
    items, treedef = jax.tree.flatten(placed, is_leaf=is_distributed)
    parts = jax.tree.structure(placed, is_leaf=is_distributed).flatten_up_to(settled(after))
    wrapped = [
        dataclasses.replace(item, tree=part) if is_distributed(item) else part
        for item, part in zip(items, parts, strict=True)
    ]
    return treedef.unflatten(wrapped)


def _structure_change(before: PyTree, after: PyTree) -> str:
    for path, node in jax.tree_util.tree_flatten_with_path(after, is_leaf=is_distributed)[0]:
        if is_distributed(node):
            return (
                f"The step returned state{jax.tree_util.keystr(path)} as {type(node).__name__}: inside a replica function "
                "values are plain. Return the array; the strategy puts it back into its wrapper."
            )
    old, new = (dict(named_leaves("state", tree)) for tree in (before, after))
    gone, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    kinds = ((gone, "gone"), (added, "new"))
    changes = [f"{', '.join(names[:4])} {'is' if len(names) == 1 else 'are'} {kind}" for names, kind in kinds if names]
    what = "; ".join(changes) or f"{jax.tree.structure(before)} became {jax.tree.structure(after)}"
    return (
        f"The step changes the structure of the state: {what}. A state keeps its structure: begin with every leaf that "
        "it will have, and return what is not state among the outputs."
    )


def _strong(leaf: Any) -> jax.Array:
    return lax.convert_element_type(leaf, jax.typeof(leaf).dtype) if jax.typeof(leaf).weak_type else jnp.asarray(leaf)
