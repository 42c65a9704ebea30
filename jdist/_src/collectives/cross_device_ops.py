"""How the values of the replicas are added up: which collectives, over which buffers.

`all_reduce` says what; an algorithm says how, for one array; `CommunicationOptions` say which leaves travel together.
The result is the same but for the order in which floating-point numbers are added. Every algorithm ends in a collective
that hands all replicas the same bits, so that the proof (`jdist._src.jaxpr.replication`) holds whichever is chosen.
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

from jdist._src.devices.mesh import group_mesh, local_mesh_devices
from jdist._src.values.reduce_op import ReduceOp, from_sortable, sortable

Axes: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Which leaves of a tree travel together.

    Attributes:
        bytes_per_pack: Leaves smaller than this are packed into one buffer a dtype, and reduced at once; larger ones go
            alone. 0 packs nothing; None is what was measured to be best for the devices: on one process's CPU devices
            128 KiB, since XLA's CPU collectives take some 0.1 ms for each leaf; on several processes' everything, since
            there every leaf is a message; on GPU and TPU 0, since XLA combines small collectives by itself.

    Raises:
        ValueError: A number of bytes is negative.

    Example:
        >>> CommunicationOptions(bytes_per_pack=-1)
        Traceback (most recent call last):
        ValueError: `bytes_per_pack` has to be >= 0, got -1. ...
    """

    bytes_per_pack: int | None = None

    def __post_init__(self) -> None:
        _check_bytes("bytes_per_pack", self.bytes_per_pack)

    def resolved(self, mesh: Mesh) -> "CommunicationOptions":
        """The same options, with what they leave to the devices decided for those of `mesh`."""
        if self.bytes_per_pack is not None:
            return self
        if mesh.size == 1 or not _on_cpu(mesh):
            return CommunicationOptions(0)
        return CommunicationOptions(_SMALL if _in_one_process(mesh) else sys.maxsize)


class CrossDeviceOps(abc.ABC):
    """An algorithm that reduces one array over the replicas."""

    @abc.abstractmethod
    def reduce(self, op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
        """`x` of all replicas along `axes`, reduced by SUM, MAX or MIN; the same bits on every one.

        A MAX or MIN of floats is NaN where any replica's value is; `lax.pmax` drops NaN on the CPU, `AllReduce` does not.
        """

    def resolved(self, mesh: Mesh) -> "CrossDeviceOps":
        """The same algorithm, with what it leaves to the devices decided for those of `mesh`."""
        return self

    def arranged(self, mesh: Mesh) -> Mesh:
        """The mesh with the axes that the algorithm needs."""
        return mesh


@final
@dataclasses.dataclass(frozen=True)
class AllReduce(CrossDeviceOps):
    """XLA's own all-reduce; of large arrays, where that is faster, a reduce-scatter and an all-gather.

    Attributes:
        bytes_to_scatter: Sums from this size on are reduce-scattered and gathered, which adds each number up on one
            replica only, if the replicas can split them evenly: filling up costs more than is gained. None is what was
            measured to be best for the devices: 2 MiB on one process's CPU devices, where it is faster than an all-reduce
            (`benchmarks/all_reduce.py`); elsewhere XLA's all-reduce does so by itself.

    Raises:
        ValueError: A number of bytes is negative.

    Source:
        P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
        Parallel and Distributed Computing 69 (2009): an all-reduce is a reduce-scatter and an all-gather.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=AllReduce(bytes_to_scatter=0))
        >>> strategy.run(lambda: jdist.all_reduce("sum", np.arange(3) + jdist.replica_id())).tolist()
        [1, 3, 5]
    """

    bytes_to_scatter: int | None = None

    def __post_init__(self) -> None:
        _check_bytes("bytes_to_scatter", self.bytes_to_scatter)

    def reduce(self, op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
        """See `CrossDeviceOps.reduce`."""
        least = self.bytes_to_scatter
        splits = x.size and x.size % num_replicas(axes) == 0
        if op is ReduceOp.SUM and least is not None and splits and x.nbytes >= least:
            return _in_parts(x, axes, lambda part: part)
        return _reduced(op, x, axes)

    def resolved(self, mesh: Mesh) -> "AllReduce":
        """See `CrossDeviceOps.resolved`."""
        decides = self.bytes_to_scatter is None and mesh.size > 1 and _on_cpu(mesh) and _in_one_process(mesh)
        return AllReduce(2 * 2**20) if decides else self


@final
@dataclasses.dataclass(frozen=True)
class ReductionToOneDevice(CrossDeviceOps):
    """The values side by side, added up in the order of the replicas: the bits do not depend on the backend's algorithm.

    TensorFlow adds on one device and sends the sum to the others. All devices of a JAX program do the same, so here every
    one gathers the values and adds them up, and there is nothing to send back. It needs memory for the values of all
    replicas: for few and small values.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ReductionToOneDevice())
        >>> float(strategy.run(lambda: jdist.all_reduce("mean", jdist.replica_id())))
        0.5
    """

    def reduce(self, op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
        """See `CrossDeviceOps.reduce`."""
        return functools.reduce(_PAIRS[op], lax.all_gather(x, axes))


@final
@dataclasses.dataclass(frozen=True)
class HierarchicalAllReduce(CrossDeviceOps):
    """Sums in two levels: scattered over the replicas of a group, added between groups, gathered in the group.

    Between the groups, where the network is slow, only one part of `group_size` is sent by each replica. The mesh of the
    strategy gets two axes, `"group"` and `"replica"`, and jdist's words mean both. XLA does this by itself where it knows
    of slices of a TPU pod; it is for clusters that XLA does not know.

    Attributes:
        group_size: How many neighbouring replicas form a group; by default those of one process.

    Raises:
        ValueError: Groups of that size cannot be formed.

    Source:
        X. Jia et al., "Highly scalable deep learning training system with mixed-precision", arXiv:1807.11205: hierarchical
        all-reduce.

    Example:
        >>> strategy = jdist.MirroredStrategy(cross_device_ops=HierarchicalAllReduce(group_size=4))
        >>> dict(strategy.mesh.shape)
        {'group': 2, 'replica': 4}
        >>> strategy.run(lambda: jdist.all_reduce("sum", jdist.replica_id())).tolist()
        28
    """

    group_size: int | None = None

    def reduce(self, op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
        """See `CrossDeviceOps.reduce`."""
        *between, within = axes
        if op is not ReduceOp.SUM or not between or not x.size:
            return _reduced(op, x, axes)
        return _in_parts(x, (within,), lambda part: lax.psum(part, tuple(between)))

    def arranged(self, mesh: Mesh) -> Mesh:
        """See `CrossDeviceOps.arranged`."""
        return group_mesh(mesh, len(local_mesh_devices(mesh)) if self.group_size is None else self.group_size)


def all_reduce_packed(
    op: ReduceOp, leaves: Sequence[jax.Array], axes: Axes, ops: CrossDeviceOps, options: CommunicationOptions
) -> list[jax.Array]:
    """Each leaf reduced by SUM, MAX or MIN over the replicas, small ones in packs of their dtype."""
    packs: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        small = leaf.nbytes < (options.bytes_per_pack or 0)
        packs.setdefault(leaf.dtype if small else number, []).append(number)
    results = list(leaves)
    for numbers in packs.values():
        reduced = _pack([leaves[number] for number in numbers], lambda buffer: ops.reduce(op, buffer, axes))
        for number, leaf in zip(numbers, reduced, strict=True):
            results[number] = leaf
    return results


def _pack(leaves: Sequence[jax.Array], fn: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """`fn`, which keeps shapes, of all leaves as one buffer."""
    if len(leaves) == 1:
        return [fn(leaves[0])]
    buffer = fn(jnp.concatenate([leaf.ravel() for leaf in leaves]))
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    return [buffer[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]


def _reduced(op: ReduceOp, x: jax.Array, axes: Axes) -> jax.Array:
    """XLA's all-reduce of `x`, in which NaN counts as the greatest for MAX and as the least for MIN."""
    return from_sortable(op, _COLLECTIVES[op](sortable(op, x), axes), x.dtype)


def _in_parts(x: jax.Array, axes: Axes, fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The sum of `x` over `axes`, made part by part: each replica adds up one, applies `fn`, and hands it to the others."""
    flat = jnp.pad(x.ravel(), (0, -x.size % num_replicas(axes)))
    part = fn(lax.psum_scatter(flat, axes, tiled=True))
    return lax.all_gather(part, axes, tiled=True)[: x.size].reshape(x.shape)


def num_replicas(axes: Axes) -> int:
    """How many replicas lie along `axes`, known while tracing."""
    return math.prod(map(lax.axis_size, axes))


def _on_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _in_one_process(mesh: Mesh) -> bool:
    return len(local_mesh_devices(mesh)) == mesh.size


def _check_bytes(name: str, value: int | None) -> None:
    if not isinstance(value, int | None):
        raise TypeError(f"`{name}` is a whole number of bytes, or None, got {value!r}.")
    if value is not None and value < 0:
        raise ValueError(f"`{name}` has to be >= 0, got {value}. It is a number of bytes; None leaves it to jdist.")


_SMALL = 128 * 2**10  # bytes of a leaf that is packed on CPU devices
_COLLECTIVES = {ReduceOp.SUM: lax.psum, ReduceOp.MAX: lax.pmax, ReduceOp.MIN: lax.pmin}
_PAIRS = {ReduceOp.SUM: jnp.add, ReduceOp.MAX: jnp.maximum, ReduceOp.MIN: jnp.minimum}


def resolve_communication(
    mesh: Mesh, ops: CrossDeviceOps | None, options: CommunicationOptions | None, virtual: bool
) -> tuple[Mesh, CrossDeviceOps, CommunicationOptions]:
    """What a strategy is asked for, with the defaults decided for these devices; and the mesh with the axes that it needs.

    Raises:
        TypeError: An option is of another kind.
        ValueError: The replicas do not make the groups that are asked for; or they are virtual, with a tree of their own.
    """
    chosen = _of_kind("cross_device_ops", ops, CrossDeviceOps, AllReduce)
    packing = _of_kind("communication_options", options, CommunicationOptions, CommunicationOptions)
    if virtual and ops is not None:
        raise ValueError(
            f"Virtual replicas are added up along a tree of their own: leave `cross_device_ops={ops!r}` out."
        )
    mesh = chosen.arranged(mesh)
    if not virtual:
        return mesh, chosen.resolved(mesh), packing.resolved(mesh)
    if packing.bytes_per_pack is None:
        # Whatever the number of devices: a leaf out of a pack is fused otherwise with its update, and so rounded otherwise.
        packing = CommunicationOptions(_SMALL if _on_cpu(mesh) else 0)
    return mesh, chosen, packing


def _of_kind(name: str, value: Any, kind: type, default: Callable[[], Any]) -> Any:
    """The option `value`, or its default for None; raises TypeError if it is of another kind."""
    if value is None:
        return default()
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` is a {kind.__name__}, such as `jdist.{default.__name__}()`, got {value!r}.")  # pyright: ignore
    return value
