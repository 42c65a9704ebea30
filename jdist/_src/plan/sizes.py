"""A strategy and the arguments of its step for another number of devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdist._src.core.tree import PyTree
from jdist._src.devices.topology import Topology, is_topology_device, topology_of
from jdist._src.strategies.base import Strategy
from jdist._src.values.base import is_distributed


def with_num_devices(strategy: Strategy, count: int) -> Strategy:
    """Returns a strategy of the same class and options on `count` devices of the same kind.

    The mesh of a strategy with several axes grows or shrinks along its first axis.

    Raises:
        ValueError: There are no such devices, or the other axes do not divide them.
    """
    if count == strategy.mesh.size:
        return strategy
    first = strategy.devices[0]
    if is_topology_device(first):
        return on_topology(strategy, topology_of(first).of_size(count))
    return _on_devices(strategy, _attached_devices(first, count))


def on_topology(strategy: Strategy, topology: Topology) -> Strategy:
    """Returns a strategy of the same class and options on the devices of a topology."""
    if strategy._arguments.get("topology"):
        options = {"topology": topology.topology, "num_slices": topology.num_slices}
        return type(strategy)(**{**strategy._arguments, **options})
    return _on_devices(strategy, topology.devices())


def _on_devices(strategy: Strategy, devices: list[jax.Device]) -> Strategy:
    arguments, count = dict(strategy._arguments), len(devices)
    mesh = arguments.get("mesh")
    if isinstance(mesh, Mesh):
        others = mesh.size // mesh.devices.shape[0]
        if count % others:
            axes = " x ".join(f"{axis!r} {size}" for axis, size in mesh.shape.items())
            raise ValueError(f"{count:,} devices cannot form a mesh like {axes}: use a multiple of {others}.")
        grid = np.array(devices).reshape(count // others, *mesh.devices.shape[1:])
        arguments["mesh"] = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    elif key := next((key for key in ("devices", "compute_devices") if key in arguments), None):
        arguments[key] = devices
    else:
        raise ValueError(
            f"`over` contains {count}, and the number of devices of a {type(strategy).__name__} ({strategy.mesh.size}) cannot "
            "be chosen. Pass strategies instead of numbers."
        )
    return type(strategy)(**arguments)


def _attached_devices(like: jax.Device, count: int) -> list[jax.Device]:
    devices = jax.devices(like.platform)
    if count <= len(devices):
        return devices[:count]
    advice = (
        f"`jdist.use_cpu_devices({count})` at the start of the program creates them (at most 2,048)"
        if like.platform == "cpu"
        else "Plan with a strategy on topology devices, which need not be attached: `jdist.TPUStrategy(topology=...)` or "
        "`jdist.MirroredStrategy(jdist.topology_devices(...))`"
    )
    raise ValueError(f"There are {len(devices)} {like.platform} devices, and `over` contains {count}. {advice}.")


def scaled_state(state: PyTree, old: Strategy, new: Strategy) -> PyTree:
    """Returns the shapes of a state of the strategy `old` for `new`: values per replica have another number of replicas."""
    size = new.num_replicas_in_sync
    return state if size == old.num_replicas_in_sync else _reshaped(state, lambda shape: (size, *shape[1:]))


def scaled_inputs(inputs: Sequence[PyTree], old: Strategy, new: Strategy) -> Sequence[PyTree]:
    """Returns the shapes of the inputs of a step of `old` for `new`, with the same number of examples per device."""
    size = new.num_replicas_in_sync
    before, after = (each.replicas.num_parts / each.replicas.size for each in (old, new))
    scaled = lambda examples: examples if before == after else round(examples * after / before)
    return _reshaped(inputs, lambda shape: (size, *map(scaled, shape[1:2]), *shape[2:]))


def batch_for(inputs: Sequence[PyTree], new: Strategy) -> Sequence[PyTree]:
    """Returns the shapes of the same global batch for a strategy with another number of replicas."""
    size = new.num_replicas_in_sync
    return _reshaped(
        inputs, lambda shape: (size, *(shape[0] * examples // size for examples in shape[1:2]), *shape[2:])
    )


def with_smaller_batch(inputs: Sequence[PyTree], divisor: int) -> Sequence[PyTree] | None:
    """Returns the shapes of inputs with a fraction of the examples per replica; None if the examples are not divisible."""
    items = filter(_is_per_replica, jax.tree.leaves(inputs, is_leaf=is_distributed))
    shapes = [leaf.shape for item in items for leaf in jax.tree.leaves(item)]
    if not shapes or any(len(shape) < 2 or shape[1] % divisor for shape in shapes):
        return None
    return _reshaped(inputs, lambda shape: (shape[0], shape[1] // divisor, *shape[2:]))


def _reshaped(tree: PyTree, new_shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """Returns a tree in which the shapes `[replica, batch, ...]` of values per replica are replaced."""

    def reshaped(item: Any) -> Any:
        if not _is_per_replica(item):
            return item
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(new_shape(x.shape), x.dtype), item)

    return jax.tree.map(reshaped, tree, is_leaf=is_distributed)


def _is_per_replica(item: Any) -> bool:
    return is_distributed(item) and item._is_stacked
