"""The backend of the strategies whose replicas are devices, or groups of devices, of one mesh."""

from jax.sharding import Mesh

from jdist._src.collectives.cross_device_ops import (
    CommunicationOptions,
    CrossDeviceOps,
    HierarchicalAllReduce,
    resolve_communication,
)
from jdist._src.devices.mesh import REPLICA_AXIS, Replicas, has_model_axes
from jdist._src.execution.backend import Backend
from jdist._src.execution.shard_map import ShardMapBackend
from jdist._src.execution.virtual import VirtualBackend
from jdist._src.values.state_sharding import Layout, StateSharding, layout_rules


def replica_backend(
    mesh: Mesh,
    *,
    cross_device_ops: CrossDeviceOps | None = None,
    communication_options: CommunicationOptions | None = None,
    virtual_replicas: int | None = None,
    axis_name: str = REPLICA_AXIS,
    layout: Layout | None = None,
) -> tuple[Backend, CrossDeviceOps, CommunicationOptions]:
    """Returns the backend of a strategy, and its reductions with their defaults resolved.

    Args:
        mesh: The devices, with the axis of the replicas first.
        cross_device_ops: See `MirroredStrategy`.
        communication_options: See `MirroredStrategy`.
        virtual_replicas: See `MirroredStrategy`.
        axis_name: See `MirroredStrategy`.
        layout: See `MirroredStrategy`.

    Raises:
        TypeError: An option is not of its class.
        ValueError: The replicas do not form the groups of `cross_device_ops`; or there are fewer virtual replicas than devices;
            or `layout` is for model axes that the mesh does not have.
    """
    if axis_name != REPLICA_AXIS and isinstance(cross_device_ops, HierarchicalAllReduce):
        raise ValueError(
            f"`HierarchicalAllReduce` reduces over two axes, and `axis_name={axis_name!r}` names one. Omit one of them."
        )
    patterns = layout_rules(layout)
    if layout is not None and not has_model_axes(mesh):
        raise ValueError(
            "`layout` partitions the model of a replica over several devices, and here a replica is one device. Pass a mesh "
            'with a second axis, `mesh={"replica": -1, "model": 2}`, or omit `layout`.'
        )
    is_virtual = virtual_replicas is not None
    mesh, ops, options = resolve_communication(mesh, cross_device_ops, communication_options, is_virtual)
    replicas = Replicas.from_mesh(mesh, virtual_replicas, axis_name)
    rules = None
    if has_model_axes(mesh):
        rules = StateSharding(mesh, None, "optimizer", **patterns, replica_axes=replicas.mesh_axes)
    return (VirtualBackend if is_virtual else ShardMapBackend)(replicas, rules), ops, options
