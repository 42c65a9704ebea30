"""Variants of a step that does not fit, and of its strategy, each compiled for the same devices."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from jdist._src.core.tree import PyTree
from jdist._src.plan.sizes import batch_for, with_smaller_batch
from jdist._src.replica.gradients import GradientOptions
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.sharded import ShardedStrategy


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A variant of a step, compiled for the same devices.

    Attributes:
        name: The change: `'ShardedStrategy("all")'`.
        fits: Whether the variant fits; None if it could not be compiled.
        total: Bytes per device.
        step_seconds: The time of the step according to the model; None if the hardware is unknown.
        note: Why it was not compiled, or a further consequence of the change.
    """

    name: str
    fits: bool | None
    total: int = 0
    step_seconds: float | None = None
    note: str = ""


class Variant(NamedTuple):
    """A variant of a planned step.

    Attributes:
        name: See `Remedy`.
        strategy: Its strategy.
        inputs: Its inputs.
        options: Options of its gradients, None for the options of the step.
        note: See `Remedy`.
    """

    name: str
    strategy: Strategy
    inputs: Sequence[PyTree]
    options: GradientOptions | None = None
    note: str = ""


def variants(strategy: Strategy, inputs: Sequence[PyTree], uses_gradients: bool) -> list[list[Variant]]:
    """Returns the variants of a step. The first one of a list that fits is better than those after it.

    Args:
        strategy: The strategy of the step.
        inputs: The shapes of its inputs.
        uses_gradients: Whether the step takes its gradient with `jdist.value_and_grad`, a `jdist.train_step` or a `Trainer`,
            whose options can be changed.
    """
    policy = "dots_with_no_batch_dims_saveable"
    recomputed = GradientOptions(remat=getattr(jax.checkpoint_policies, policy))
    smaller = [(count, batch) for count in (2, 4, 8, 16) if (batch := with_smaller_batch(inputs, count)) is not None]
    if uses_gradients:
        remat = [Variant(f"remat=jax.checkpoint_policies.{policy}", strategy, inputs, recomputed)]
        parts = [Variant(f"micro_batches={n}", strategy, inputs, GradientOptions(micro_batches=n)) for n, _ in smaller]
    else:
        note = "a remat policy and micro-batches can be tried in a step that uses `jdist.value_and_grad`"
        remat = []
        parts = [Variant(f"1/{count} of the batch", strategy, batch, note=note) for count, batch in smaller]
    return [remat, parts, *([each] for each in _sharded_variants(strategy, inputs))]


def _sharded_variants(strategy: Strategy, inputs: Sequence[PyTree]) -> Iterator[Variant]:
    shards = ("optimizer", "gradients", "all")
    arguments: dict[str, Any] = {"mesh": _data_mesh(strategy.mesh)}
    if isinstance(strategy, ShardedStrategy):
        arguments = dict(strategy._arguments)
        shards = shards[shards.index(arguments["shard"]) + 1 :]
    for shard in shards:
        other = ShardedStrategy(**{**arguments, "shard": shard})
        yield Variant(f'ShardedStrategy("{shard}")', other, batch_for(inputs, other))
    if arguments.get("offload") is None:
        with contextlib.suppress(ValueError):  # programs cannot address the memory of the host
            other = ShardedStrategy(**{**arguments, "shard": "all", "offload": "optimizer"})
            name = 'ShardedStrategy("all", offload="optimizer")'
            yield Variant(name, other, batch_for(inputs, other))


def _data_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh over the same devices, with names of axes that a batch can be split over."""
    names = ("data",) if len(mesh.axis_names) == 1 else tuple(f"data_{i}" for i in range(len(mesh.axis_names)))
    return Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
