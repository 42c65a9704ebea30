"""The data of `fit`, `evaluate` and `predict` as batches on the devices, grouped by calls of the step."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jdist._src.core.tree import PyTree
from jdist._src.data.config import Cache, Remainder
from jdist._src.data.dataset import DistributedDataset, DistributedIterator, examples_and_stalled_fraction
from jdist._src.replica.losses import check_weights
from jdist._src.strategies.base import Strategy


class DrawnBatch(NamedTuple):
    """A batch, and the state of its iterator after it.

    Attributes:
        inputs: The arguments of a step function: the batch; and its weights, if the step receives them.
        position: The position of the data after the batch.
        examples: The number of examples since the first batch that was drawn, with this batch.
        stalled_fraction: The fraction of steps that had to wait for their batch.
        ends_epoch: Whether it is the last batch of its epoch, or of all; set by `step_groups`.
        is_last: Whether it is the last batch of all; set by `step_groups`.
    """

    inputs: tuple[PyTree, ...]
    position: Mapping[str, Any]
    examples: int
    stalled_fraction: float
    ends_epoch: bool = False
    is_last: bool = False

    @property
    def epoch(self) -> int:
        """The epoch of the batch, from 0."""
        return self.position["epoch"]


def distribute(
    strategy: Strategy,
    name: str,
    data: Any,
    batch_size: int | None,
    shuffle: bool | None,
    seed: int,
    remainder: Remainder = "pad",
    cache: Cache | None = None,
) -> DistributedDataset:
    """Returns `data` as a distributed data set; by default, its last batch is padded.

    Raises:
        TypeError, ValueError: The errors of `distribute_dataset`, with the name of the argument in a note.
    """
    if isinstance(data, DistributedDataset):
        if batch_size is not None:
            raise ValueError(f"`{name}` is already distributed, with its batch size: leave `batch_size` out.")
        if cache is not None:
            raise ValueError(f"`{name}` is already distributed: pass `cache` to `distribute_dataset`.")
        return data
    try:
        return strategy.distribute_dataset(
            data, batch_size, shuffle=shuffle, seed=seed, remainder=remainder, cache=cache
        )
    except (TypeError, ValueError) as error:
        error.add_note(f"The error is in the argument `{name}`.")
        raise


def check_example_weights(name: str, examples: PyTree, where: str) -> None:
    """Raises ValueError if examples `(inputs, targets, weights)` have a weight that is negative or not finite.

    Args:
        name: The name of the data.
        examples: Leaves `[example, ...]`.
        where: Their place in the data.
    """
    if isinstance(examples, tuple) and len(examples) == 3 and hasattr(examples[2], "dtype"):
        check_weights(f"`{name}`[2], the weights of the examples{where},", examples[2])


def distribute_one_pass(
    strategy: Strategy, name: str, data: Any, batch_size: int | None, num_passes: int | None = 1
) -> DistributedDataset:
    """Returns the batches of one pass over `data`, in order.

    Args:
        strategy: The strategy.
        name: The name of the data, for messages.
        data: A distributed data set, or its source.
        batch_size: The number of examples in a batch of a source.
        num_passes: The number of times that the caller reads the batches; None if it is unknown.

    Raises:
        ValueError: The data are endless, or can be read only once and are read several times.
    """
    dataset = distribute(strategy, name, data, batch_size, False, 0)
    if dataset.is_endless:
        raise ValueError(
            f"`{name}` is endless, and one pass over it would never end. Pass a finite source, such as arrays."
        )
    if dataset.is_one_shot and num_passes != 1:
        raise ValueError(
            f"`{name}` is an iterator, which can be read only once, and it is read for each validation. Pass arrays, or a "
            "generator function without arguments: `rows` instead of `rows()`."
        )
    return dataset.repeated(1)


def distribute_epochs(
    strategy: Strategy,
    data: Any,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    seed: int,
    epochs: int | None,
    steps: int | None,
    remainder: Remainder = "pad",
    cache: Cache | None = None,
) -> DistributedDataset:
    """Returns the batches of `epochs` passes over `data`, of one pass by default, or endless for a number of steps.

    Raises:
        ValueError: The data are endless, and `steps` is None.
    """
    dataset = distribute(strategy, "data", data, batch_size, shuffle, seed, remainder, cache)
    if dataset.is_endless and steps is None:
        epochs_hint = "" if epochs is None else f", so epochs={epochs} would never be reached"
        raise ValueError(
            f"`data` is endless{epochs_hint}. Pass the number of steps after which training ends: `steps=1000`."
        )
    if dataset is data and epochs is None and steps is None:
        return dataset
    if epochs is None and steps is None:
        return dataset.repeated(1)
    # An endless source is one infinite epoch, which the number of steps ends. An iterator may end before.
    once = epochs is None and dataset.is_one_shot
    return dataset.repeated(None if dataset.is_endless else 1 if once else epochs)


def drawn_batches(
    iterator: DistributedIterator, has_weights: bool, needs_all_weights: bool = True
) -> Iterator[DrawnBatch]:
    """Yields the remaining batches of `iterator`.

    Args:
        iterator: The iterator.
        has_weights: Whether its elements are pairs of a batch and its weights.
        needs_all_weights: Whether the step receives the weights of a batch without padding, which are 1. The program without
            them is faster: weights cost a pass over the losses, and possibly over the gradients.
    """
    first_examples, _ = examples_and_stalled_fraction(iterator)  # a resume discards the first batch
    examples_before = first_examples
    for element in iterator:
        examples, stalled_fraction = examples_and_stalled_fraction(iterator)
        inputs = element if has_weights else (element,)
        # Both numbers are of the global batch, so all processes select the same program.
        if has_weights and not needs_all_weights and examples - examples_before == element[1].tree.size:
            inputs = element[:1]
        examples_before = examples
        yield DrawnBatch(inputs, iterator.get_state(), examples - first_examples, stalled_fraction)


def step_groups(batches: Iterable[DrawnBatch], steps_per_call: int) -> Iterator[list[DrawnBatch]]:
    """Yields groups of `steps_per_call` batches; the remaining batches of an epoch, and a group with padding, one by one.

    A step takes the weights of a padded batch only, in a program of its own. So the bits of a step do not depend on its group.
    The next batch is drawn before a group is yielded, because only then is it known whether the group ends an epoch.
    """
    group: list[DrawnBatch] = []
    for batch, next_batch in _with_next(batches):
        is_last = next_batch is None
        ends_epoch = is_last or next_batch.epoch != batch.epoch
        group.append(batch._replace(ends_epoch=True, is_last=is_last) if ends_epoch else batch)
        if len(group) == steps_per_call and len({len(drawn.inputs) for drawn in group}) == 1:
            yield group
            group = []
        elif ends_epoch or len(group) == steps_per_call:
            yield from ([remaining] for remaining in group)
            group = []


def _with_next(batches: Iterable[DrawnBatch]) -> Iterator[tuple[DrawnBatch, DrawnBatch | None]]:
    iterator = iter(batches)
    batch = next(iterator, None)
    while batch is not None:
        next_batch = next(iterator, None)
        yield batch, next_batch
        batch = next_batch
