"""All-reduce algorithms: which XLA collectives reduce a value over the replicas, and in which buffers.

`all_reduce_packed` reduces many leaves; a `CrossDeviceOps` is the algorithm for one array; `CommunicationOptions` select the
leaves that share a buffer. The results are equal up to the order of floating-point additions. Every algorithm ends in a
collective whose result is bitwise equal on all replicas, so that the proof (`jdist._src.jaxpr.replication`) holds for each.
"""

import abc
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jdist._src.core.arguments import check_seconds
from jdist._src.core.tree import one_line
from jdist._src.devices.mesh import Replicas, group_mesh, has_model_axes, local_mesh_devices
from jdist._src.jaxpr.marks import REDUCE_CALL, named_call
from jdist._src.values.reduce_op import ReduceOp, from_sortable, sortable

Axes: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Packing of small leaves into shared buffers, and the time limit of collectives.

    Attributes:
        bytes_per_pack: Leaves smaller than this are packed into one buffer per dtype and reduced together; larger leaves are
            reduced separately. 0 disables packing. None selects the fastest measured value for the devices: 128 KiB on the CPU
            devices of one process, where XLA's collectives take about 0.1 ms per leaf; unlimited for several processes on CPU,
            where each leaf is a message; 0 on GPU and TPU, where XLA combines small collectives, and where a replica is a
            group of devices.
        timeout_seconds: The time limit of a wait for other processes: in a step, a collective of the host program or a barrier.
            When a wait exceeds it and no process compiles or writes a checkpoint, every process prints the call that it waits
            in and the stacks of its threads, and ends with exit status 43. Pass it to a strategy. It applies to the process (of
            several limits, the largest), and is multiplied by `steps_per_call`; infinite for no limit. None for the
            environment variable `JDIST_TIMEOUT_SECONDS`, by default 600.

    Raises:
        ValueError: The number of bytes is negative, or the number of seconds is not positive.
        TypeError: The number of bytes is not an integer.

    Example:
        >>> CommunicationOptions(bytes_per_pack=-1)
        Traceback (most recent call last):
        ValueError: `bytes_per_pack` must be >= 0, got -1. ...
    """

    bytes_per_pack: int | None = None
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_bytes("bytes_per_pack", self.bytes_per_pack)
        if self.timeout_seconds is not None and self.timeout_seconds != math.inf:
            check_seconds("timeout_seconds", self.timeout_seconds)

    def resolve(self, mesh: Mesh) -> "CommunicationOptions":
        """Returns these options with None replaced by the value for the devices of `mesh`."""
        if self.bytes_per_pack is not None:
            return self
        # A leaf that is partitioned within a replica would be gathered to be packed.
        if mesh.size == 1 or not _on_cpu(mesh) or has_model_axes(mesh):
            return dataclasses.replace(self, bytes_per_pack=0)
        return dataclasses.replace(self, bytes_per_pack=_SMALL_BYTES if _in_one_process(mesh) else sys.maxsize)


class CrossDeviceOps(abc.ABC):
    """An algorithm that reduces one array over the replicas."""

    @abc.abstractmethod
    def reduce(self, op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
        """Returns `x` reduced by SUM, MAX or MIN over the replicas along `axes`, bitwise equal on all of them.

        MAX and MIN of floats are NaN where the value of any replica is NaN. `lax.pmax` drops NaN on CPU; `AllReduce` does not.
        """

    def is_direct(self, op: ReduceOp, x: jax.Array) -> bool:
        """Whether `x` is reduced by one collective, from which the analyses know the result."""
        return False

    def resolve(self, mesh: Mesh) -> "CrossDeviceOps":
        """Returns this algorithm with default parameters replaced by the values for the devices of `mesh`."""
        return self

    def arrange_mesh(self, mesh: Mesh) -> Mesh:
        """Returns `mesh` with the axes that the algorithm needs."""
        return mesh


@final
@dataclasses.dataclass(frozen=True)
class AllReduce(CrossDeviceOps):
    """XLA's all-reduce; for large arrays a reduce-scatter and an all-gather, on devices where this is faster.

    Attributes:
        bytes_to_scatter: Sums of at least this size use a reduce-scatter and an all-gather, so that each element is added up on
            one replica only. Sizes that the number of replicas does not divide use an all-reduce, because padding costs more
            than it gains. None selects the fastest measured value for the devices: 2 MiB on the CPU devices of one process
            (`benchmarks/all_reduce.py`); elsewhere always XLA's all-reduce, which does the same internally.

    Raises:
        ValueError: The number of bytes is negative.

    Source:
        P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
        Parallel and Distributed Computing 69 (2009): an all-reduce is a reduce-scatter and an all-gather.

    Example:
        >>> strategy = jdist.MirroredStrategy(
        ...     ["cpu:0", "cpu:1"], cross_device_ops=AllReduce(bytes_to_scatter=0)
        ... )
        >>> strategy.run(
        ...     lambda: jdist.all_reduce("sum", np.arange(3) + jdist.replica_id())
        ... ).tolist()
        [1, 3, 5]
    """

    bytes_to_scatter: int | None = None

    def __post_init__(self) -> None:
        _check_bytes("bytes_to_scatter", self.bytes_to_scatter)

    def reduce(self, op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
        """See `CrossDeviceOps.reduce`."""
        divides_evenly = x.size and x.size % num_replicas_along(axes) == 0
        if op is ReduceOp.SUM and divides_evenly and not self.is_direct(op, x):
            return _scattered_sum(x, axes, lambda shard: shard)
        return _xla_all_reduce(op, x, axes)

    def is_direct(self, op: ReduceOp, x: jax.Array) -> bool:
        """See `CrossDeviceOps.is_direct`."""
        return op is ReduceOp.SUM and (self.bytes_to_scatter is None or x.nbytes < self.bytes_to_scatter)

    def resolve(self, mesh: Mesh) -> "AllReduce":
        """See `CrossDeviceOps.resolve`."""
        # The leaf would be flattened, and so gathered within a replica that is a group of devices.
        is_flat = mesh.size > 1 and not has_model_axes(mesh)
        scatters = self.bytes_to_scatter is None and is_flat and _on_cpu(mesh) and _in_one_process(mesh)
        return AllReduce(2 * 2**20) if scatters else self


@final
@dataclasses.dataclass(frozen=True)
class ReductionToOneDevice(CrossDeviceOps):
    """Gathers the values and adds them in replica order: the order of additions does not depend on XLA's algorithm.

    TensorFlow adds on one device and sends the sum to the others. All devices of a JAX program run the same code, so here every
    device gathers the values and adds them, and the sum is not sent. This needs memory for the values of all replicas: use it
    for few and small values.

    Example:
        >>> strategy = jdist.MirroredStrategy(
        ...     ["cpu:0", "cpu:1"], cross_device_ops=ReductionToOneDevice()
        ... )
        >>> float(strategy.run(lambda: jdist.all_reduce("mean", jdist.replica_id())))
        0.5
    """

    def reduce(self, op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
        """See `CrossDeviceOps.reduce`."""
        return functools.reduce(_BINARY_OPS[op], lax.all_gather(x, axes))


@final
@dataclasses.dataclass(frozen=True)
class HierarchicalAllReduce(CrossDeviceOps):
    """Sums in two levels: a reduce-scatter in each group of replicas, an all-reduce between groups, an all-gather in the group.

    Between groups, where the network is slow, each replica sends only 1/`group_size` of the array. The mesh of the strategy has
    two axes, `"group"` and `"replica"`, and jdist's collectives use both. XLA does the same for the slices of a TPU pod; this
    class is for clusters whose topology XLA does not know.

    Attributes:
        group_size: The number of neighbouring replicas in a group; by default the replicas of a process.

    Raises:
        ValueError: `group_size` does not divide the number of replicas.

    Source:
        X. Jia et al., "Highly scalable deep learning training system with mixed-precision", arXiv:1807.11205: hierarchical
        all-reduce.

    Example:
        >>> strategy = jdist.MirroredStrategy(
        ...     cross_device_ops=HierarchicalAllReduce(group_size=4)
        ... )
        >>> dict(strategy.mesh.shape)
        {'group': 2, 'replica': 4}
        >>> strategy.run(lambda: jdist.all_reduce("sum", jdist.replica_id())).tolist()
        28
    """

    group_size: int | None = None

    def reduce(self, op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
        """See `CrossDeviceOps.reduce`."""
        *group_axes, replica_axis = axes
        if op is not ReduceOp.SUM or not group_axes or not x.size:
            return _xla_all_reduce(op, x, axes)
        return _scattered_sum(x, (replica_axis,), lambda shard: lax.psum(shard, tuple(group_axes)))

    def arrange_mesh(self, mesh: Mesh) -> Mesh:
        """See `CrossDeviceOps.arrange_mesh`."""
        num_local = len(Replicas.from_mesh(mesh).local_devices)
        return group_mesh(mesh, num_local if self.group_size is None else self.group_size)


def all_reduce_packed(
    op: ReduceOp, leaves: Sequence[jax.Array], axes: Axes, ops: CrossDeviceOps, options: CommunicationOptions
) -> list[jax.Array]:
    """Returns the leaves reduced by SUM, MAX or MIN over the replicas. Small leaves share one buffer per dtype."""
    packs: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        is_small = leaf.nbytes < (options.bytes_per_pack or 0)
        packs.setdefault(leaf.dtype if is_small else number, []).append(number)
    results = list(leaves)
    for numbers in packs.values():
        members = [leaves[number] for number in numbers]
        reduce = lambda *members: _apply_packed(members, lambda buffer: ops.reduce(op, buffer, axes))
        if len(members) > 1 or not ops.is_direct(op, members[0]):
            reduce = named_call(reduce, REDUCE_CALL, op.name)
        reduced = reduce(*members)
        for number, leaf in zip(numbers, reduced, strict=True):
            results[number] = leaf
    return results


def _apply_packed(leaves: Sequence[jax.Array], fn: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """Returns `fn`, which must keep the shape, applied to the concatenation of `leaves`, split into leaves again."""
    if len(leaves) == 1:
        return [fn(leaves[0])]
    buffer = fn(jnp.concatenate([leaf.ravel() for leaf in leaves]))
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    return [buffer[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]


def _xla_all_reduce(op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
    """Returns XLA's all-reduce of `x`. For MAX, NaN is the greatest value; for MIN, the least."""
    return from_sortable(op, _COLLECTIVES[op](sortable(op, x), axes), x.dtype)


def _scattered_sum(x: jax.Array, axes: Axes, fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the sum of `x` over `axes` as a reduce-scatter, `fn` of the shard on each replica, and an all-gather."""
    flat = jnp.pad(x.ravel(), (0, -x.size % num_replicas_along(axes)))
    shard = fn(lax.psum_scatter(flat, axes, tiled=True))
    return lax.all_gather(shard, axes, tiled=True)[: x.size].reshape(x.shape)


def num_replicas_along(axes: Axes) -> int:
    """Returns the number of replicas along `axes`, a Python int while tracing."""
    return math.prod(map(lax.axis_size, axes))


def _on_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _in_one_process(mesh: Mesh) -> bool:
    return len(local_mesh_devices(mesh)) == mesh.size


def _check_bytes(name: str, value: int | None) -> None:
    if not isinstance(value, int | None):
        raise TypeError(f"`{name}` must be an integer number of bytes or None, got {one_line(value)}.")
    if value is not None and value < 0:
        raise ValueError(f"`{name}` must be >= 0, got {value}. It is a number of bytes; None selects a default.")


_SMALL_BYTES = 128 * 2**10  # bytes per leaf below which CPU devices pack
_COLLECTIVES = {ReduceOp.SUM: lax.psum, ReduceOp.MAX: lax.pmax, ReduceOp.MIN: lax.pmin}
_BINARY_OPS = {ReduceOp.SUM: jnp.add, ReduceOp.MAX: jnp.maximum, ReduceOp.MIN: jnp.minimum}


def resolve_communication(
    mesh: Mesh, ops: CrossDeviceOps | None, options: CommunicationOptions | None, virtual: bool
) -> tuple[Mesh, CrossDeviceOps, CommunicationOptions]:
    """Returns the arguments of a strategy with defaults resolved for the devices, and the mesh with the axes that `ops` needs.

    Raises:
        TypeError: An argument has another type.
        ValueError: The replicas cannot form the groups of `ops`; or `ops` is not None and the replicas are virtual.
    """
    algorithm = _with_default("cross_device_ops", ops, CrossDeviceOps, AllReduce)
    packing = _with_default("communication_options", options, CommunicationOptions, CommunicationOptions)
    if virtual and ops is not None:
        raise ValueError(
            f"Virtual replicas are always added along one fixed tree, so `cross_device_ops={ops!r}` has no effect. Omit it."
        )
    mesh = algorithm.arrange_mesh(mesh)
    if not virtual:
        return mesh, algorithm.resolve(mesh), packing.resolve(mesh)
    if packing.bytes_per_pack is None:
        # Independent of the number of devices: XLA fuses, and so rounds, the update of an unpacked leaf differently.
        packing = dataclasses.replace(packing, bytes_per_pack=_SMALL_BYTES if _on_cpu(mesh) else 0)
    return mesh, algorithm, packing


def _with_default(name: str, value: Any, kind: type, default: Callable[[], Any]) -> Any:
    """Returns the argument `value`, or its default for None; raises TypeError if it is not a `kind`."""
    if value is None:
        return default()
    if not isinstance(value, kind):
        example = f"`jdist.{default.__name__}()`"  # pyright: ignore
        raise TypeError(f"`{name}` must be a {kind.__name__}, such as {example}, got {one_line(value)}.")
    return value
