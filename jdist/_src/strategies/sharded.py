"""`ShardedStrategy`: one replica over many devices, its state split over them."""

from collections.abc import Mapping
from typing import final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jdist._src.devices.mesh import REPLICA_AXIS, Replicas, warn_if_local
from jdist._src.execution.auto_sharded import AutoShardedBackend
from jdist._src.strategies.base import Strategy
from jdist._src.values.state_sharding import Shard, StateSharding

DATA_AXIS = "data"


@final
class ShardedStrategy(Strategy):
    """One replica over many devices: the step sees the global batch, and each device holds a part of the state.

    The step is the same as under other strategies, and its collectives are the identity: there is one replica. XLA splits its
    work over the devices, and gathers parameters and scatters gradients where that is needed. Batch statistics, random
    numbers and whatever else a replica has to itself are those of the global batch, as on one device.

    Args:
        shard: What the data axis splits: `"optimizer"`, the optimizer's state (ZeRO stage 1); `"gradients"`, the gradients
            that `jdist.all_reduce` is given too (stage 2; XLA may well do so under `"optimizer"`, where it takes less time);
            `"all"`, the parameters and the rest of the state too (stage 3, FSDP). A leaf is split along its largest dim that
            divides; if none does, it is whole on every device. The optimizer's state is what optax and `jdist.sync` keep, and
            what lies under the name `opt_state`, `optimizer_state` or `optimizer`.
        mesh: The devices; one axis, `"data"`, over all local ones by default. The batch is split over all of its axes but
            the model axis, the state over the last of these: a mesh of `("host", "data")` splits the state over the devices
            of a host, and every host has all of it.
        model_axis: The mesh axis of tensor parallelism, for `layout` to name.
        layout: From regular expressions, searched in the paths of parameters (`params/dense/kernel`), to how these are
            split: `{"dense/kernel": PartitionSpec(None, "model")}`. What the optimizer keeps for a parameter is split as the
            parameter is, and `shard` comes on top.

    Raises:
        ValueError: `shard` or an axis is not known; or, when a state is placed, a pattern is found in no parameter, or two
            are in one, or its axis does not divide the dim.
        TypeError: The mesh is none, or `layout` is of another kind.

    Example:
        >>> strategy = jdist.ShardedStrategy("all")
        >>> state = strategy.init(lambda: {"w": jax.numpy.zeros((8, 16)), "b": jax.numpy.zeros(3)})
        >>> [x.addressable_shards[0].data.shape for x in (state["w"], state["b"])]
        [(8, 2), (3,)]
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        shard: Shard = "all",
        mesh: Mesh | None = None,
        model_axis: str | None = None,
        layout: Mapping[str, PartitionSpec] | None = None,
    ):
        if mesh is None:
            warn_if_local("ShardedStrategy", None, 'ShardedStrategy(mesh=Mesh(np.array(jax.devices()), ("data",)))')
        mesh = _checked(mesh, model_axis)
        if not isinstance(layout, Mapping | None):
            raise TypeError(f"`layout` maps patterns to `PartitionSpec`s, got {type(layout).__name__}.")
        batch_axes = tuple(axis for axis in mesh.axis_names if axis != model_axis)
        replicas = Replicas(mesh, 1, split=batch_axes)
        arguments = {"shard": shard, "mesh": mesh, "model_axis": model_axis, "layout": layout}
        view = AutoShardedBackend(replicas, StateSharding(mesh, batch_axes[-1], shard, dict(layout or {})))
        super().__init__(view, arguments=arguments)


def _checked(mesh: Mesh | None, model_axis: str | None) -> Mesh:
    if mesh is None:
        mesh = Mesh(np.array(jax.local_devices()), (DATA_AXIS,), axis_types=(AxisType.Auto,))
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f'`mesh` is a `jax.sharding.Mesh`, got {type(mesh).__name__}: write `Mesh(np.array(devices), ("data",))`.'
        )
    if not mesh.size:
        raise ValueError("The mesh has no devices.")
    names = ", ".join(map(repr, mesh.axis_names))
    if model_axis is not None and model_axis not in mesh.axis_names:
        raise ValueError(
            f"`model_axis` is {model_axis!r}, and the mesh has {names}. Name one of these, or give such a mesh."
        )
    if REPLICA_AXIS in mesh.axis_names:
        raise ValueError(
            f"The mesh has an axis {REPLICA_AXIS!r}, by which a step calls the axis of its one replica. Give it another name."
        )
    if len(mesh.axis_names) == (model_axis is not None):
        raise ValueError(
            f"The mesh has {names}, and no axis for the batch. Add one, of size 1 if need be: "
            f'`Mesh(devices.reshape(1, -1), ("data", {model_axis!r}))`.'
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        # JAX's own `make_mesh` makes explicit axes, under which it refuses what it would otherwise split by itself.
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return mesh
