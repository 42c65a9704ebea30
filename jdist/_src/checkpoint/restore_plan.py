"""What is stored of a leaf, and what becomes of it on other devices.

One value is stored as it is: plain, `Mirrored`, `Sharded`, and the total of a `SyncOnRead` SUM, which every number of
replicas can share. What each replica has of its own is stored as rows: they come back as they were on as many replicas. On
another number, those of a `SyncOnRead` are aggregated and given to each; those of a `PerReplica` mean nothing there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.checkpoint.manifest import StoredArray
from jdist._src.checkpoint.tree_format import Leaf
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.devices.dispatch import is_bounded, wait_for_results
from jdist._src.devices.mesh import Replicas
from jdist._src.values.aggregation import VariableAggregation, aggregate_rows
from jdist._src.values.arrays import (
    check_array,
    first_row,
    is_device_array,
    mesh_of,
    reduce_rows,
    repeat_rows,
    split_into_shares,
)
from jdist._src.values.base import cast_without_loss, is_distributed
from jdist._src.values.device_put import check_not_nested, check_uniform_shape
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.reduce_op import ReduceOp, check_reducible
from jdist._src.values.state_sharding import StateSharding
from jdist._src.values.sync_on_read import SyncOnRead

_MOST_NAMED = 4


class Plan(NamedTuple):
    """How a leaf comes back.

    Attributes:
        entry: What is stored.
        sharding: How that is laid out when it is read.
        finish: What makes the leaf of it.
    """

    entry: StoredArray
    sharding: NamedSharding
    finish: Callable[[jax.Array], jax.Array]


def to_store(leaf: Leaf) -> Any:
    """What is stored of a leaf of a state: an array on the devices, or a copy on the host. `total` completes it.

    Uses no collectives, so that it can fail on one process of several.

    Raises:
        TypeError: It is nothing that devices hold, or has no sum.
        ValueError: Its memory is gone; or the replicas hold values of different shapes.
    """
    name, x = f"state/{leaf.path}", leaf.value
    if isinstance(x, core.Tracer):
        raise TypeError(f"{name} is being traced. Save between the calls of a step, with the state that it returned.")
    check_not_nested(name, leaf.wrapper)
    check_uniform_shape(name, leaf.wrapper)
    check_array(name, x)
    if is_device_array(x) and x.is_deleted():
        raise ValueError(
            f"{name} was given to a step before, which used its memory for the new state. Save the state that it returned."
        )
    if _is_total(leaf.wrapper):
        check_reducible(ReduceOp.SUM, name, x)
        return x
    if is_device_array(x) and (jax.process_count() == 1 or not x.is_fully_addressable):
        return x
    if is_device_array(x):  # of one process of several
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x)
    return _as_devices_hold_it(name, np.array(x))


def total(leaf: Leaf, stored: Any) -> Any:
    """Returns what `to_store` returned; of a `SyncOnRead` SUM, the sum over the replicas. All processes call it."""
    if not _is_total(leaf.wrapper):
        return stored
    return aggregate_rows(VariableAggregation.SUM, f"state/{leaf.path}", stored)


def _is_total(wrapper: Any) -> bool:
    return isinstance(wrapper, SyncOnRead) and wrapper.aggregation is VariableAggregation.SUM


def _as_devices_hold_it(name: str, host: np.ndarray) -> np.ndarray:
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)
    held = host.astype(dtype)
    if host.dtype.kind in "iu" and (held != host).any():
        raise TypeError(
            f"{name} is {dtype_and_shape(host)}, of numbers that do not fit into {dtype}, as which devices would hold them."
        )
    return held


def name_of(wrapper: Any) -> str:
    """What the manifest calls a wrapper."""
    if wrapper is None:
        return "plain"
    if isinstance(wrapper, SyncOnRead):
        return f"SyncOnRead {wrapper.aggregation.name}{', their sum' if _is_total(wrapper) else ''}"
    return type(wrapper).__name__


def over(tree: PyTree, num_replicas: int) -> PyTree:
    """The shapes of `tree`, with rows for so many replicas.

    Raises:
        ValueError: The replicas hold values of different shapes.
    """

    def one(path: Any, node: Any) -> Any:
        name = "like" + jax.tree_util.keystr(path)
        check_not_nested(name, node)
        check_uniform_shape(name, node)
        rows = num_replicas if is_distributed(node) and node.stacked else None
        return jax.tree.map(lambda x: _shape(x, rows), node)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_distributed)


def as_saved(tree: PyTree, num_replicas: int) -> PyTree:
    """The shapes of what was saved, of the entries of its arrays, with rows for so many replicas."""

    def one(node: Any) -> Any:
        rows = (num_replicas,) if is_distributed(node) and node.stacked else ()
        leaf = Leaf((), None, node if is_distributed(node) else None)
        return jax.tree.map(lambda e: jax.ShapeDtypeStruct(rows + _value_shape(leaf.replace(e)), e.array.dtype), node)

    return jax.tree.map(one, tree, is_leaf=is_distributed)


def differences(saved: Sequence[Leaf], wanted: Sequence[Leaf]) -> list[str]:
    """In sentences, what makes a state that is wanted another one than that which was saved."""
    there, here = ({leaf.keys: leaf for leaf in leaves} for leaves in (saved, wanted))
    missing = [f"{leaf.path} {value_spec(leaf)}" for keys, leaf in here.items() if keys not in there]
    besides = [f"{leaf.path} {value_spec(leaf)}" for keys, leaf in there.items() if keys not in here]
    other = [
        f"{leaf.path} was {value_spec(there[keys])} and is to be {value_spec(leaf)}"
        for keys, leaf in here.items()
        if keys in there and not _is_alike(there[keys], leaf)
    ]
    found = {"Not in it": missing, "In it and not wanted": besides, "Of another shape or dtype": other}
    return [f"{what}: {_listed(names)}." for what, names in found.items() if names]


def plan(saved: Leaf, wanted: Leaf, sharding: NamedSharding, replicas: Replicas) -> Plan:
    """How a leaf comes back in the place of one like `wanted`, laid out as `sharding` says.

    Raises:
        ValueError: It has a value for each of another number of replicas.
    """
    entry: StoredArray = saved.value
    if not _has_rows(saved):
        return _from_one(entry, wanted, sharding, replicas)
    if _is_same_kind(saved.wrapper, wanted.wrapper) and entry.shape[0] == replicas.size:
        return Plan(entry, sharding, lambda rows: rows)
    if isinstance(saved.wrapper, PerReplica) or saved.wrapper.aggregation is VariableAggregation.NONE:  # pyright: ignore
        count = entry.shape[0]
        raise ValueError(
            f"{entry.path} has a value of its own for each of {count} replicas, and is to be {name_of(wanted.wrapper)} on "
            f"{replicas.size}. Restore the state where there are {count}, as under "
            f"`jdist.MirroredStrategy(devices, virtual_replicas={count})` on fewer devices, and make the new one of it."
        )
    return _from_rows(saved, wanted, sharding, replicas)


def _from_one(entry: StoredArray, wanted: Leaf, sharding: NamedSharding, replicas: Replicas) -> Plan:
    if not getattr(wanted.wrapper, "stacked", False):
        return Plan(entry, sharding, lambda x: _fitted(wanted, x, sharding))
    return Plan(entry, _of_a_row(sharding), lambda x: _shared(wanted, x, sharding, replicas))


def _from_rows(saved: Leaf, wanted: Leaf, sharding: NamedSharding, replicas: Replicas) -> Plan:
    """One value of the partial ones of another number of replicas, which are read in parts, as evenly as can be."""
    mesh = replicas.mesh
    parts = StateSharding(mesh, max(mesh.shape, key=lambda axis: mesh.shape[axis]), "all", {}).part(saved.value.array)
    stacked = getattr(wanted.wrapper, "stacked", False)
    target = _of_a_row(sharding) if stacked else sharding
    on_devices = NamedSharding(mesh, target.spec) if target.mesh == mesh else replicas.whole

    def finish(rows: jax.Array) -> jax.Array:
        name = f"state/{saved.path}"
        if saved.wrapper.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:  # pyright: ignore
            one = first_row(rows, on_devices)
        else:
            check_reducible(ReduceOp.MEAN, name, rows)
            one = reduce_rows(ReduceOp.MEAN, name, rows, None, (), on_devices)
        return _shared(wanted, one, sharding, replicas) if stacked else _fitted(wanted, one, sharding)

    return Plan(saved.value, parts, finish)


def _shared(wanted: Leaf, x: jax.Array, sharding: NamedSharding, replicas: Replicas) -> jax.Array:
    """Rows that read as `x`."""
    x = _fitted(wanted, x, _of_a_row(sharding))
    is_sum = getattr(wanted.wrapper, "aggregation", None) is VariableAggregation.SUM
    rows = (split_into_shares if is_sum else repeat_rows)(x, replicas.size, sharding)
    if is_bounded(mesh_of(rows)):
        wait_for_results(rows)
    return rows


def _fitted(wanted: Leaf, x: jax.Array, sharding: NamedSharding) -> jax.Array:
    dtype = wanted.value.dtype
    x = x if x.dtype == dtype else cast_without_loss(f"state/{wanted.path}", x, x.shape, dtype)
    return x if x.sharding == sharding else jax.device_put(x, sharding)


def _of_a_row(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def _shape(x: Any, num_replicas: int | None) -> jax.ShapeDtypeStruct:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        check_array("like", x)
        x = np.asarray(x)
    dtype = x.dtype if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(x.shape if num_replicas is None else (num_replicas, *x.shape[1:]), dtype)


def _has_rows(saved: Leaf) -> bool:
    is_sum = getattr(saved.wrapper, "aggregation", None) is VariableAggregation.SUM
    return getattr(saved.wrapper, "stacked", False) and not is_sum


def _is_same_kind(one: Any, other: Any) -> bool:
    return type(one) is type(other) and getattr(one, "aggregation", None) is getattr(other, "aggregation", None)


def _value_shape(leaf: Leaf) -> tuple[int, ...]:
    """The shape of what one replica has."""
    has_rows = _has_rows(leaf) if isinstance(leaf.value, StoredArray) else getattr(leaf.wrapper, "stacked", False)
    return tuple(leaf.value.shape[has_rows:])


def value_spec(leaf: Leaf) -> str:
    """The dtype and shape of what one replica has of a leaf."""
    return f"{leaf.value.dtype}[{','.join(map(str, _value_shape(leaf)))}]"


def _is_alike(saved: Leaf, wanted: Leaf) -> bool:
    there, here = str(saved.value.dtype), str(wanted.value.dtype)
    return _value_shape(saved) == _value_shape(wanted) and (there == here or _is_wider_total(saved, wanted))


def _is_wider_total(saved: Leaf, wanted: Leaf) -> bool:
    """Whether the sum of small integers is stored as larger ones, as numpy adds them up."""
    is_sum = getattr(saved.wrapper, "aggregation", None) is VariableAggregation.SUM
    return (
        is_sum
        and saved.value.key is None
        and all(jnp.issubdtype(dtype, jnp.integer) for dtype in (saved.value.bits.dtype, wanted.value.dtype))
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
