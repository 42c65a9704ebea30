"""`TPUStrategy`: a replica a TPU core, those that are there, or those of a topology that is not."""

from typing import Any, final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist._src.cluster.resolver import ClusterResolver
from jdist._src.collectives.cross_device_ops import resolve_communication
from jdist._src.devices.mesh import GROUP_AXIS, REPLICA_AXIS, Replicas
from jdist._src.devices.topology import topology_devices
from jdist._src.execution.shard_map import ShardMapBackend
from jdist._src.strategies.base import Strategy


@final
class TPUStrategy(Strategy):
    """One replica on each TPU core; every replica holds the whole state, and all stay in step.

    Takes all cores of the slice, those of other hosts too: each host runs the same program. The replicas are in the order that
    JAX's `mesh_utils` finds best for the network of the chips. Of several slices, joined by the network of the data center,
    each is a group, along a mesh axis `"group"` beside `"replica"`: jdist's words mean both.

    There is no TPU system to be initialized as TensorFlow has it: JAX does it when it first uses a TPU.

    Args:
        cluster_resolver: Who the hosts are, such as `jdist.cluster.TPUClusterResolver()`, on several of them; it lets their
            processes join. Not needed where `jax.distributed.initialize()` was called, or on a single host.
        topology: Of a slice that is not there, its generation and shape: `"v5e:4x4"`. The strategy then compiles programs
            for it by the real compiler (`compile`), and runs none.
        num_slices: How many slices of `topology` there are.

    Raises:
        RuntimeError: There is no TPU; the message says what there is.
        ValueError: There is no such topology; the message lists those there are.
        TypeError: The resolver is none.
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
        self, cluster_resolver: ClusterResolver | None = None, topology: str | None = None, num_slices: int = 1
    ):
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise TypeError(
                f"`cluster_resolver` is such as `jdist.cluster.TPUClusterResolver()`, got {cluster_resolver!r}. A topology to "
                'compile for is named: `TPUStrategy(topology="v5e:4x4")`.'
            )
        if (topology is None and num_slices != 1) or (topology is not None and cluster_resolver is not None):
            raise ValueError(
                f"`TPUStrategy({cluster_resolver=}, {topology=}, {num_slices=})`: slices are counted of a topology that is not "
                "there, and a resolver is for TPUs that are. Leave one out."
            )
        if topology is not None:
            devices = topology_devices(topology, num_slices=num_slices)
        else:
            if cluster_resolver is not None:
                cluster_resolver.initialize()
            devices = _tpus()
        mesh, ops, options = resolve_communication(_mesh(devices), None, None, False)
        # Not the resolver: it knows which process this is, and another one may read the pickle.
        arguments = {"topology": topology, "num_slices": num_slices}
        super().__init__(ShardMapBackend(Replicas.on(mesh)), ops, options, arguments=arguments)


def _tpus() -> list[jax.Device]:
    try:
        return jax.devices("tpu")
    except RuntimeError as error:
        there = ", ".join(str(device) for device in jax.local_devices())
        raise RuntimeError(
            f"There is no TPU: JAX has {there} here, and says of TPUs: {str(error).splitlines()[0]}. In a notebook, choose a "
            'runtime with a TPU; on a TPU machine, `pip install "jax[tpu]"`, and do not set JAX_PLATFORMS to another. To '
            'compile for a TPU that is not there, name it: `TPUStrategy(topology="v5e:4x4")`. `jdist.auto_strategy()` takes '
            "what there is."
        ) from error


def _mesh(devices: list[jax.Device]) -> Mesh:
    """The devices in the order of `mesh_utils`, a row a slice."""
    from jax.experimental import mesh_utils

    slices = len({_slice(device) for device in devices})
    each = len(devices) // slices
    cores = {getattr(device, "core_on_chip", 0) for device in devices}
    if devices[0].device_kind == "TPU v4" and len(cores) > 1:
        grid = np.array(devices)  # described, a device a core, where `mesh_utils` knows one a chip
    elif slices == 1:
        grid = np.asarray(mesh_utils.create_device_mesh((each,), devices))
    else:
        grid = np.asarray(mesh_utils.create_hybrid_device_mesh((1, each), (slices, 1), devices))
    shape, axes = ((each,), (REPLICA_AXIS,)) if slices == 1 else ((slices, each), (GROUP_AXIS, REPLICA_AXIS))
    return Mesh(grid.reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", 0)
