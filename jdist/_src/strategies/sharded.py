"""`ShardedStrategy`: one replica over many devices, with the state split over them."""

import dataclasses
from typing import Literal, final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist._src.core.tree import one_line
from jdist._src.devices.mesh import (
    REPLICA_AXIS,
    Replicas,
    check_auto_axes,
    check_axis_name,
    check_host_memory,
    chosen_name,
)
from jdist._src.execution.auto_sharded import AutoShardedBackend
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.explicit_devices import check_devices_are_explicit
from jdist._src.values.state_sharding import Layout, Shard, StateSharding, layout_rules

_DATA_AXIS = "data"
_OTHER_NAMES = {
    "fsdp": "all",
    "fullshard": "all",
    "zero3": "all",
    "shardgradop": "gradients",
    "zero2": "gradients",
    "zero1": "optimizer",
}


@final
class ShardedStrategy(Strategy):
    """One replica over many devices: the step sees the global batch, and each device stores a part of the state.

    The step is the same as under other strategies, and its collectives are the identity, because there is one replica. XLA
    partitions its computation over the devices, and inserts the all-gathers of parameters and the reduce-scatters of gradients.
    Batch statistics and random numbers are the same as on one device with the global batch.

    Args:
        shard: The leaves that are split over the data axis: `"optimizer"`, the state of the optimizer (ZeRO stage 1);
            `"gradients"`, also the gradients that `jdist.all_reduce` reduces (stage 2; XLA may do the same under `"optimizer"`,
            where it is faster); `"all"`, also the parameters and all other leaves (stage 3, FSDP). A leaf is split along its
            largest divisible dim, or replicated if it has none. The state of the optimizer consists of the states of optax,
            `jdist.sync` and `nnx.Optimizer`, and of leaves under the names `opt_state`, `optimizer_state` and `optimizer`. A
            `jdist.UnrecognizedOptimizerStateWarning` names a state that looks like one and is not recognized.
        mesh: The devices; one axis, `"data"`, over all local ones by default. Its axes have the type `Auto`. The batch is split
            over all axes but the model axis, the state over the last of these: a mesh of `("host", "data")` splits the state
            over the devices of a host, and every host has a full copy.
        model_axis: The mesh axis of tensor parallelism, which `layout` may name.
        layout: Maps regular expressions, searched in the paths of parameters (`params/dense/kernel`), to their
            `PartitionSpec`: `{"dense/kernel": PartitionSpec(None, "model")}`. Where no pattern matches, the partition metadata
            of flax applies (`nn.with_partitioning`, `nn.with_logical_partitioning`, `out_sharding` of `nnx` variables), without
            names that are not axes of the mesh. The state that an optimizer stores for a parameter is split like the
            parameter, and `shard` applies in addition. Or an ordered list of rules `(pattern, spec)`, as t5x, EasyLM and
            MaxText write them: the first match applies, a spec may be a tuple or None, a rule may match no parameter, and
            leaves of one element are replicated. To a leaf that no rule matches the metadata applies, as with a mapping.
        offload: `"optimizer"` stores the arrays of the optimizer's state in the memory of the devices' hosts between calls of
            the step, each device's part in that of its host; the step copies them to the devices and back. The results are the
            same. It saves device memory between the steps, not during a step. On TPUs, a part that does not consist of tiles of
            8 x 128 elements stays on its device.
        axis_name: The name of the replica axis in replica functions; see `MirroredStrategy`.

    Raises:
        RuntimeError: `mesh` is omitted, and this process is one of several: each would train a separate model.
        ValueError: `shard`, `offload` or an axis is unknown, or an axis of the mesh is not `Auto`, or programs cannot address
            the host memory; or, when a state is placed, a pattern matches no parameter, two patterns match the same one, or its
            axis does not divide the dim.
        TypeError: `mesh` or `layout` is of another type.

    Example:
        >>> strategy = jdist.ShardedStrategy("all")
        >>> state = strategy.init(
        ...     lambda: {"w": jax.numpy.zeros((8, 16)), "b": jax.numpy.zeros(3)}
        ... )
        >>> [x.addressable_shards[0].data.shape for x in (state["w"], state["b"])]
        [(8, 2), (3,)]
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        shard: Shard = "all",
        *,
        mesh: Mesh | None = None,
        model_axis: str | None = None,
        layout: Layout | None = None,
        offload: Literal["optimizer"] | None = None,
        axis_name: str = REPLICA_AXIS,
    ):
        _check_shard(shard)
        if mesh is None:
            line = 'ShardedStrategy(mesh=Mesh(np.array({}), ("data",)))'.format
            check_devices_are_explicit("`ShardedStrategy`", None, line("jax.local_devices()"), line("jax.devices()"))
            mesh = Mesh(np.array(jax.local_devices()), (_DATA_AXIS,), axis_types=(AxisType.Auto,))
        _check_mesh(mesh, model_axis, axis_name)
        layout_fields = layout_rules(layout)
        batch_axes = tuple(axis for axis in mesh.axis_names if axis != model_axis)
        replicas = Replicas(mesh, 1, batch_axes=batch_axes, axis_name=chosen_name(axis_name))
        arguments = {"shard": shard, "mesh": mesh, "model_axis": model_axis, "layout": layout, "axis_name": axis_name}
        if offload is not None:
            arguments["offload"] = offload
        rules = StateSharding(mesh, batch_axes[-1], shard, host_tile=_host_tile(offload, mesh), **layout_fields)
        backend = AutoShardedBackend(replicas, rules)
        super().__init__(backend, arguments=arguments)
        self._on_mesh = backend.to_mesh
        self._context = dataclasses.replace(self._context, constraints=rules.gradient_constraint)


def _host_tile(offload: object, mesh: Mesh) -> tuple[int, ...] | None:
    """Returns `StateSharding.host_tile` for the argument `offload`.

    Raises:
        ValueError: `offload` is unknown, or programs cannot address the host memory of the devices.
    """
    if offload is None:
        return None
    if offload != "optimizer":
        raise ValueError(
            f'`offload` is "optimizer" or None, got {one_line(offload)}. To store the parameters in host memory too, use '
            "`CentralStorageStrategy()`."
        )
    check_host_memory(
        mesh, 'Otherwise leave `offload` out, and split the state over the devices: `ShardedStrategy("all")`.'
    )
    return (8, 128) if mesh.devices.flat[0].platform == "tpu" else ()


def _check_shard(shard: object) -> None:
    if isinstance(shard, Mesh):
        raise TypeError("The mesh is passed by name: `ShardedStrategy(mesh=mesh)`. The first argument is `shard`.")
    normalized = "".join(filter(str.isalnum, shard.lower())) if isinstance(shard, str) else ""
    if normalized in _OTHER_NAMES:
        raise ValueError(
            f'`shard` is "all" (ZeRO stage 3, FSDP), "gradients" (stage 2) or "optimizer" (stage 1), got {shard!r}: write '
            f'`ShardedStrategy("{_OTHER_NAMES[normalized]}")`.'
        )


def _check_mesh(mesh: Mesh, model_axis: str | None, axis_name: str) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f'`mesh` is a `jax.sharding.Mesh`, got {type(mesh).__name__}: write `Mesh(np.array(devices), ("data",))`.'
        )
    if not mesh.size:
        raise ValueError("The mesh is empty: it needs at least one device.")
    names = ", ".join(map(repr, mesh.axis_names))
    if model_axis is not None and model_axis not in mesh.axis_names:
        raise ValueError(
            f"`model_axis` is {one_line(model_axis)}, and the mesh has the axes {names}. Name one of these, or add the axis to "
            "the mesh."
        )
    if REPLICA_AXIS in mesh.axis_names:
        raise ValueError(
            f"The mesh has an axis {REPLICA_AXIS!r}, which is the name of the axis of a step's one replica. Rename it."
        )
    check_axis_name(axis_name)
    if axis_name in mesh.axis_names:
        raise ValueError(
            f"The mesh has an axis {axis_name!r}, and `axis_name` gives this name to the axis of a step's one replica. Rename "
            "the axis of the mesh."
        )
    if len(mesh.axis_names) == (model_axis is not None):
        raise ValueError(
            f"The mesh has the axes {names}, and none of them is for the batch. Add one, of size 1 if necessary: "
            f'`Mesh(devices.reshape(1, -1), ("data", {model_axis!r}))`.'
        )
    check_auto_axes(mesh, "`ShardedStrategy`")
