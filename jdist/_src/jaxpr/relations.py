"""How a value of one replica is related to the value of one device, in a function that both trace: the domain of `equivalence`.

The function on N replicas, each with its part of the batch, is compared with the same function on one device with the global
batch. A `Relation` states how the value of the one device is computed from the values of the replicas:

    value of one device = factor * (values of the replicas, added over the partial axes, one after the other along split dims)

* *Replicated*: no partial axes and no split dims. With factor 1 the values are equal.
* *Split over examples*: the batch, and values that are computed for each example alone.
* *Partial sum*: each replica has the sum over its examples. A partial mean has the factor 1/N.

A value without such a relation is `Lost`: it depends on the split, or the analysis has no rule.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jdist._src.core import source_lines
from jdist._src.core.jax_compat import Equation
from jdist._src.jaxpr.causes import Cause


class Site(NamedTuple):
    """An equation, and the equations that call the functions which contain it, from the outermost."""

    equation: Equation
    calls: tuple[Equation, ...] = ()

    @property
    def line(self) -> source_lines.Frame | None:
        """The user's line."""
        return source_lines.call_frame(self.equation, self.calls)

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.equation.primitive.name


SiteCause: TypeAlias = Cause[Site]


@dataclasses.dataclass(frozen=True)
class Split:
    """A dim that is split over replicas.

    The dim of the one device has the index `(outer, replica, inner)`, that of a replica `(outer, inner)`.

    Attributes:
        axes: The mesh axes, from the outermost.
        dim: The dim.
        outer: The number of blocks, each of which is split; 1 if each replica has one contiguous part.
        regrouped: The number of parts, such as micro-batches, into which each replica has divided its examples.
        is_constant: Whether the value is the same along the dim, so that it fits any number of blocks.
    """

    axes: tuple[str, ...]
    dim: int
    outer: int = 1
    regrouped: int = dataclasses.field(default=1, compare=False)
    is_constant: bool = dataclasses.field(default=False, compare=False)

    def replace(self, **fields: Any) -> "Split":
        """Returns the split with other fields."""
        return dataclasses.replace(self, **fields)


@dataclasses.dataclass(frozen=True)
class Relation:
    """How the value of one device is computed from the values of the replicas. See the module.

    Attributes:
        factor: The factor.
        splits: The dims that are split over mesh axes.
        partial: The mesh axes along which the values are added.
        extreme: "max" or "min" with the mesh axes along which the greatest or least value is taken.
        stack: The mesh axes and the dim along which the values of these axes are stacked, after an `all_gather`. On one device
            the dim has the size of one value. If the axes are partial, the stacked values are partial sums; if they are split,
            each is a part; otherwise they are copies.
        offset: The number that is added to the values of a replica with the indices r along mesh axes: `sum(offset[axis] *
            r[axis])`, one number, or one per element of the last dim. The positions of examples have one.
        is_index: Whether the value is a multiple of the replica's index, which is 0 on one device.
        is_first: Whether it is a boolean that is true on replica 0 only, and on one device.
        is_key: Whether it is a random key of each replica.
        is_zero: Whether it is zero on the replicas and on one device.
        is_nonnegative: Whether it is known to be at least 0.
        in_distribution: Whether it is computed from random numbers of each replica, so that only its distribution is equal.
        approximate: The policy that rounds or drops a part of the values, or an empty string.
        zero_test: Of a boolean, the relation of the value that it compares with 0, or None.
        doubt: The least and the greatest power of the number of replicas that constants may be in the factor: a constant that
            is equal to the number of replicas may stand for it, and would be 1 on one device.
        origin: The equation that made it a partial sum, or gave it its factor.
    """

    factor: float = 1.0
    splits: tuple[Split, ...] = ()
    partial: frozenset[str] = frozenset()
    extreme: tuple[str, frozenset[str]] | None = None
    stack: tuple[tuple[str, ...], int] | None = None
    offset: tuple[tuple[str, tuple[float, ...]], ...] = ()
    is_index: bool = False
    is_first: bool = False
    is_key: bool = False
    is_zero: bool = False
    is_nonnegative: bool = False
    in_distribution: bool = False
    approximate: str = ""
    zero_test: "Relation | None" = dataclasses.field(default=None, compare=False, repr=False)
    doubt: tuple[int, int] = (0, 0)
    origin: SiteCause | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def split(cls, splits: Mapping[int, tuple[str, ...]]) -> "Relation":
        """Returns the relation of an array with these dims split over mesh axes."""
        return cls(splits=tuple(Split(axes, dim) for dim, axes in sorted(splits.items())))

    def replace(self, **fields: Any) -> "Relation":
        """Returns the relation with other fields. As `dataclasses.replace`, in less time."""
        new = object.__new__(Relation)
        values = vars(new)
        values.update(vars(self))
        values.pop("is_equal", None)
        values.pop("is_plain", None)
        values.pop("is_clean", None)
        values.update(fields)
        return new

    @property
    def is_lost(self) -> bool:
        """Whether it is `Lost`."""
        return False

    @functools.cached_property
    def is_equal(self) -> bool:
        """Whether the values of the replicas and of the one device are equal."""
        return self.is_plain and self.factor == 1 and not self.splits

    @functools.cached_property
    def is_clean(self) -> bool:
        """Whether the values are equal, without other properties."""
        return self.is_equal and not (self.is_zero or self.in_distribution or self.approximate or self.doubt != (0, 0))

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether it has nothing but a factor and splits."""
        return not (self.partial or self.extreme or self.stack or self.is_special)

    @property
    def is_special(self) -> bool:
        """Whether it depends on the replica's index."""
        return bool(self.offset) or self.is_first or self.is_key

    @property
    def is_pointwise(self) -> bool:
        """Whether any function of single elements of it has the same relation."""
        return self.is_plain and self.factor == 1


REPLICATED = Relation()
ZERO = Relation(is_zero=True, is_nonnegative=True)


@dataclasses.dataclass(frozen=True)
class Lost:
    """A value without a relation.

    Attributes:
        reason: A key of `UNKNOWN_REASONS`, or of the reasons in `equivalence_verdict`.
        cause: The chain of equations, from where it begins; None for an input.
        begin: The equation to change: the one that loses the relation, or the collective that gave a wrong factor.
        factor: How many times too large the operand was, if this is the reason.
    """

    reason: str
    cause: SiteCause | None = dataclasses.field(default=None, compare=False)
    begin: Site | None = dataclasses.field(default=None, compare=False)
    factor: float | None = dataclasses.field(default=None, compare=False)

    is_lost = True

    @property
    def is_unknown(self) -> bool:
        """Whether the analysis has no result for it, so that it may be equal."""
        return self.reason in UNKNOWN_REASONS


AnyRelation: TypeAlias = Relation | Lost

# Reasons for which the analysis has no result: the value may be equal.
UNKNOWN_REASONS = {
    "no rule": "there is no rule for an operation",
    "other program": "with the global batch the function is another program",
    "input": "it depends on an input that has one value per replica",
    "extreme": "it depends on the greatest or least value of the examples of a replica",
    "doubt": "a constant may be the number of replicas",
    "order": "it combines examples in different orders",
    "sorted": "it sorts the examples of a replica",
    "index": "it depends on the index of the replica",
    "exchange": "values are exchanged between replicas in an order that one device does not have",
    "part": "it takes a part of the examples",
}


def with_equal_partial_axes(values: Sequence[Relation], axis_sizes: Mapping[str, int]) -> list[Relation] | None:
    """Returns the relations of values that are added, or of which one is chosen, with equal partial axes; None if impossible.

    A replicated value is a partial mean too: it is the sum over the replicas, divided by their number.
    """
    others = [value for value in values if not value.is_zero]
    if not others:
        return list(values)
    partial = frozenset().union(*(value.partial for value in others))
    extreme = next((value.extreme for value in others if value.extreme), None)
    lifted = []
    for value in values:
        if extreme and not value.extreme and not value.partial and not value.is_zero:
            value = value.replace(extreme=extreme)  # a replicated value is the greatest of all replicas
        if value.is_zero:
            lifted.append(others[0].replace(partial=partial, extreme=extreme))
            continue
        missing = partial - value.partial
        if missing & {axis for split in value.splits for axis in split.axes}:
            return None
        if partial and value.extreme or missing and (value.stack or value.is_special):
            return None
        factor = value.factor / math.prod(axis_sizes[axis] for axis in missing)
        lifted.append(value.replace(partial=partial, factor=factor))
    first = next(value for value, original in zip(lifted, values, strict=True) if not original.is_zero)
    for i, (value, original) in enumerate(zip(lifted, values, strict=True)):
        if original.is_zero:
            lifted[i] = first
        elif not _fits(first, value):
            return None
    return lifted


def _fits(first: Relation, second: Relation) -> bool:
    return (
        is_close(first.factor, second.factor)
        and first.splits == second.splits
        and first.extreme == second.extreme
        and first.stack == second.stack
        and first.is_first == second.is_first
        and first.is_key == second.is_key
    )


def may_be_one(value: Relation, factor: float, number: int) -> bool:
    """Whether `factor` is 1 if constants among the factors of `value` stand for the number of replicas."""
    return any(
        power and is_close(factor * float(number) ** power, 1) for power in range(value.doubt[0], value.doubt[1] + 1)
    )


def is_close(first: float, second: float) -> bool:
    """Whether two factors are equal up to rounding."""
    return math.isclose(first, second, rel_tol=1e-6)


def inherited(*values: Relation) -> dict[str, Any]:
    """Returns the fields of a result that come from all operands: distribution, approximation, doubt and the origin."""
    return {
        "in_distribution": any(value.in_distribution for value in values),
        "approximate": next((value.approximate for value in values if value.approximate), ""),
        "doubt": (min([0, *(value.doubt[0] for value in values)]), max([0, *(value.doubt[1] for value in values)])),
        "origin": next((value.origin for value in values if value.origin), None),
    }
