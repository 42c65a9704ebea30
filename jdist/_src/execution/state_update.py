"""What a step may do to its state: give every leaf a new value, and nothing else."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.replica.context import all_reduce, broadcast
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.arrays import check_value
from jdist._src.values.base import is_distributed, named_values
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.reduce_op import ReduceOp, check_reducible


def strongly_typed(state: PyTree) -> PyTree:
    """`state` with array leaves of a definite dtype: a Python number would let the next step change it.

    Raises:
        TypeError: A leaf is no number or array of numbers.
        ValueError: A whole number does not fit what JAX keeps of it.
    """
    for name, leaf in named_values("state", state):
        check_value(name, leaf)
    return jax.tree.map(_strong, state)


def split_result(result: Any) -> tuple[PyTree, PyTree]:
    """The state and the outputs that a step returned.

    Raises:
        TypeError: It returned no pair.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    got = f"a tuple of {len(result)}" if isinstance(result, tuple) else dtype_and_shape(result)
    raise TypeError(
        f"A step returns a pair `(state, outputs)`, and this one returned {got}. A step with nothing to report "
        "returns `(state, None)`."
    )


def apply_writes(placed: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """What the new state writes to the places of the old one; without wrappers, like `before`.

    Args:
        placed: The state that was handed to the step, wrappers and all.
        before: The same without wrappers, as the replica function got it.
        after: What the replica function returned for it.

    Raises:
        TypeError: `after` has another structure, or a leaf of another shape or dtype, or one that cannot be aggregated; the
            message names it.
        ValueError: A host number is to be summed over the replicas.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(_structure_change(before, after))
    for name, leaf in named_leaves("state", after):
        check_value(name, leaf)
    for number, (was, now) in enumerate(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)):
        old, new = jax.typeof(was), jax.typeof(now)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            name, _ = named_leaves("state", before)[number]
            raise TypeError(
                f"The step changes {name} from {dtype_and_shape(was)} to {dtype_and_shape(now)}. A state keeps its shapes and dtypes, or "
                "every step would be another program: cast the new value (`.astype`), or begin with this shape."
            )
    return strongly_typed(_agreed(jax.tree.leaves(placed, is_leaf=is_distributed), before, after))


def rewrap(placed: PyTree, state: PyTree) -> PyTree:
    """`state`, as a replica function sees it, in the wrappers of `placed`."""
    items, treedef = jax.tree.flatten(placed, is_leaf=is_distributed)
    parts = zip(items, treedef.flatten_up_to(state), strict=True)
    return treedef.unflatten([item._with_tree(part) if is_distributed(item) else part for item, part in parts])


def _agreed(items: Sequence[Any], before: PyTree, after: PyTree) -> PyTree:
    """`after` with the writes to `Mirrored` values aggregated, by one collective for all of a kind."""
    counts = [len(jax.tree.leaves(item)) for item in items]
    aggregations = [
        item.aggregation if isinstance(item, Mirrored) else VariableAggregation.NONE
        for item, count in zip(items, counts, strict=True)
        for _ in range(count)
    ]
    names = [name for name, _ in named_leaves("state", before)]
    olds, (news, treedef) = jax.tree.leaves(before), jax.tree.flatten(after)
    for aggregation, collective in _AGGREGATIONS.items():
        # A leaf that is handed on is the same object: nobody wrote it, and a sum would multiply it.
        written = [i for i, kind in enumerate(aggregations) if kind is aggregation and news[i] is not olds[i]]
        for i in written:
            _check_write(aggregation, names[i], news[i])
        if written:
            for i, value in zip(written, collective([news[i] for i in written]), strict=True):
                news[i] = value
    return treedef.unflatten(news)


_AGGREGATIONS = {
    VariableAggregation.SUM: functools.partial(all_reduce, ReduceOp.SUM),
    VariableAggregation.MEAN: functools.partial(all_reduce, ReduceOp.MEAN),
    VariableAggregation.ONLY_FIRST_REPLICA: broadcast,
}


def _check_write(aggregation: VariableAggregation, name: str, leaf: Any) -> None:
    if aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
        check_reducible(ReduceOp.of(aggregation.name), name, leaf)
    if aggregation is VariableAggregation.SUM and not isinstance(leaf, jax.Array):
        raise ValueError(
            f"{name} becomes the sum of what the replicas write, and they wrote {dtype_and_shape(leaf)}, a host value that none of them "
            "holds. Write an array (`jnp.asarray`) for its sum over the replicas, or aggregate by MEAN."
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact):
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}, and the mean of what the replicas write is no such value. Make it a float, or "
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
