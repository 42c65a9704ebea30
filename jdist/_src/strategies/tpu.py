"""`TPUStrategy`: one replica per TPU core, on attached TPUs or on the topology devices of a named topology."""

from collections.abc import Mapping
from typing import final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist._src.cluster.resolver import ClusterResolver
from jdist._src.core.tree import one_line
from jdist._src.devices.mesh import (
    GROUP_AXIS,
    REPLICA_AXIS,
    check_axis_name,
    check_mesh_argument,
    mesh_of_replicas,
    model_mesh,
    resolved_sizes,
)
from jdist._src.devices.topology import topology_devices
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.multi_worker import start_devices
from jdist._src.strategies.replica_backend import replica_backend
from jdist._src.values.state_sharding import Layout


@final
class TPUStrategy(Strategy):
    """One replica on each TPU core; every replica holds a full copy of the state, and all copies stay equal.

    The strategy uses all cores of the slice, including the cores of other hosts: each host runs the same program. The replicas
    are in the order that JAX's `mesh_utils` computes for the network of the chips. Each of several slices, connected by the
    network of the data center, is a group along a mesh axis `"group"` beside `"replica"`. Collectives reduce over both axes.

    Unlike in TensorFlow, the TPU system needs no initialization: JAX initializes it at its first use.

    Args:
        cluster_resolver: Describes the hosts, such as `jdist.cluster.TPUClusterResolver()`, and joins their processes. Not
            needed on a single host, or after `jax.distributed.initialize()`.
        topology: The generation and shape of a slice without hardware: `"v5e:4x4"`. The strategy then compiles programs for it
            with the TPU compiler (`compile`), and cannot run them.
        num_slices: The number of slices of `topology`.
        axis_name: The name of the replica axis in replica functions, see `MirroredStrategy`. The cores of several slices are
            then along this one axis.
        mesh: The sizes of the axes of a mesh of all cores, `{"replica": -1, "model": 4}`: a replica is a group of neighbouring
            cores of a slice, see `MirroredStrategy`. Or a mesh with the axis of the replicas first.
        layout: The partition of parameters over the model axes of `mesh`; see `MirroredStrategy`.

    Raises:
        RuntimeError: There is no TPU; the message lists the devices that exist.
        ValueError: The topology is unknown; the message lists the known ones.
        TypeError: The resolver is not a `ClusterResolver`.
        ModuleNotFoundError: The compiler for topologies is not installed.

    Example:
        >>> strategy = jdist.TPUStrategy(topology="v5e:4x4")
        >>> strategy.num_replicas_in_sync
        16
        >>> scale = strategy.step(lambda w, x: (w * jdist.all_reduce("mean", x), None))
        >>> w, x = jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((16,), "float32")
        >>> program = strategy.compile(scale, w, jdist.PerReplica(x))
        >>> "all-reduce" in program.as_text()
        True
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        topology: str | None = None,
        num_slices: int = 1,
        axis_name: str = REPLICA_AXIS,
        mesh: Mesh | Mapping[str, int] | None = None,
        layout: Layout | None = None,
    ):
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise TypeError(
                f"`cluster_resolver` is such as `jdist.cluster.TPUClusterResolver()`, got {one_line(cluster_resolver)}. Pass a "
                "topology "
                'to compile for by name: `TPUStrategy(topology="v5e:4x4")`.'
            )
        if (topology is None and num_slices != 1) or (topology is not None and cluster_resolver is not None):
            raise ValueError(
                f"`TPUStrategy({cluster_resolver=}, {topology=}, {num_slices=})`: `num_slices` applies to a topology without "
                "hardware, and a resolver to attached TPUs. Omit one of them."
            )
        if topology is not None:
            devices = topology_devices(topology, num_slices=num_slices)
        else:
            if cluster_resolver is not None:
                cluster_resolver.initialize()
            devices = _attached_tpus()
        check_axis_name(axis_name)
        if isinstance(mesh, Mesh):
            grid = model_mesh(mesh, devices, axis_name)
        else:
            grid = _mesh(devices, {axis_name: -1} if mesh is None else check_mesh_argument(mesh, axis_name), axis_name)
        backend, ops, options = replica_backend(grid, axis_name=axis_name, layout=layout)
        # Without the resolver: it identifies this process, and another process may read the pickle.
        arguments = {
            "topology": topology,
            "num_slices": num_slices,
            "axis_name": axis_name,
            "mesh": dict(mesh) if isinstance(mesh, Mapping) else mesh,
            "layout": layout,
        }
        super().__init__(backend, ops, options, arguments=arguments, cluster_resolver=cluster_resolver)


def _attached_tpus() -> list[jax.Device]:
    try:
        return start_devices("tpu")
    except RuntimeError as error:
        names = ", ".join(str(device) for device in jax.local_devices())
        raise RuntimeError(
            f"There is no TPU: JAX has the devices {names}, and reports for TPUs: {str(error).splitlines()[0]}. In a notebook, "
            'choose a runtime with a TPU; on a TPU machine, `pip install "jax[tpu]"`, and do not set JAX_PLATFORMS to another '
            'platform. To compile for a TPU without hardware, name its topology: `TPUStrategy(topology="v5e:4x4")`. '
            "`jdist.auto_strategy()` uses the devices that exist."
        ) from error


def _mesh(devices: list[jax.Device], sizes: Mapping[str, int], axis_name: str) -> Mesh:
    """Returns a mesh of the devices in the order of `mesh_utils`, with a row per slice if all axes have their default names."""
    from jax.experimental import mesh_utils

    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    num_replicas, *model_sizes = shape = resolved_sizes(sizes, len(devices))
    if num_replicas % num_slices:
        raise ValueError(
            f"`mesh={dict(sizes)}` has {num_replicas} replicas on {num_slices} slices, so a replica would span slices. Choose "
            f"a multiple of {num_slices} replicas."
        )
    cores = {getattr(device, "core_on_chip", 0) for device in devices}
    if devices[0].device_kind == "TPU v4" and len(cores) > 1:
        grid = np.array(devices)  # topology devices are cores here, and `mesh_utils` expects one device per chip
    elif num_slices == 1:
        grid = np.asarray(mesh_utils.create_device_mesh(shape, devices))
    else:
        slice_shape, slices = (num_replicas // num_slices, *model_sizes), (num_slices, *[1] * len(model_sizes))
        grid = np.asarray(mesh_utils.create_hybrid_device_mesh(slice_shape, slices, devices))
    if num_slices == 1 or axis_name != REPLICA_AXIS or model_sizes:
        return mesh_of_replicas(grid.reshape(shape), list(sizes)[1:], axis_name)
    axes = (GROUP_AXIS, REPLICA_AXIS)
    return Mesh(grid.reshape(num_slices, -1), axes, axis_types=(AxisType.Auto,) * 2)
