"""The data of `fit`, `evaluate` and `predict` as batches on the devices, and the validation sets."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, has_dtype, one_line
from jdist._src.data.config import Cache, Remainder
from jdist._src.data.dataset import DistributedDataset, DistributedIterator, examples_and_stalled_fraction
from jdist._src.replica.losses import check_weights
from jdist._src.strategies.base import Strategy
from jdist._src.training.history_columns import VALIDATION_PREFIX


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
    if isinstance(examples, tuple) and len(examples) == 3 and has_dtype(examples[2]):
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
    reads_once = epochs is None and dataset.is_one_shot
    return dataset.repeated(None if dataset.is_endless else 1 if reads_once else epochs)


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

    A step takes the weights of a padded batch only, in a separate program. So the bits of a step do not depend on its group.
    The next batch is drawn before a group is yielded, because only then is it known whether the group ends an epoch.
    """
    group: list[DrawnBatch] = []
    for batch, next_batch in itertools.pairwise(itertools.chain(batches, (None,))):
        assert batch is not None
        is_last = next_batch is None
        ends_epoch = is_last or next_batch.epoch != batch.epoch
        group.append(batch._replace(ends_epoch=True, is_last=is_last) if ends_epoch else batch)
        if len(group) == steps_per_call and len({len(drawn.inputs) for drawn in group}) == 1:
            yield group
            group = []
        elif ends_epoch or len(group) == steps_per_call:
            yield from ([remaining] for remaining in group)
            group = []


def validation_sets(
    strategy: Strategy, data: Any, validation_data: Any, batch_size: int | None, num_passes: int | None
) -> dict[str, DistributedDataset]:
    """Returns the validation sets by the prefix of their metrics: `""` for a single set, `"easy_"` for a set named `easy`.

    A mapping contains several sets, unless it is one source: a value is an array, or `data` is a mapping with the same keys.

    Args:
        strategy: The strategy.
        data: The training data.
        validation_data: The data to evaluate, or None.
        batch_size: The number of examples in the global batch, for sources.
        num_passes: The number of times that each set is read; None if it is unknown.

    Raises:
        TypeError: The name of a set is not a string.
        ValueError: A set is endless, or can be read only once and is read several times; a name or the mapping is empty.
    """
    if validation_data is None:
        return {}
    if not isinstance(validation_data, Mapping) or _is_source(validation_data, data):
        return {"": distribute_one_pass(strategy, validation_name(""), validation_data, batch_size, num_passes)}
    if not validation_data:
        raise ValueError("`validation_data` is an empty mapping. Leave it out, or pass data sets by their names.")
    for name in validation_data:
        if not isinstance(name, str) or not name:
            kind = TypeError if not isinstance(name, str) else ValueError
            raise kind(f"The names of the sets in `validation_data` must be non-empty strings, got {one_line(name)}.")
    return {
        f"{name}_": distribute_one_pass(strategy, validation_name(f"{name}_"), source, batch_size, num_passes)
        for name, source in validation_data.items()
    }


def validation_name(prefix: str) -> str:
    """Returns the name of the set whose metrics have this prefix, for messages."""
    return f"validation_data[{prefix.removesuffix('_')!r}]" if prefix else "validation_data"


def validation_metric_names(prefixes: Iterable[str], metrics: Iterable[str]) -> list[str]:
    """Returns the names of the loss and the metrics of all validation sets, as `fit` records them.

    Raises:
        ValueError: Two of them are equal.

    Example:
        >>> validation_metric_names(["easy_", "hard_"], ["accuracy"])
        ['val_easy_loss', 'val_easy_accuracy', 'val_hard_loss', 'val_hard_accuracy']
    """
    metrics = ["loss", *metrics]
    names = [f"{VALIDATION_PREFIX}{prefix}{name}" for prefix in prefixes for name in metrics]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"Two metrics of `validation_data` would be named {repeated[0]!r}. Rename a set.")
    return names


def check_validate_every(validate_every: Any, has_validation: bool) -> int | None:
    """Returns the argument `validate_every` of `fit`.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is less than 1, or `fit` has no validation data.
    """
    if validate_every is None:
        return None
    every = as_int("`validate_every`", validate_every, 1)
    if not has_validation:
        raise ValueError(
            f"`validate_every={every}` needs data to evaluate: pass `validation_data`. For rows of a log every {every} steps "
            f"without validation, pass `callbacks=[jdist.callbacks.CSVLog(path, every={every})]`."
        )
    return every


def validate_all(
    sets: Mapping[str, DistributedDataset], evaluate: Callable[[PyTree, DistributedDataset], Mapping[str, Any]]
) -> Callable[[PyTree], dict[str, Any]] | None:
    """Returns a function from a state to the metrics of all sets, with their prefixes; None without sets."""
    if not sets:
        return None
    return lambda state: {
        f"{prefix}{name}": value for prefix, dataset in sets.items() for name, value in evaluate(state, dataset).items()
    }


def _is_source(mapping: Mapping[Any, Any], data: Any) -> bool:
    if isinstance(data, Mapping) and data.keys() == mapping.keys():
        return True
    return any(isinstance(value, (np.ndarray, jax.Array)) for value in mapping.values())
