"""Short texts and HTML tables for a `Fit` and a `Trainer`. No device is read: the arrays of a spent state have shapes only."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jdist._src.core import html
from jdist._src.core.tree import PyTree
from jdist._src.training.history import format_value
from jdist._src.training.report.charts import shown
from jdist._src.values.arrays import is_device_array

SPENT = "spent: a later step took its memory over"
LOST = "lost: an error ended the step that had taken its memory over"


def state_in_words(state: PyTree) -> str:
    """Returns the class and the size of a training state, and whether its memory was given away.

    Example:
        >>> state_in_words({"w": np.zeros((2, 3), np.float32)})
        'dict, 6 numbers'
    """
    if state is None:
        return LOST
    name = type(state).__name__
    return f"{name}, {SPENT}" if is_spent(state) else f"{name}, {sum(map(_size, jax.tree.leaves(state))):,} numbers"


def is_spent(state: PyTree) -> bool:
    """Whether the memory of a leaf was given to a step, or freed."""
    return any(is_device_array(leaf) and leaf.is_deleted() for leaf in jax.tree.leaves(state))


def last_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the loss and the metrics of a row of the history, as text."""
    facts = ("epoch", "step", "seconds", "rows_per_second", "stalled", "learning_rate")
    return {name: format_value(value) for name, value in row.items() if name not in facts}


def table(title: str, facts: Mapping[str, str]) -> str:
    """Returns an HTML table with a title and one row per fact."""
    return html.heading(title) + html.table((name, shown(fact, 400)) for name, fact in facts.items())


def name_of(value: Any) -> str:
    """Returns the name of a function, or of the class of an object.

    Example:
        >>> name_of(len), name_of(3)
        ('len', 'int')
    """
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return f"({', '.join(map(name_of, value))})"
    return shown(getattr(value, "__name__", None) or type(value).__name__, 60)


def _size(leaf: Any) -> int:
    return math.prod(np.shape(leaf))
