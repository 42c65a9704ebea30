"""`EquationPair`: an equation with the relations of its operands, and `rule`, which registers the rule of a primitive."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Literal
from jdist._src.jaxpr.causes import Cause
from jdist._src.jaxpr.relations import (
    ZERO,
    AnyRelation,
    Lost,
    Relation,
    Site,
    SiteCause,
    Split,
    inherited,
    is_close,
    may_be_one,
    with_equal_partial_axes,
)

RuleT = TypeVar("RuleT", bound=Callable[["EquationPair"], list[AnyRelation]])
RULES: dict[str, Callable[["EquationPair"], list[AnyRelation]]] = {}  # by the name of the primitive
ELEMENTWISE: set[str] = set()  # primitives that compute each element from the same element of the operands


def rule(primitives: str, elementwise: bool = False) -> Callable[[RuleT], RuleT]:
    """Registers the rule of primitives: a function from an `EquationPair` to one relation per result.

    Args:
        primitives: Their names, separated by spaces.
        elementwise: Whether the primitive computes each element from the same element of the operands.
    """

    def register(fn: RuleT) -> RuleT:
        RULES.update(dict.fromkeys(primitives.split(), fn))
        if elementwise:
            ELEMENTWISE.update(primitives.split())
        return fn

    return register


class Analysis(Protocol):
    """The part of the analysis that the rules use."""

    axis_sizes: dict[str, int]
    groups: list[tuple[str, ...]]

    def site(self, equation: Equation) -> Site: ...

    def group_size(self, axes: Sequence[str]) -> int: ...


class EquationPair:
    """An equation of one replica, the same equation of the function on one device, and the relations of the operands.

    Attributes:
        analysis: The analysis.
        equation: The equation of one replica.
        single: The equation of one device. Its shapes, and constants that depend on shapes, may be others.
        operands: The relations of the operands.
    """

    def __init__(self, analysis: Analysis, equation: Equation, single: Equation, operands: Sequence[AnyRelation]):
        self.analysis, self.equation, self.single = analysis, equation, single
        self.operands: Any = list(operands)

    @property
    def params(self) -> dict[str, Any]:
        return self.equation.params

    @property
    def num_replicas(self) -> int:
        return math.prod(self.analysis.axis_sizes.values())

    def shape(self, number: int) -> tuple[int, ...]:
        """Returns the shape of an operand, on a replica."""
        return jax_compat.shape_of(self.equation.invars[number])

    def result_shape(self, number: int = 0) -> tuple[int, ...]:
        """Returns the shape of a result, on a replica."""
        return jax_compat.shape_of(self.equation.outvars[number])

    def single_result_shape(self, number: int = 0) -> tuple[int, ...]:
        """Returns the shape of a result, on one device."""
        return jax_compat.shape_of(self.single.outvars[number])

    def is_same_operand(self) -> bool:
        """Whether both operands are one value."""
        first, second = self.equation.invars
        return not isinstance(first, Literal) and first is second

    def cause(self, *operands: AnyRelation) -> SiteCause:
        """Returns the cause of a result that begins here, or where an operand became a partial value."""
        parent = next((value.origin for value in operands if isinstance(value, Relation) and value.origin), None)
        return Cause(self.analysis.site(self.equation), parent, parent.depth + 1 if parent else 0)

    def lost(self, reason: str, *operands: AnyRelation) -> Lost:
        """Returns a result that begins to be lost here."""
        values = operands or self.operands
        cause = self.cause(*values)
        if reason != "factor":
            return Lost(reason, cause, cause.site)
        wrong = next(v for v in values if isinstance(v, Relation) and not is_close(v.factor, 1))
        if may_be_one(wrong, wrong.factor, self.num_replicas):
            return Lost("doubt", cause, cause.site)
        return Lost(reason, cause, wrong.origin.site if wrong.origin else cause.site, 1 / wrong.factor)

    def lost_operand(self) -> Lost | None:
        """Returns the result if an operand is lost; unknown ones first, since they may be equal."""
        values = [value for value in self.operands if isinstance(value, Lost)]
        if not values:
            return None
        return self.lost_again(min(values, key=lambda one: (not one.is_unknown, one.cause.depth if one.cause else 0)))

    def lost_again(self, value: Lost) -> Lost:
        """Returns the result for an operand that is lost: this equation is added to the causes."""
        parent = value.cause
        cause = Cause(self.analysis.site(self.equation), parent, parent.depth + 1) if parent else self.cause()
        return dataclasses.replace(value, cause=cause)

    def checked(self, result: AnyRelation, number: int) -> AnyRelation:
        """Returns `result` if it fits the shapes of both results."""
        if isinstance(result, Lost):
            return result
        local, single = self.result_shape(number), self.single_result_shape(number)
        if len(local) != len(single):
            return self.lost("no rule")
        if result.is_nonnegative and getattr(jax_compat.dtype_of(self.equation.outvars[number]), "kind", "") == "c":
            result = result.replace(is_nonnegative=result.is_zero)
        expected = list(local)
        for split in result.splits:
            if split.dim >= len(local) or local[split.dim] % split.outer:
                return self.lost("no rule")
            expected[split.dim] *= self.analysis.group_size(split.axes)
        if result.stack:
            axes, dim = result.stack
            size = self.analysis.group_size(axes)
            if dim >= len(local) or expected[dim] % size:
                return self.lost("no rule")
            expected[dim] //= size
            for split in result.splits:
                if split.axes == axes and split.dim == dim:
                    return self.lost("no rule")
        if tuple(expected) != tuple(single):
            return self.lost("no rule")
        return result

    def predicate(self, value: AnyRelation) -> AnyRelation:
        """Returns `value` if it selects the same branch on the replicas and on one device, else a lost value."""
        if isinstance(value, Lost) or value.is_equal:
            return value
        return self.lost("predicate", value)

    def joined(self, alternatives: Sequence[AnyRelation]) -> AnyRelation:
        """Returns the relation of a value that is one of `alternatives`."""
        lost = [value for value in alternatives if isinstance(value, Lost)]
        if lost:
            return min(lost, key=lambda one: not one.is_unknown)
        values = [value for value in alternatives if isinstance(value, Relation)]
        first, *others = values
        if all(value == first for value in others):
            return first
        if any(value.is_index for value in values) or len({value.offset for value in values}) > 1:
            return self.lost("no rule", *values)
        fitting = with_equal_partial_axes(values, self.analysis.axis_sizes)
        if fitting is None:
            return self.lost("mixed", *values)
        return dataclasses.replace(
            fitting[0],
            is_zero=all(value.is_zero for value in values),
            is_nonnegative=all(value.is_nonnegative for value in values),
            **inherited(*values),
        )

    def mixed(self, first: Relation, second: Relation) -> Lost:
        """Returns why two values do not fit: with one factor they would, or nothing is known."""
        if (first.partial or second.partial) and first.splits == second.splits and first.stack == second.stack:
            in_doubt = any(value.doubt != (0, 0) and not value.is_zero for value in (first, second))
            return self.lost("doubt" if in_doubt and self._differ_by_number(first, second) else "mixed", first, second)
        if first.is_plain and second.is_plain and first.splits == second.splits:
            return self.lost("factor", first, second)
        return self.lost("order", first, second)

    def _differ_by_number(self, first: Relation, second: Relation) -> bool:
        """Whether the factors of two values of one kind differ by the number of replicas."""
        sizes = [math.prod([self.analysis.axis_sizes[axis] for axis in value.partial]) for value in (first, second)]
        ratio = first.factor * sizes[0] / (second.factor * sizes[1])
        return any(is_close(ratio, float(self.num_replicas) ** power) for power in (-1, 1))

    def without_rule(self) -> list[AnyRelation]:
        """Returns the results of an equation without a rule: equal operands have equal results."""
        contents = jax_compat.contents(self.equation)
        is_plain = all(value.is_equal for value in self.operands)
        has_effect = any(map(jax_compat.may_vary_between_replicas, self.equation.effects))
        names_axis = contents.names & set(self.analysis.axis_sizes)
        if not is_plain or contents.opaque or has_effect or names_axis or not self.has_same_params():
            return self.every(self.lost("no rule"))
        return self.every(Relation(**inherited(*self.operands)))

    def has_same_params(self) -> bool:
        """Whether the parameters of both equations are equal, except for shardings."""
        keys = self.params.keys()
        return keys == self.single.params.keys() and self.has_same(*(keys - {"sharding", "out_sharding"}))

    def has_same(self, *keys: str) -> bool:
        """Whether these parameters are equal in both programs."""
        pairs = [(self.params.get(key), self.single.params.get(key)) for key in keys]
        try:
            return all(a is b or bool(a == b) or a != a and b != b for a, b in pairs)  # NaN
        except Exception:  # arrays, or objects of libraries
            return False

    def every(self, result: AnyRelation) -> list[AnyRelation]:
        """Returns the same relation for every result."""
        return [result] * len(self.equation.outvars)

    def keeps(self) -> list[AnyRelation]:
        """The result is the operand."""
        return list(self.operands)[: len(self.equation.outvars)]

    def pointwise(self, **known: Any) -> AnyRelation:
        """Returns the result of a function of single elements, with the fields `known`, if each operand is pointwise."""
        values = self.operands
        for value in values:
            if value.partial:
                return self.lost("partial", value)
            if value.extreme:
                return self.lost("extreme", value)
            if value.is_special or value.is_index:
                return self.lost("index", value)
            if not is_close(value.factor, 1):
                return self.lost("factor", value)
        spread = self.spread(values)
        if isinstance(spread, Lost):
            return spread
        return Relation(splits=spread[0].splits, stack=spread[0].stack, **inherited(*values), **known)

    def spread(self, values: Sequence[Relation]) -> list[Relation] | Lost:
        """Gives values that are broadcast to the shape of the result the splits of those that they are combined with."""
        known = sorted(
            (split for value in values for split in value.splits),
            key=lambda split: (not split.is_constant, split.regrouped),
        )
        splits = {split.dim: split for split in known}
        stack = next((value.stack for value in values if value.stack), None)
        spread = []
        for i, value in enumerate(values):
            shape = jax_compat.shape_of(self.single.invars[i])
            own_splits = {split.dim: split for split in value.splits}
            is_broadcast = lambda dim, shape=shape: not shape or shape[dim] == 1
            for dim, split in splits.items():
                own_split = own_splits.get(dim, split)
                sizes = [self.analysis.group_size(one.axes) for one in (own_split, split)]
                is_same = own_split == split or own_split.is_constant and sizes[0] == sizes[1]
                if not is_same or dim not in own_splits and not is_broadcast(dim):
                    return self.lost("order", value)
                if dim not in own_splits and value.partial & set(split.axes):
                    return self.lost("statistic", value)
            if stack and value.stack != stack and (value.stack or shape and self.shape(i)[stack[1]] != 1):
                return self.lost("no rule", value)
            ordered = tuple(splits[dim] for dim in sorted(splits))
            spread.append(value.replace(splits=ordered, stack=stack))
        return spread

    def zeros(self) -> AnyRelation:
        """Returns zeros of the shape of the result."""
        local, single = self.result_shape(), self.single_result_shape()
        if len(local) != len(single):
            return self.lost("no rule")
        known = {split.dim: split for value in self.operands if isinstance(value, Relation) for split in value.splits}
        splits = []
        for dim in range(len(local)):
            if local[dim] == single[dim]:
                continue
            axes = self.group_of(local[dim], single[dim])
            if dim not in known and axes is None:
                return self.lost("no rule")
            splits.append(known[dim] if dim in known else Split(axes, dim))  # type: ignore[arg-type]
        return ZERO.replace(splits=tuple(splits))

    def doubt(self) -> tuple[int, int]:
        """Returns the powers of the number of replicas that constants may be in a product or a quotient."""
        low, high = (sum(value.doubt[k] for value in self.operands) for k in (0, 1))
        is_division = self.equation.primitive.name == "div"
        for i, (atom, value) in enumerate(zip(self.equation.invars, self.operands, strict=True)):
            if isinstance(atom, Literal) and value.factor == 1 and not np.ndim(atom.val):
                number = np.asarray(atom.val)
                if number.dtype.kind != "c" and float(number) == self.num_replicas:
                    low, high = (low, high + 1) if is_division and i else (low - 1, high)
        return max(low, -2), min(high, 2)

    def group_of(self, local: int, single: int) -> tuple[str, ...] | None:
        """Returns the mesh axes along which a dim with these sizes is split; None if several groups of axes are possible."""
        groups = self._groups_of(local, single)
        return groups[0] if len(groups) == 1 else None

    def any_group_of(self, local: int, single: int, used_axes: set[str]) -> tuple[str, ...] | None:
        """Returns unused mesh axes along which a dim with these sizes may be split, for a value that is constant along it."""
        return next((axes for axes in self._groups_of(local, single) if used_axes.isdisjoint(axes)), None)

    def _groups_of(self, local: int, single: int) -> list[tuple[str, ...]]:
        return [axes for axes in self.analysis.groups if local and single == local * self.analysis.group_size(axes)]


def number_of(atom: Any) -> float:
    """Returns the value of a constant operand."""
    return float(np.asarray(atom.val))


def kind_of_dtype(dtype: np.dtype) -> str:
    """Returns the kind of a dtype; numpy reports "V" for bfloat16 and the float8 dtypes, which are floats."""
    return "f" if dtype.kind == "V" else dtype.kind


def shifted_dim(dim: int, removed: Sequence[int]) -> int:
    """Returns the position of a dim after other dims are removed."""
    return dim - sum(other < dim for other in removed)


def ordered_offset(offset: Iterable[tuple[str, tuple[float, ...]]]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Returns an offset in the order of the axes, without axes of zeros, so that equal offsets compare as equal."""
    return tuple(sorted((axis, numbers) for axis, numbers in offset if any(numbers)))
