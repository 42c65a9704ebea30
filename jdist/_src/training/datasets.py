"""The data of `fit`, `evaluate` and `predict` as batches on the devices."""

from typing import Any

import jax
import numpy as np

from jdist._src.data.dataset import DistributedDataset
from jdist._src.replica.losses import check_weights
from jdist._src.strategies.base import Strategy


def distributed(
    strategy: Strategy, name: str, data: Any, batch_size: int | None, shuffle: bool | None, seed: int
) -> DistributedDataset:
    """Returns `data` as a distributed data set, with its last batch filled up.

    Raises:
        TypeError, ValueError: Those of `distribute_dataset`, with the name of the argument in a note.
    """
    if isinstance(data, DistributedDataset):
        if batch_size is not None:
            raise ValueError(f"`{name}` is distributed already, in batches of its own: leave `batch_size` out.")
        return data
    if isinstance(data, tuple) and len(data) == 3 and isinstance(data[2], (np.ndarray, jax.Array)):
        check_weights(f"`{name}`[2], the weights of the examples,", data[2])
    try:
        return strategy.distribute_dataset(data, batch_size, shuffle=shuffle, seed=seed, remainder="pad")
    except (TypeError, ValueError) as error:
        error.add_note(f"So it is with `{name}`.")
        raise


def one_pass(strategy: Strategy, name: str, data: Any, batch_size: int | None) -> DistributedDataset:
    """Returns the batches of one pass over `data`, in order.

    Raises:
        ValueError: The data have no end.
    """
    dataset = distributed(strategy, name, data, batch_size, False, 0)
    if dataset.is_endless:
        raise ValueError(
            f"`{name}` has no end, and one pass over it would never end. Pass a source that ends, such as arrays."
        )
    return dataset.repeated(1)


def check_end(dataset: DistributedDataset, epochs: int | None) -> None:
    """Raises ValueError if the source of `dataset` has no end, where the number of steps is not given."""
    if dataset.is_endless:
        asked = "" if epochs is None else f", and no epochs: epochs={epochs} would never be reached"
        raise ValueError(f"`data` has no end{asked}. Say after how many steps training ends: `steps=1000`.")
