"""Copies of parts of a training state, in memory and in the extra data of a checkpoint.

Callbacks copy the state because its buffers are donated to the next step. A checkpoint also stores per-replica values that it
would otherwise only store aggregated.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.checkpoint.fingerprint import fingerprints
from jdist._src.checkpoint.tree_format import Leaf, leaves_of, pair_renamed
from jdist._src.core.nn_modules import to_array_tree
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.strategies.base import Strategy
from jdist._src.training.state import params_of
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.array_checks import is_device_array
from jdist._src.values.array_copies import copy_tree, device_put_copy
from jdist._src.values.base import is_distributed
from jdist._src.values.remote_array import materialize
from jdist._src.values.sync_on_read import SyncOnRead

_FEW_BYTES = 1 << 20
_HINT = "Resume with the model that was saved, or without this callback."


def copy_state(tree: PyTree) -> PyTree:
    """Returns `tree` with a copy of each array, with the same sharding."""
    return copy_tree(materialize(tree))


def param_digest(state: PyTree) -> list[Any] | None:
    """Returns the bytes or the checksums of the parameters of a state, which show whether training changed them.

    None if there are no parameters, or not all are on the devices: a read from parameter servers takes as long as a step.
    """
    leaves = jax.tree.leaves(params_of(state))
    if not leaves or not all(map(is_device_array, leaves)) or any(map(_is_key, leaves)):
        return None
    if not all(leaf.is_fully_addressable for leaf in leaves) or sum(leaf.nbytes for leaf in leaves) > _FEW_BYTES:
        return fingerprints(leaves)
    # A program for the checksums of small arrays would take longer to compile than they take to copy.
    return [np.asarray(leaf).tobytes() for leaf in jax.device_get(leaves)]


def to_saved(tree: PyTree) -> dict[str, Any]:
    """Returns the leaf names and the leaves of `tree` in the format of a checkpoint, with the data of random keys."""
    leaves = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]
    return _with_names(leaves_of(tree), leaves)


def from_saved(name: str, saved: Mapping[str, Any] | Sequence[Any], like: PyTree, strategy: Strategy) -> PyTree:
    """Returns the result of `to_saved` as a tree with the structure and the shardings of `like`.

    Args:
        name: The name of the tree in error messages.
        saved: The result of `to_saved`, as a checkpoint returns it.
        like: The tree that gives structure, dtypes and shardings.
        strategy: The strategy of `like`.

    Raises:
        ValueError: The saved leaves do not fit `like`.
    """
    leaves_like = named_leaves(name, like)
    try:
        leaves = _in_order(saved, leaves_of(like))
    except ValueError as error:
        raise ValueError(f"{name} {error}. {_HINT}") from None
    if len(leaves) != len(leaves_like):
        raise ValueError(f"{name} was saved with {len(leaves)} leaves, and has {len(leaves_like)} now. {_HINT}")
    leaves = [
        jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(old)) if _is_key(old) else leaf
        for leaf, (_, old) in zip(leaves, leaves_like, strict=True)
    ]
    if any(jnp.shape(leaf) != old.shape for leaf, (_, old) in zip(leaves, leaves_like, strict=True)):
        # Values of another number of replicas, which some wrappers can convert.
        tree = jax.tree.map(
            lambda node: node._for_num_replicas(strategy.num_replicas_in_sync) if is_distributed(node) else node,
            jax.tree.unflatten(jax.tree.structure(like), leaves),
            is_leaf=is_distributed,
        )
        leaves = jax.tree.leaves(strategy.put(tree))
    for leaf, (path, old) in zip(leaves, leaves_like, strict=True):
        if leaf.shape != old.shape or leaf.dtype != old.dtype:
            raise ValueError(f"{path} was saved as {dtype_and_shape(leaf)}, and is {dtype_and_shape(old)} now. {_HINT}")
    placed = [device_put_copy(leaf, old.sharding) for leaf, (_, old) in zip(leaves, leaves_like, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def replicated_fingerprints(state: PyTree) -> dict[str, int]:
    """Returns the fingerprint of each replicated array of `state`, and host value, by its path. Uses no collectives."""
    leaves = leaves_of(to_array_tree(state))
    values: dict[str, Any] = {}
    for leaf in leaves:
        value = jax.random.key_data(leaf.value) if _is_key(leaf.value) else leaf.value
        if not is_device_array(value):
            values[leaf.path] = np.asarray(value)
        elif value.is_fully_replicated:
            values[leaf.path] = value.addressable_data(0)
    return dict(zip(values, fingerprints(list(values.values())), strict=True))


def summands(state: PyTree) -> dict[str, Any]:
    """Returns the per-replica values of `SyncOnRead` sums, leaves `[replica, ...]`, with their names.

    A checkpoint stores their total, which any number of replicas can share. A resume on the same number of replicas is
    bitwise equal only with the original summands.
    """
    leaves = _sum_leaves(state)
    return _with_names(leaves, materialize([leaf.value for leaf in leaves]))


def with_summands(state: PyTree, saved: Mapping[str, Any] | Sequence[PyTree], strategy: Strategy) -> PyTree:
    """Returns `state` with the per-replica values that `summands` returned."""
    values = iter(_in_order(saved, _sum_leaves(state)))

    def restored(node: Any) -> Any:
        if not isinstance(node, SyncOnRead) or node.aggregation is not VariableAggregation.SUM:
            return node
        return strategy.put(node._with_tree(jax.tree.map(lambda _: next(values), node.tree)))

    return jax.tree.map(restored, state, is_leaf=is_distributed)


def _with_names(names: Sequence[Leaf], leaves: Sequence[Any]) -> dict[str, Any]:
    return {"names": [list(leaf.keys) for leaf in names], "leaves": list(leaves)}


def _in_order(saved: Mapping[str, Any] | Sequence[Any], wanted: Sequence[Leaf]) -> list[Any]:
    """Returns the values that `_with_names` stored, in the order of `wanted`.

    Names may differ in the counters of layers. JAX orders the leaves of a dict by name, so the order then differs too. The
    first checkpoint format of jdist does not store names: its values are in the order of saving.

    Raises:
        ValueError: The names differ otherwise.
    """
    if not isinstance(saved, Mapping):
        return jax.tree.leaves(list(saved))
    values = {tuple(keys): value for keys, value in zip(saved["names"], saved["leaves"], strict=True)}
    # Certainty is not needed: the state that contains these leaves was restored, so its names are already checked.
    pairs = pair_renamed(dict.fromkeys(values, ""), {leaf.keys: "" for leaf in wanted}, must_be_certain=False)
    if pairs is None and len(values) != len(wanted):
        raise ValueError(f"was saved with {len(values)} leaves, and has {len(wanted)} now")
    if pairs is None:
        missing = next("/".join(keys) for keys in values if all(leaf.keys != keys for leaf in wanted))
        raise ValueError(f"was saved with a leaf {missing}, which does not exist now")
    return [values[pairs[leaf.keys]] for leaf in wanted]


def _sum_leaves(state: PyTree) -> list[Leaf]:
    return [leaf for leaf in leaves_of(state) if leaf.is_sum]


def _is_key(leaf: Any) -> bool:
    return is_device_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
