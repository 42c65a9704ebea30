"""Finds a step whose batch is not split: every replica computes all of its examples, and the mean is of equal values."""

from collections.abc import Sequence

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.errors import DivergentCollectiveError, ReplicatedBatchWarning
from jdist._src.core.jax_compat import Jaxpr
from jdist._src.jaxpr.replication import Input, find_reductions, warn_once


def warn_of_replicated_batch(
    program: Jaxpr, inputs: Sequence[Input], num_state_leaves: int, axes: Sequence[str], num_replicas: int
) -> None:
    """Warns if a sum over the replicas is of a replicated value, and would not be if the batch were split.

    Args:
        program: The traced step.
        inputs: For each input, its name and the axes along which it may differ.
        num_state_leaves: The number of inputs, from the first, that are leaves of the state.
        axes: The mesh axes of the replicas.
        num_replicas: The number of replicas.

    Warns:
        ReplicatedBatchWarning: There is such a sum, and no input is per replica.
    """
    is_batch = [i >= num_state_leaves and bool(jax_compat.shape_of(var)) for i, var in enumerate(program.invars)]
    if num_replicas == 1 or not any(is_batch) or any(one.axes for one in inputs):
        return
    if_split = [Input(one.name, tuple(axes) if batch else ()) for one, batch in zip(inputs, is_batch, strict=True)]
    try:
        replicated, split = (find_reductions(program, assumed, axes) for assumed in (inputs, if_split))
    except DivergentCollectiveError:  # of the assumption: a predicate depends on the batch
        return
    equations = [equation for key, (equation, varies) in replicated.items() if not varies and split[key][1]]
    place = next(filter(None, map(source_lines.equation_frame, equations)), None)
    if place:
        names = [one.name for one, batch in zip(inputs, is_batch, strict=True) if batch]
        warn_once(
            f"{', '.join(names[:3])} is replicated, so each of the {num_replicas} replicas computes all of its examples, and "
            "this reduction is of equal values. Feed the step from `strategy.distribute_dataset(data, batch_size)`, or split "
            "one global batch `[batch, ...]` with `strategy.split(batch)`.",
            ReplicatedBatchWarning,
            place,
        )
