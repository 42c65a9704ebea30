"""The mesh axes in a `PartitionSpec`."""

from collections.abc import Iterable
from typing import Any


def axes_of(spec: Iterable[Any]) -> list[str]:
    """Returns the names of the mesh axes in a `PartitionSpec`, or in some of its entries, in order.

    Example:
        >>> axes_of(jax.P("data", None, ("host", "model")))
        ['data', 'host', 'model']
    """
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec]
    return [axis for entry in entries if isinstance(entry, tuple) for axis in entry]
