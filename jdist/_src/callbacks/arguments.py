"""Checks of the arguments of callbacks."""

from collections.abc import Collection
from typing import Any

from jdist._src.training.history_columns import VALIDATION_PREFIX


def check_function(name: str, value: Any, argument: str) -> None:
    """Raises TypeError if the argument `name` is not a function of `argument`."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function of {argument}, got {type(value).__name__}.")


def check_has_metric(subject: str, name: str, names: Collection[str]) -> None:
    """Raises ValueError if the metric `name`, which `subject` needs, is not one of `names`, the metrics that are available."""
    if name in names:
        return
    is_validated = any(each.startswith(VALIDATION_PREFIX) for each in names)
    hint = " Pass `validation_data`." if name.startswith(VALIDATION_PREFIX) and not is_validated else ""
    available = ", ".join(map(repr, names))
    raise ValueError(f"{subject} needs the metric {name!r}; available are {available}.{hint}")
