"""The validation data of `fit`: one data set, or several with names."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, one_line
from jdist._src.data.dataset import DistributedDataset
from jdist._src.strategies.base import Strategy
from jdist._src.training.step_inputs import distribute_one_pass


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
    names = [f"val_{prefix}{name}" for prefix in prefixes for name in metrics]
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
