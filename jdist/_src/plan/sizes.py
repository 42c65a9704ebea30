"""A strategy and the arguments of its step for another number of devices."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdist._src.core.tree import PyTree
from jdist._src.devices.topology import Topology, is_topology_device, topology_of
from jdist._src.strategies.base import Strategy
from jdist._src.values.base import is_distributed


def of_size(strategy: Strategy, count: int) -> Strategy:
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
    return _on_devices(strategy, _attached(first, count))


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
            f"`over` contains {count}, and a {type(strategy).__name__} runs on {strategy.mesh.size} devices only. Pass "
            "strategies instead of numbers."
        )
    return type(strategy)(**arguments)


def _attached(like: jax.Device, count: int) -> list[jax.Device]:
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

    def scaled(item: Any) -> Any:
        if not (is_distributed(item) and item._is_stacked):
            return item
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), item)

    if size == old.num_replicas_in_sync:
        return state
    return jax.tree.map(scaled, state, is_leaf=is_distributed)


def scaled_inputs(inputs: Sequence[PyTree], old: Strategy, new: Strategy) -> list[PyTree]:
    """Returns the shapes of the inputs of a step of `old` for `new`, with the same number of examples per device."""

    def scaled(item: Any) -> Any:
        if not (is_distributed(item) and item._is_stacked):
            return item
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(_scaled_shape(x.shape, old, new), x.dtype), item)

    return [jax.tree.map(scaled, tree, is_leaf=is_distributed) for tree in inputs]


def _scaled_shape(shape: tuple[int, ...], old: Strategy, new: Strategy) -> tuple[int, ...]:
    """Returns the shape `[replica, batch, ...]` with the number of parts of the batch of `new`, each as large as in `old`."""
    replicas, parts = new.num_replicas_in_sync, (old.replicas, new.replicas)
    per_replica = [each.num_parts / each.size for each in parts]
    if len(shape) < 2 or per_replica[0] == per_replica[1]:
        return (replicas, *shape[1:])
    return (replicas, round(shape[1] * per_replica[1] / per_replica[0]), *shape[2:])


def with_batch(inputs: Sequence[PyTree], divisor: int) -> list[PyTree] | None:
    """Returns the shapes of inputs with a fraction of the examples per replica; None if the examples are not divisible."""
    leaves = [
        leaf
        for tree in inputs
        for item in jax.tree.leaves(tree, is_leaf=is_distributed)
        if is_distributed(item) and item._is_stacked
        for leaf in jax.tree.leaves(item)
    ]
    if not leaves or any(len(leaf.shape) < 2 or leaf.shape[1] % divisor for leaf in leaves):
        return None

    def divided(item: Any) -> Any:
        if not (is_distributed(item) and item._is_stacked):
            return item
        shape = lambda x: (x.shape[0], x.shape[1] // divisor, *x.shape[2:])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype), item)

    return [jax.tree.map(divided, tree, is_leaf=is_distributed) for tree in inputs]
