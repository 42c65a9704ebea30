"""The contents of a checkpoint: the checked arguments of a save, and the arrays and the manifest that are written.

A checkpoint stores values that do not depend on the devices. A plain leaf, a `Mirrored`, a `Sharded`, and the total of a
`SyncOnRead` SUM are stored as one value. Any other `SyncOnRead`, and a `PerReplica`, is stored as one value per replica.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jdist._src.checkpoint.fingerprint import fingerprints
from jdist._src.checkpoint.manifest import AS_BYTES, StoredArray, checked_json, make_manifest, to_text
from jdist._src.checkpoint.preservation import as_metrics
from jdist._src.checkpoint.process_sync import Facts
from jdist._src.checkpoint.tree_format import Leaf, check_distinct, is_inline, leaves_of, to_json
from jdist._src.core.byte_dtypes import to_bytes
from jdist._src.core.nn_modules import to_array_tree
from jdist._src.core.tree import PyTree, dtype_and_shape
from jdist._src.values.aggregation import VariableAggregation, aggregate_rows
from jdist._src.values.array_checks import check_array, is_device_array
from jdist._src.values.array_copies import to_numpy
from jdist._src.values.device_put import check_not_nested, check_uniform_shape
from jdist._src.values.reduce_op import ReduceOp, check_reducible
from jdist._src.values.remote_array import materialize


class SavePlan(NamedTuple):
    """The checked arguments of a save.

    Attributes:
        step: The step.
        position: The data position, as JSON.
        seed: The seed, as JSON.
        metrics: The finite metrics.
        state: The leaves of the state: arrays on the devices, or copies on the host.
        extra: The leaves of `extra`, except for text and Python numbers: arrays on the devices, or copies on the host.
        structures: The structures of both trees, as JSON.
    """

    step: int
    position: Any
    seed: Any
    metrics: dict[str, float]
    state: list[Leaf]
    extra: list[Leaf]
    structures: tuple[Any, Any]

    @property
    def facts(self) -> Facts:
        """Facts that must be equal on all processes. `extra` may differ, except for arrays that several processes hold."""
        shared = [x for x in self.extra if isinstance(x.value, jax.Array) and not x.value.is_fully_addressable]
        return {
            "`step`": [str(self.step)],
            "`state`": [_describe(leaf) for leaf in self.state],
            "`data_position`": [json.dumps(self.position)],
            "`seed`": [json.dumps(self.seed)],
            "`metrics`": [json.dumps(self.metrics)],
            "`extra`": [_describe(leaf) for leaf in shared],
        }

    def pack(self) -> tuple[list[Any], str, Facts]:
        """Returns the arrays of the checkpoint, the text of its manifest, and facts that must be equal on all processes.

        All processes call it: sums use collectives.
        """
        trees = {"state": self.state, "extra": self.extra}
        paths = ["/".join((name, *leaf.keys)) for name, leaves in trees.items() for leaf in leaves]
        wrappers = [leaf.wrapper_name for leaf in self.state] + ["host" for _ in self.extra]
        total = lambda leaf: aggregate_rows(VariableAggregation.SUM, f"state/{leaf.path}", leaf.value)
        values = [total(leaf) if leaf.is_sum else leaf.value for leaf in self.state] + [x.value for x in self.extra]
        bits = [_to_bits(x) for x in values]
        columns = zip(paths, values, wrappers, fingerprints(bits), strict=True)
        arrays = [StoredArray.of(number, *column) for number, column in enumerate(columns)]
        manifest = make_manifest(self.step, self.seed, self.position, self.metrics, arrays, *self.structures)
        fingerprints_of_state = [f"{x.path} #{x.fingerprint:08x}" for x in arrays[: len(self.state)]]
        return bits, to_text(manifest), {"the values of `state`": fingerprints_of_state}


def make_save_plan(
    step: int, state: PyTree, position: Any, seed: Any, extra: PyTree, metrics: Mapping[str, Any] | None
) -> SavePlan:
    """Checks the arguments of a save, and copies host values. Uses no collectives: it may fail on one process of several.

    Raises:
        ValueError: A leaf was donated, two leaves have the same path, or the replicas hold values of different shapes.
        TypeError: A leaf, the position, the seed or a metric cannot be saved.
    """
    position, seed = checked_json("data_position", position), checked_json("seed", seed)
    state = materialize(to_array_tree(state))
    state_leaves = leaves_of(state)
    extra_leaves = [leaf for leaf in leaves_of(extra) if not is_inline(leaf.value)]
    check_distinct(state_leaves)
    structures = to_json(state), to_json(extra, inline=True, start=len(state_leaves))
    json.dumps(structures)  # raises TypeError here instead of in the background
    return SavePlan(
        step,
        position,
        seed,
        as_metrics(metrics),
        [leaf._replace(value=_check_state_leaf(leaf)) for leaf in state_leaves],
        [leaf._replace(value=_check_extra_leaf(leaf)) for leaf in extra_leaves],
        structures,
    )


def _check_state_leaf(leaf: Leaf) -> Any:
    """Returns the array on the devices, or a copy of the host value with the dtype that devices hold."""
    name, x = f"state/{leaf.path}", leaf.value
    if isinstance(x, core.Tracer):
        raise TypeError(
            f"{name} is a tracer. Call `save` outside of compiled functions, with the state that the step returned."
        )
    check_not_nested(name, leaf.wrapper)
    check_uniform_shape(name, leaf.wrapper)
    check_array(name, x)
    if is_device_array(x) and x.is_deleted():
        raise ValueError(
            f"{name} was donated to a step, which used its memory for the new state. Save the state that the step returned."
        )
    if leaf.is_sum:
        check_reducible(ReduceOp.SUM, name, x)
        return x
    if is_device_array(x) and (jax.process_count() == 1 or not x.is_fully_addressable):
        return x
    if is_device_array(x):  # an array of one process of several
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else to_numpy(x).copy()
    host_value = np.array(x)
    dtype = jax.dtypes.canonicalize_dtype(host_value.dtype)
    value = host_value.astype(dtype)
    if host_value.dtype.kind in "iu" and (value != host_value).any():
        raise TypeError(
            f"{name} is {dtype_and_shape(host_value)} with numbers that do not fit into {dtype}, its dtype on devices. Use "
            "smaller numbers, or enable 64-bit types: `jax.config.update('jax_enable_x64', True)`."
        )
    return value


def _check_extra_leaf(leaf: Leaf) -> Any:
    name = f"extra/{leaf.path}"
    if leaf.wrapper is not None:
        raise TypeError(
            f"{name} is in a {type(leaf.wrapper).__name__}, and `extra` takes plain values only. Pass `value.read()`."
        )
    check_array(name, leaf.value)
    return leaf.value if isinstance(leaf.value, jax.Array) else np.array(leaf.value)


def _to_bits(x: Any) -> Any:
    """Returns the array that is written for `x`: the data of random keys, and bytes for `AS_BYTES`.

    On several processes, orbax accepts an array of a single process only from the host.
    """
    bits = (
        jax.random.key_data(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else to_bytes(x)
        if str(x.dtype) in AS_BYTES
        else x
    )
    is_of_one_process = jax.process_count() > 1 and isinstance(bits, jax.Array) and bits.is_fully_addressable
    return to_numpy(bits) if is_of_one_process else bits


def _describe(leaf: Leaf) -> str:
    wrapper = f" in {leaf.wrapper_name}" if leaf.wrapper is not None else ""
    return f"{leaf.path} {dtype_and_shape(leaf.value)}{wrapper}"
