"""The stages of a state in a replica function: a step returns a new value for each leaf, and changes nothing else about it.

Structure, shapes and dtypes are checked, and the writes to `Mirrored` leaves are aggregated.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core.nn_modules import leaves_with_path
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves, short_line
from jdist._src.execution.nn_mutation import changed_attribute
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import ReplicaFn, Results, UserCall
from jdist._src.replica import leaf_annotations
from jdist._src.replica.context import all_reduce, broadcast
from jdist._src.replica.precision import Precision, use_precision
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.array_checks import check_value
from jdist._src.values.base import is_distributed, named_values
from jdist._src.values.mirrored import Mirrored
from jdist._src.values.reduce_op import ReduceOp, check_reducible


class NewState(Stage):
    """Makes the state of `Strategy.init`: strongly typed, with the leaves that differ between replicas in wrappers."""

    def wrap_function(self, fn: ReplicaFn, call: UserCall) -> ReplicaFn:
        """See `Stage`."""

        def create(*args: PyTree) -> Results:
            with leaf_annotations.collect_local_leaves() as local_leaves:
                state, outputs = fn(*args)
            return strongly_typed(leaf_annotations.wrap_local_leaves(state, local_leaves)), outputs

        return create


class StepPolicies(Stage):
    """Provides what synchronization policies use in a step: the precision and its loss scale, and the targets of parameters.

    Args:
        precision: The precision of the step, or None.
    """

    def __init__(self, precision: Precision | None):
        self._precision = precision

    def wrap_function(self, fn: ReplicaFn, call: UserCall) -> ReplicaFn:
        """See `Stage`."""

        def step(before: PyTree, *inputs: PyTree) -> Results:
            with leaf_annotations.collect_sync_targets() as targets, use_precision(self._precision, before):
                # A copy of the containers: a change in place is a change from `before`.
                after, outputs = fn(jax.tree.map(lambda x: x, before), *inputs)
            return leaf_annotations.apply_sync_targets(before, after, targets), outputs

        return step


class StateUpdate(Stage):
    """Checks the state that a step returns, and aggregates the writes to its `Mirrored` leaves."""

    def wrap_function(self, fn: ReplicaFn, call: UserCall) -> ReplicaFn:
        """See `Stage`."""

        def step(before: PyTree, *inputs: PyTree) -> Results:
            after, outputs = fn(before, *inputs)
            return apply_writes(call.args[0], before, after), outputs

        return step


def strongly_typed(state: PyTree) -> PyTree:
    """Returns `state` with array leaves that are not weakly typed, so that the next step cannot change their dtypes.

    Raises:
        TypeError: A leaf is not a number or an array of numbers.
        ValueError: An integer does not fit the dtype that JAX gives it.
    """
    for name, leaf in named_values("state", state):
        check_value(name, leaf)
    return jax.tree.map(_strongly_typed_leaf, state)


def apply_writes(wrapped_state: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Returns the new state, without wrappers, with the writes to `Mirrored` leaves aggregated.

    Args:
        wrapped_state: The state that was passed to the step, with wrappers.
        before: The same state without wrappers, as the replica function receives it.
        after: The state that the replica function returned.

    Raises:
        TypeError: The structure, or the shape or dtype of a leaf, changed; or a leaf cannot be aggregated. The message names
            it.
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
                f"The step changes {name} from {dtype_and_shape(was)} to {dtype_and_shape(now)}. A state keeps its shapes and "
                "dtypes, otherwise every step would be compiled again: cast the new value (`.astype`), or start with "
                "this shape."
            )
    return strongly_typed(_aggregate_writes(jax.tree.leaves(wrapped_state, is_leaf=is_distributed), before, after))


def _aggregate_writes(items: Sequence[Any], before: PyTree, after: PyTree) -> PyTree:
    """Returns `after` with the writes to `Mirrored` leaves aggregated, by one collective per aggregation."""
    aggregations = [
        item.aggregation if isinstance(item, Mirrored) else VariableAggregation.NONE
        for item in items
        for _ in jax.tree.leaves(item)
    ]
    names = [name for name, _ in named_leaves("state", before)]
    olds, (news, treedef) = jax.tree.leaves(before), jax.tree.flatten(after)
    for aggregation, collective in _AGGREGATIONS.items():
        # A leaf that is the same object was not written, and a sum would multiply it.
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
            f"{name} is aggregated by SUM, and the replicas wrote {dtype_and_shape(leaf)}, a host value, which is not one "
            "value per replica. Write an array (`jnp.asarray`) to sum it over the replicas, or aggregate by MEAN."
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact):
        raise TypeError(
            f"{name} is {dtype_and_shape(leaf)}, which cannot hold the MEAN of the values that the replicas write. Make it a "
            "float, or aggregate by SUM or ONLY_FIRST_REPLICA."
        )


def _structure_change(before: PyTree, after: PyTree) -> str:
    for path, node in leaves_with_path(after, is_leaf=is_distributed):
        if is_distributed(node):
            return (
                f"The step returned state{jax.tree_util.keystr(path)} as {type(node).__name__}: inside a replica function "
                "values are plain. Return the array; the strategy puts it back into its wrapper."
            )
    if change := changed_attribute("state", before, after):
        return (
            f"The step changes {change}. The modules of a state keep their attributes, otherwise the next step would be "
            "compiled again. Set attributes before the step, as in `model.train()`, or compute with another view of the "
            "module, as in `nnx.view(model, deterministic=True)`."
        )
    old, new = (dict(named_leaves("state", tree)) for tree in (before, after))
    missing, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    changes = [
        f"{', '.join(names[:4])} {'is' if len(names) == 1 else 'are'} {change}"
        for names, change in ((missing, "missing"), (added, "new"))
        if names
    ]
    change = (
        "; ".join(changes) or f"{short_line(jax.tree.structure(before))} became {short_line(jax.tree.structure(after))}"
    )
    return (
        f"The step changes the structure of the state: {change}. A state keeps its structure: start with every leaf "
        "that it will have, and return other values in the outputs."
    )


def _strongly_typed_leaf(leaf: Any) -> jax.Array:
    return lax.convert_element_type(leaf, jax.typeof(leaf).dtype) if jax.typeof(leaf).weak_type else jnp.asarray(leaf)
