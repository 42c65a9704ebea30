"""The batches of a loop, put together as calls of its step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jdist._src.core.tree import PyTree
from jdist._src.data.dataset import DistributedIterator, stats


class DrawnBatch(NamedTuple):
    """A batch, and what is known of it.

    Attributes:
        inputs: The batch; and its weights, if it is padded.
        epoch: The epoch that it is of, from 0.
        position: Where the data go on behind it.
        rows: How many examples were taken with it, since the iterator began.
        stalled: Which part of the steps had to wait for their batch.
    """

    inputs: tuple[PyTree, ...]
    epoch: int
    position: Mapping[str, Any]
    rows: int
    stalled: float


class Turn(NamedTuple):
    """Batches that one call of the step takes.

    Attributes:
        draws: The batches, all of one epoch.
        ends_epoch: Whether the last of them is the last of the epoch, or the last of all.
    """

    draws: Sequence[DrawnBatch]
    ends_epoch: bool


def draws(iterator: DistributedIterator, has_weights: bool) -> Iterator[DrawnBatch]:
    """What `iterator` has still to give."""
    for element in iterator:
        position, seen = iterator.get_state(), stats(iterator)
        inputs = element if has_weights else (element,)
        yield DrawnBatch(inputs, position["epoch"], position, seen.examples, seen.stalled_fraction)


def turns(given: Iterable[DrawnBatch], steps_per_call: int) -> Iterator[Turn]:
    """Batches in groups of `steps_per_call`; those that are left at the end of an epoch one by one.

    The next batch is drawn before a group is given, which is how the last of an epoch is known.
    """
    group: list[DrawnBatch] = []
    for draw, following in _with_next(given):
        group.append(draw)
        ends = following is None or following.epoch != draw.epoch
        if len(group) == steps_per_call:
            yield Turn(group, ends)
            group = []
        elif ends:
            yield from (Turn([one], one is draw) for one in group)
            group = []


def _with_next(given: Iterable[DrawnBatch]) -> Iterator[tuple[DrawnBatch, DrawnBatch | None]]:
    iterator = iter(given)
    draw = next(iterator, None)
    while draw is not None:
        following = next(iterator, None)
        yield draw, following
        draw = following
