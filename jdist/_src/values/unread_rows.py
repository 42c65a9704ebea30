"""Batches whose arrays do not exist yet: a program makes them when they are read, or several batches stacked in one array.

An array costs about as much as a small operation, so a call that takes several steps (`steps_per_call`) receives the batches
stacked.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core import jax_compat


class BatchGroup(abc.ABC):
    """Batches that one program makes."""

    @abc.abstractmethod
    def leaves(self, number: int) -> list[jax.Array]:
        """Returns the leaves of a batch, `[replica, row, ...]`."""

    @abc.abstractmethod
    def stacked(self, rows: "Sequence[UnreadRows]") -> "StackedRows | None":
        """Returns the same leaf of several batches, the first of this group; None if one program cannot make them."""


class UnreadRows(NamedTuple):
    """A leaf of a batch.

    Attributes:
        group: The group of its batch.
        number: The number of the batch in the group.
        leaf: The index of the leaf.
    """

    group: BatchGroup
    number: int
    leaf: int

    def read(self) -> jax.Array:
        """Returns its values, `[replica, row, ...]`."""
        if not jax_compat.is_tracing():
            return self.group.leaves(self.number)[self.leaf]
        with jax.ensure_compile_time_eval():  # the batch is used after the trace
            return self.group.leaves(self.number)[self.leaf]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedRows:
    """A leaf of successive batches, as an argument of a program.

    Attributes:
        rows: `[replica, batch, row, ...]`, possibly with other batches before and after.
        first: The index of the first batch, `[]`.
    """

    rows: jax.Array
    first: jax.Array

    def split(self, num_batches: int) -> list[Any]:
        """Returns the leaf of each batch, `[replica, row, ...]`."""
        rows = jax.lax.dynamic_slice_in_dim(self.rows, self.first, num_batches, axis=1)
        return [rows[:, batch] for batch in range(num_batches)]
