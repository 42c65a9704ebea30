"""What a step may do to its state: give every leaf a new value, and nothing else."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdist._tree import PyTree, named_leaves, spec
from jdist.context import all_reduce, broadcast
from jdist.reduce_op import ReduceOp
from jdist.values.aggregation import VariableAggregation
from jdist.values.base import is_distributed
from jdist.values.mirrored import Mirrored


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
    items, treedef = jax.tree_util.tree_flatten_with_path(placed, is_leaf=is_distributed)
    structure = jax.tree.structure(placed, is_leaf=is_distributed)
    olds, news = structure.flatten_up_to(before), structure.flatten_up_to(after)
    writes = [
        _Write("state" + jax.tree_util.keystr(path), item.aggregation, number, new)
        for number, ((path, item), old, new) in enumerate(zip(items, olds, news, strict=True))
        if isinstance(item, Mirrored) and _is_written(old, new)
    ]
    for number, value in _agreed(writes):
        news[number] = value
    return treedef.unflatten(
        [
            item.with_tree(settled(new)) if is_distributed(item) else settled(new)
            for (_, item), new in zip(items, news, strict=True)
        ]
    )


class _Write(NamedTuple):
    """What the replicas wrote to one `Mirrored` value of the state.

    Attributes:
        name: The value's name.
        aggregation: How the writes become one.
        number: Which item of the state it is.
        tree: What this replica wrote.
    """

    name: str
    aggregation: VariableAggregation
    number: int
    tree: PyTree


def _is_written(old: PyTree, new: PyTree) -> bool:
    # A leaf that is handed on is the same object, and a sum of it would multiply what nobody wrote.
    return any(a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))


def _agreed(writes: Sequence[_Write]) -> list[tuple[int, PyTree]]:
    """The writes, each aggregated as its value says, with one collective for all of a kind."""
    for write in writes:
        for name, leaf in named_leaves(write.name, write.tree):
            _check_write(write.aggregation, name, leaf)
    agreed: list[tuple[int, PyTree]] = []
    for aggregation, collective in _AGGREGATIONS.items():
        group = [write for write in writes if write.aggregation is aggregation]
        if group:
            agreed += zip([write.number for write in group], collective([write.tree for write in group]), strict=True)
    return agreed


_AGGREGATIONS = {
    VariableAggregation.SUM: functools.partial(all_reduce, ReduceOp.SUM),
    VariableAggregation.MEAN: functools.partial(all_reduce, ReduceOp.MEAN),
    VariableAggregation.ONLY_FIRST_REPLICA: broadcast,
}


def _check_write(aggregation: VariableAggregation, name: str, leaf: Any) -> None:
    if aggregation is VariableAggregation.SUM and not isinstance(leaf, jax.Array):
        raise ValueError(
            f"{name} is read as the sum of what the replicas write, and they wrote {spec(leaf)}, a host value that none of "
            "them holds. Write an array (`jnp.asarray`) for its sum over the replicas, or aggregate by MEAN."
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact):
        raise TypeError(
            f"{name} is {spec(leaf)}, and the mean of what the replicas write is no such value. Make it a float, or "
            "aggregate by SUM or ONLY_FIRST_REPLICA."
        )


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
