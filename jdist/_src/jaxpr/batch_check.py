"""Warns if the batch of a step is replicated: every replica computes all of its examples, and the mean is of equal values."""

from collections.abc import Sequence

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.errors import DivergentCollectiveError, ReplicatedBatchWarning
from jdist._src.core.jax_compat import Jaxpr
from jdist._src.jaxpr.replication import Input, find_sums, warn_once


def warn_of_replicated_batch(
    program: Jaxpr,
    inputs: Sequence[Input],
    num_state_leaves: int,
    axes: Sequence[str],
    num_parts: int,
    workers: str,
) -> None:
    """Warns if a sum over the replicas is of a replicated value that would vary if the batch were split.

    Args:
        program: The traced step.
        inputs: For each input, its name and the axes along which it may vary.
        num_state_leaves: The number of inputs, from the first, that are leaves of the state.
        axes: The mesh axes of the replicas.
        num_parts: The number of parts of a batch that is split.
        workers: The noun for the replicas or devices that compute the parts: "replicas" or "devices".

    Warns:
        ReplicatedBatchWarning: There is such a sum, and no input is per replica.
    """
    is_batch = [i >= num_state_leaves and bool(jax_compat.shape_of(var)) for i, var in enumerate(program.invars)]
    if num_parts == 1 or not any(is_batch) or any(one.axes for one in inputs):
        return
    if_split = [Input(one.name, tuple(axes) if batch else ()) for one, batch in zip(inputs, is_batch, strict=True)]
    try:
        sums = find_sums(program, inputs, axes)
        sums_if_split = find_sums(program, if_split, axes)
    except DivergentCollectiveError:  # only of the split batch: a predicate depends on it
        return
    replicated = [equation for key, (equation, varies) in sums.items() if not varies and sums_if_split[key][1]]
    place = next(filter(None, map(source_lines.warning_frame, replicated)), None)
    if place:
        names = [one.name for one, batch in zip(inputs, is_batch, strict=True) if batch]
        warn_once(replicated_batch_message(names, num_parts, workers), ReplicatedBatchWarning, place)


def replicated_batch_message(names: Sequence[str], num_parts: int, workers: str) -> str:
    """Returns the message for a replicated batch of leaves with these names; see `warn_of_replicated_batch`."""
    return (
        f"{', '.join(names[:3])} is replicated, so each of the {num_parts} {workers} computes all of its examples, and this "
        "reduction is of equal values. Feed the step from `strategy.distribute_dataset(data, batch_size)`, or split one global "
        "batch `[batch, ...]` with `strategy.split(batch)`."
    )
