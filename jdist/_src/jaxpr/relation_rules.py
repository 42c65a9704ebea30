"""The rules of the equivalence analysis: the relation of the results of one equation, from those of its operands."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Literal
from jdist._src.jaxpr.marks import APPROXIMATE_CALL, FINITE_CALL, GUARD_CALL
from jdist._src.jaxpr.relations import (
    REPLICATED,
    ZERO,
    AnyRelation,
    Cause,
    Lost,
    Relation,
    Site,
    Split,
    aligned,
    flags,
    is_close,
    may_be_one,
)


class Analysis(Protocol):
    """What the rules use of the analysis."""

    axis_sizes: dict[str, int]
    groups: list[tuple[str, ...]]

    def site(self, equation: Equation) -> Site: ...

    def group_size(self, axes: Sequence[str]) -> int: ...


class Step:
    """One equation with its operands.

    Attributes:
        analysis: The analysis.
        equation: The equation of one replica.
        whole: The equation of one device.
        operands: The relations of the operands.
    """

    def __init__(self, analysis: Analysis, equation: Equation, whole: Equation, operands: Sequence[AnyRelation]):
        self.analysis, self.equation, self.whole = analysis, equation, whole
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

    def whole_result_shape(self, number: int = 0) -> tuple[int, ...]:
        """Returns the shape of a result, on one device."""
        return jax_compat.shape_of(self.whole.outvars[number])

    def is_same_operand(self) -> bool:
        """Whether both operands are one value."""
        first, second = self.equation.invars
        return not isinstance(first, Literal) and first is second

    def cause(self, *operands: AnyRelation) -> Cause:
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
        return self._lost_again(min(values, key=lambda one: (not one.is_unknown, one.cause.depth if one.cause else 0)))

    def checked(self, result: AnyRelation, number: int) -> AnyRelation:
        """Returns `result` if it fits the shapes of both results."""
        if isinstance(result, Lost):
            return result
        local, whole = self.result_shape(number), self.whole_result_shape(number)
        if len(local) != len(whole):
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
        if tuple(expected) != tuple(whole):
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
        fitting = aligned(values, self.analysis.axis_sizes)
        if fitting is None:
            return self.lost("mixed", *values)
        return dataclasses.replace(
            fitting[0],
            is_zero=all(value.is_zero for value in values),
            is_nonnegative=all(value.is_nonnegative for value in values),
            **flags(*values),
        )

    # Rules for kinds of equations. Each returns one relation per result.

    def other(self) -> list[AnyRelation]:
        """An equation without a rule: equal operands have equal results."""
        contents = jax_compat.contents(self.equation)
        is_plain = all(value.is_equal for value in self.operands)
        has_effect = any(map(jax_compat.may_vary_between_replicas, self.equation.effects))
        names_axis = contents.names & set(self.analysis.axis_sizes)
        if not is_plain or contents.opaque or has_effect or names_axis or not self._has_same_params():
            return self.every(self.lost("no rule"))
        return self.every(Relation(**flags(*self.operands)))

    def _has_same_params(self) -> bool:
        own, other = self.equation.params, self.whole.params
        return own.keys() == other.keys() and self._has_same(*(own.keys() - {"sharding", "out_sharding"}))

    def _has_same(self, *keys: str) -> bool:
        """Whether these parameters are equal in both programs."""
        pairs = [(self.params.get(key), self.whole.params.get(key)) for key in keys]
        try:
            return all(a is b or bool(a == b) or a != a and b != b for a, b in pairs)  # NaN
        except Exception:  # arrays, or objects of libraries
            return False

    def every(self, result: AnyRelation) -> list[AnyRelation]:
        """Returns the same relation for every result."""
        return [result] * len(self.equation.outvars)

    def pointwise(self) -> list[AnyRelation]:
        """Any function of single elements."""
        return self.every(self._pointwise())

    def _pointwise(self, **known: Any) -> AnyRelation:
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
        spread = self._spread(values)
        if isinstance(spread, Lost):
            return spread
        return Relation(splits=spread[0].splits, stack=spread[0].stack, **flags(*values), **known)

    def _spread(self, values: Sequence[Relation]) -> list[Relation] | Lost:
        """Gives values that are broadcast to the shape of the result the splits of those that they are combined with."""
        known = sorted(
            (split for value in values for split in value.splits),
            key=lambda split: (not split.is_constant, split.regrouped),
        )
        splits = {split.dim: split for split in known}
        stack = next((value.stack for value in values if value.stack), None)
        spread = []
        for i, value in enumerate(values):
            shape = jax_compat.shape_of(self.whole.invars[i])
            own = {split.dim: split for split in value.splits}
            is_broadcast = lambda dim, shape=shape: not shape or shape[dim] == 1
            for dim, split in splits.items():
                own_split = own.get(dim, split)
                sizes = [self.analysis.group_size(one.axes) for one in (own_split, split)]
                is_same = own_split == split or own_split.is_constant and sizes[0] == sizes[1]
                if not is_same or dim not in own and not is_broadcast(dim):
                    return self.lost("order", value)
                if dim not in own and value.partial & set(split.axes):
                    return self.lost("statistic", value)
            if stack and value.stack != stack and (value.stack or shape and self.shape(i)[stack[1]] != 1):
                return self.lost("no rule", value)
            ordered = tuple(splits[dim] for dim in sorted(splits))
            spread.append(value.replace(splits=ordered, stack=stack))
        return spread

    def nonnegative(self) -> list[AnyRelation]:
        """A function of single elements whose results are at least 0."""
        return self.every(self._pointwise(is_nonnegative=True))

    def keeps(self) -> list[AnyRelation]:
        """The result is the operand."""
        return list(self.operands)[: len(self.equation.outvars)]

    def negated(self) -> list[AnyRelation]:
        (value,) = self.operands
        if value.extreme:
            return [self.lost("extreme", value)]
        offset = tuple((axis, tuple(-x for x in numbers)) for axis, numbers in value.offset)
        return [value.replace(offset=offset, is_nonnegative=value.is_zero)]

    def converted(self) -> list[AnyRelation]:
        (value,) = self.operands
        old, new = (np.dtype(jax_compat.dtype_of(atom)) for atom in (self.equation.invars[0], self.equation.outvars[0]))
        rounds = _kind(old) in "fc" and _kind(new) not in "fc"
        if value.is_first:
            return [value]
        if new.kind == "b" and old.kind != "b" or rounds:
            return [self._pointwise(is_nonnegative=value.is_nonnegative, is_zero=value.is_zero)]
        nonnegative = value.is_nonnegative or old.kind in "bu"
        return [value.replace(is_nonnegative=nonnegative)]

    def power(self, exponent: float, **known: Any) -> list[AnyRelation]:
        """A power, of which a factor can be taken out."""
        (value,) = self.operands
        if exponent > 0 and value.is_zero:
            return [value]
        if value.is_plain and value.factor > 0:
            return [value.replace(factor=value.factor**exponent, is_zero=False, **{"is_nonnegative": False, **known})]
        return [self._pointwise(**known)]

    def integer_power(self) -> list[AnyRelation]:
        y = self.params["y"]
        if self.whole.params["y"] != y:
            return [self.lost("no rule")]
        if y == 1:
            return self.keeps()
        return self.power(y, is_nonnegative=y % 2 == 0 or self.operands[0].is_nonnegative)

    def square(self) -> list[AnyRelation]:
        return self.power(2, is_nonnegative=True)

    def square_root(self) -> list[AnyRelation]:
        return self.power(0.5, is_nonnegative=True)

    def inverse_square_root(self) -> list[AnyRelation]:
        return self.power(-0.5, is_nonnegative=True)

    def absolute(self) -> list[AnyRelation]:
        (value,) = self.operands
        return [value] if value.is_nonnegative and not value.offset else self.power(1, is_nonnegative=True)

    def sign(self) -> list[AnyRelation]:
        return self.power(0)

    def finite(self) -> list[AnyRelation]:
        """A sum is finite if and only if its parts are, up to overflow."""
        (value,) = self.operands
        if value.partial and not (value.extreme or value.stack or value.is_special):
            return [value.replace(factor=1.0, partial=frozenset(), extreme=("min", value.partial))]
        if value.is_plain:
            return [value.replace(factor=1.0, is_zero=False, is_nonnegative=True)]
        return [self._pointwise()]

    def bounded(self) -> list[AnyRelation]:
        """`max` and `min`: equal factors are kept, and so is a bound that has no effect."""
        first, second = self.operands
        if self.is_same_operand():
            return [first]
        if self.equation.primitive.name == "max":
            for value, bound in ((first, second), (second, first)):
                if bound.is_zero and value.is_nonnegative and not value.offset:
                    return [value]
        return [self._with_equal_factors(first.is_nonnegative or second.is_nonnegative)]

    def clamped(self) -> list[AnyRelation]:
        return [self._with_equal_factors(self.operands[0].is_nonnegative)]

    def _with_equal_factors(self, is_nonnegative: bool) -> AnyRelation:
        others = [value for value in self.operands if not value.is_zero]
        factors = {value.factor for value in others}
        if len(factors) == 1 and all(value.is_plain for value in others):
            scaled, self.operands = self.operands, [value.replace(factor=1.0) for value in self.operands]
            result = self._pointwise(is_nonnegative=is_nonnegative)
            self.operands = scaled
            return result if isinstance(result, Lost) else result.replace(factor=factors.pop())
        return self._pointwise(is_nonnegative=is_nonnegative)

    def compared(self) -> list[AnyRelation]:
        first, second = self.operands
        name = self.equation.primitive.name
        index, other = (first, second) if first.is_index else (second, first)
        if name == "eq" and index.is_index and other.is_zero and self._is_pure_index(index):
            return [Relation(is_first=True)]
        if self.is_same_operand():  # except for NaN
            return [Relation(splits=first.splits)]
        # The test for a negative index: positions of examples are at least 0.
        if name == "lt" and second.is_zero and first.is_nonnegative and (first.is_index or first.offset):
            return [ZERO.replace(splits=first.splits)]
        result = self._with_equal_factors(False)
        if isinstance(result, Lost):
            return [result]
        zero_test = first if name == "eq" and second.is_zero else None
        return [result.replace(factor=1.0, zero_test=zero_test)]

    def _is_pure_index(self, value: Relation) -> bool:
        """Whether a multiple of the index is 0 on the first replica only."""
        axes = {axis for axis, numbers in value.offset if all(numbers)}
        return axes == set(self.analysis.axis_sizes)

    def added(self) -> list[AnyRelation]:
        """A sum or a difference."""
        first, second = self.operands
        is_difference = self.equation.primitive.name == "sub"
        if is_difference and self.is_same_operand():
            return [ZERO.replace(splits=first.splits)]
        if second.is_zero or first.is_zero:
            return [self._added_zero(is_difference)]
        if first.extreme or second.extreme or first.is_key or second.is_key or first.is_first or second.is_first:
            return [self.lost("extreme")]
        offset = _added_offsets(first.offset, second.offset, -1 if is_difference else 1)
        if first.offset or second.offset:
            return [self._added_positions(offset)]
        spread = self._spread([first, second])
        if isinstance(spread, Lost):
            return [spread]
        self.operands = spread
        fitting = aligned(self.operands, self.analysis.axis_sizes)
        if fitting is None:
            return [self._mixed()]
        nonnegative = not is_difference and first.is_nonnegative and second.is_nonnegative
        return [fitting[0].replace(is_zero=False, is_nonnegative=nonnegative, **flags(first, second))]

    def _added_zero(self, is_difference: bool) -> AnyRelation:
        spread = self._spread(self.operands)
        if isinstance(spread, Lost):
            return spread
        first, second = spread
        if second.is_zero:
            return first
        self.operands = [second]
        return self.negated()[0] if is_difference else second

    def _mixed(self) -> Lost:
        """Returns why values do not fit: with one factor they would, or nothing is known."""
        first, second = self.operands[:2]
        if (first.partial or second.partial) and first.splits == second.splits and first.stack == second.stack:
            in_doubt = any(value.doubt != (0, 0) and not value.is_zero for value in (first, second))
            return self.lost("doubt" if in_doubt and self._differ_by_number(first, second) else "mixed")
        if first.is_plain and second.is_plain and first.splits == second.splits:
            return self.lost("factor")
        return self.lost("order")

    def _differ_by_number(self, first: Relation, second: Relation) -> bool:
        """Whether the factors of two values of one kind differ by the number of replicas."""
        sizes = [math.prod([self.analysis.axis_sizes[axis] for axis in value.partial]) for value in (first, second)]
        ratio = first.factor * sizes[0] / (second.factor * sizes[1])
        return any(is_close(ratio, float(self.num_replicas) ** power) for power in (-1, 1))

    def _added_positions(self, offset: tuple[Any, ...]) -> AnyRelation:
        """The sum of a multiple of the replica's index, or of positions, and another value."""
        spread = self._spread(self.operands)
        if isinstance(spread, Lost):
            return spread
        first, second = spread
        if first.partial or second.partial or first.stack or second.stack:
            return self.lost("index")
        if not (is_close(first.factor, 1) and is_close(second.factor, 1)):
            # A number of positions, such as the size in the wrap of a negative index, differs between the programs.
            return self.lost("index")
        splits = first.splits or second.splits
        if first.splits and second.splits and first.splits != second.splits:
            return self.lost("order")
        is_index = first.is_index and second.is_index
        nonnegative = first.is_nonnegative and second.is_nonnegative and self.equation.primitive.name != "sub"
        return Relation(
            splits=splits, offset=offset, is_index=is_index, is_nonnegative=nonnegative, **flags(first, second)
        )

    def multiplied(self) -> list[AnyRelation]:
        for value in self.operands:
            if isinstance(value, Relation) and value.is_zero:
                return [self._zeros()]
        if lost := self.lost_operand():
            is_weighted = lost.reason == "ratio" and any(
                isinstance(value, Relation) and value.partial for value in self.operands
            )
            return [self.lost("no rule") if is_weighted else lost]  # the mean of a replica, times its count
        first, second = self.operands
        if first.is_index or second.is_index:
            return [self._multiple_of_index()]
        if first.offset or second.offset:
            return [self._multiple_of_positions()]
        result = self._noted(self._product(first, second))
        if isinstance(result, Lost):
            return [result]
        nonnegative = self.is_same_operand() or first.is_nonnegative and second.is_nonnegative
        return [result.replace(is_nonnegative=nonnegative)]

    def _zeros(self) -> AnyRelation:
        """Returns zeros of the shape of the result."""
        local, whole = self.result_shape(), self.whole_result_shape()
        if len(local) != len(whole):
            return self.lost("no rule")
        known = {split.dim: split for value in self.operands if isinstance(value, Relation) for split in value.splits}
        splits = []
        for dim in range(len(local)):
            if local[dim] == whole[dim]:
                continue
            axes = self._group_of(local[dim], whole[dim])
            if dim not in known and axes is None:
                return self.lost("no rule")
            splits.append(known[dim] if dim in known else Split(axes, dim))  # type: ignore[arg-type]
        return ZERO.replace(splits=tuple(splits))

    def _multiple_of_index(self) -> AnyRelation:
        """Returns a multiple of the index, which is 0 on one device."""
        for i, value in enumerate(self.operands):
            if value.is_index and isinstance(self.equation.invars[1 - i], Literal):
                factor = _number(self.equation.invars[1 - i])
                offset = tuple((axis, tuple(x * factor for x in numbers)) for axis, numbers in value.offset)
                return value.replace(offset=offset, is_nonnegative=value.is_nonnegative and factor > 0)
        return self.lost("index")

    def _multiple_of_positions(self) -> AnyRelation:
        for i, value in enumerate(self.operands):
            other = self.operands[1 - i]
            if value.offset and isinstance(self.equation.invars[1 - i], Literal) and other.factor == 1:
                factor = _number(self.equation.invars[1 - i])
                offset = tuple((axis, tuple(x * factor for x in numbers)) for axis, numbers in value.offset)
                return value.replace(offset=offset, is_nonnegative=False)
        return self.lost("index")

    def _product(self, first: Relation, second: Relation, splits: tuple[Split, ...] | None = None) -> AnyRelation:
        """The relation of a product, in which each operand is linear."""
        for value, other in ((first, second), (second, first)):
            if value.extreme or value.is_special:
                return self.lost("index" if value.is_special else "extreme", value)
            other_axes = {axis for split in other.splits for axis in split.axes}
            if value.partial & other.partial:
                return self.lost("partial", value, other)
            if splits is None and value.partial & other_axes:
                return self.lost("statistic", value)
        stack = None
        if splits is None:
            spread = self._spread([first, second])
            if isinstance(spread, Lost):
                return spread
            splits, stack = spread[0].splits, spread[0].stack
        return Relation(
            first.factor * second.factor,
            splits,
            first.partial | second.partial,
            stack=stack,
            **{**flags(first, second), "doubt": self._doubt()},
        )

    def _noted(self, result: AnyRelation) -> AnyRelation:
        """Returns a product; with this equation as its origin, if the factor of a value that is not partial changes here."""
        if isinstance(result, Lost) or result.partial or is_close(result.factor, 1):
            return result
        if any(is_close(value.factor, result.factor) for value in self.operands):
            return result
        return result.replace(origin=self.cause())

    def _doubt(self) -> tuple[int, int]:
        """Returns the powers of the number of replicas that constants may be in a product or a quotient."""
        low, high = (sum(value.doubt[k] for value in self.operands) for k in (0, 1))
        is_division = self.equation.primitive.name == "div"
        for i, (atom, value) in enumerate(zip(self.equation.invars, self.operands, strict=True)):
            if isinstance(atom, Literal) and value.factor == 1 and not np.ndim(atom.val):
                number = np.asarray(atom.val)
                if number.dtype.kind != "c" and float(number) == self.num_replicas:
                    low, high = (low, high + 1) if is_division and i else (low - 1, high)
        return max(low, -2), min(high, 2)

    def divided(self) -> list[AnyRelation]:
        first, second = self.operands
        if first.is_zero:
            return [first]
        if first.is_special or first.is_index or second.is_special or second.is_index:
            return [self.lost("index")]
        if second.partial:
            return [self.lost("ratio" if first.partial else "partial", second)]
        if second.extreme or first.extreme:
            return [self.lost("extreme")]
        inverse = second.replace(factor=1 / second.factor)
        result = self._noted(self._product(first, inverse))
        if isinstance(result, Lost):
            return [result]
        return [result.replace(is_nonnegative=first.is_nonnegative and second.is_nonnegative)]

    def raised(self) -> list[AnyRelation]:
        """`pow` with a constant exponent."""
        exponent = self.equation.invars[1]
        if isinstance(exponent, Literal) and self.operands[1].is_equal:
            number = float(np.asarray(exponent.val))
            self.operands = self.operands[:1]
            return self.power(number, is_nonnegative=self.operands[0].is_nonnegative)
        return self.pointwise()

    def selected(self) -> list[AnyRelation]:
        """`select_n`: a choice between values, element by element."""
        predicate, *cases = self.operands
        first = self.equation.invars[1]
        if all(atom is first for atom in self.equation.invars[1:]):
            return [cases[0]]
        if isinstance(predicate, Relation):
            if predicate.is_zero:
                return [cases[0]]
            if predicate.is_first and len(cases) == 2:
                return [self._of_first_replica(*cases)]
        if lost := self.lost_operand():
            return [lost]
        # `where(x == 0, 1, x)` guards a division, of a number that is 0 if `x` is.
        if len(cases) == 2 and predicate.zero_test is cases[0] and predicate.is_pointwise and cases[0].is_plain:
            return [cases[0].replace(is_zero=False)]
        if not predicate.is_pointwise:
            return [
                self._pointwise() if predicate.is_special or predicate.is_index else self.lost("predicate", predicate)
            ]
        spread = self._spread(self.operands)
        if isinstance(spread, Lost):
            return [spread]
        self.operands = spread[1:]
        joined = self.joined(self.operands)
        if isinstance(joined, Lost):
            return [self._mixed() if joined.reason == "mixed" else joined]
        return [joined.replace(**flags(predicate, joined))]

    def _of_first_replica(self, others: AnyRelation, first: AnyRelation) -> AnyRelation:
        """A value on replica 0, and zeros elsewhere: a replicated value becomes its partial sum, as in a broadcast."""
        has_zeros = isinstance(others, Relation) and others.is_zero
        if has_zeros and isinstance(first, Relation) and first.is_plain and not first.splits:
            return first.replace(
                partial=frozenset(self.analysis.axis_sizes),
                is_zero=False,
                origin=first.origin or self.cause(),
            )
        return self.lost("first", *(value for value in (others, first) if isinstance(value, Relation)))

    # Reductions.

    def summed(self) -> list[AnyRelation]:
        (value,) = self.operands
        axes = self.params["axes"]
        if value.is_zero:
            return [ZERO.replace(splits=self._without_dims(value.splits, axes))]
        if value.is_special or value.is_index:
            return [self.lost("index")]
        if value.extreme:
            return [self.lost("extreme")]
        removed = {axis for split in value.splits if split.dim in axes for axis in split.axes}
        factor, partial, stack = value.factor, value.partial, value.stack
        if stack is not None and stack[1] in axes:
            stack_axes = set(stack[0])
            if stack_axes <= partial:
                partial -= stack_axes
            elif stack_axes <= removed:
                removed -= stack_axes
            elif any(set(split.axes) & stack_axes for split in value.splits):
                return [self.lost("extreme")]
            else:
                factor /= self.analysis.group_size(stack[0])
            stack = None
        elif stack is not None:
            stack = (stack[0], _shifted_dim(stack[1], axes))
        new_partial = partial | removed
        origin = value.origin if not removed else self.cause(value)
        return [
            Relation(
                factor,
                self._without_dims(value.splits, axes),
                new_partial,
                stack=stack,
                is_nonnegative=value.is_nonnegative,
                **{**flags(value), "origin": origin},
            )
        ]

    def extreme(self, name: str) -> list[AnyRelation]:
        """A maximum or a minimum over dims."""
        (value,) = self.operands
        axes = self.params["axes"]
        if value.partial:
            return [self.lost("partial", value)]
        if value.is_special or value.is_index or value.factor <= 0 or value.stack:
            return [self.lost("no rule")]
        if value.extreme and value.extreme[0] != name:
            return [self.lost("extreme")]
        removed = frozenset(axis for split in value.splits if split.dim in axes for axis in split.axes)
        over = removed | (value.extreme[1] if value.extreme else frozenset())
        return [
            value.replace(
                splits=self._without_dims(value.splits, axes),
                extreme=(name, over) if over else None,
                origin=self.cause(value) if removed else value.origin,
            )
        ]

    def maximum(self) -> list[AnyRelation]:
        return self.extreme("max")

    def minimum(self) -> list[AnyRelation]:
        return self.extreme("min")

    def reduced(self) -> list[AnyRelation]:
        """Another reduction over dims."""
        (value,) = self.operands
        axes = self.params["axes"]
        if value.partial:
            return self.every(self.lost("partial", value))
        if any(split.dim in axes for split in value.splits):
            return self.every(self.lost("examples", value))
        if not value.is_plain or value.factor <= 0:
            return self.every(self.lost("no rule"))
        if self.equation.primitive.name == "reduce_prod" and not is_close(value.factor, 1):
            return self.every(self.lost("factor", value))
        factor = 1.0 if self.equation.primitive.name.startswith("arg") else value.factor
        return self.every(value.replace(factor=factor, is_zero=False, splits=self._without_dims(value.splits, axes)))

    def _without_dims(self, splits: Iterable[Split], axes: Sequence[int]) -> tuple[Split, ...]:
        return tuple(s.replace(dim=_shifted_dim(s.dim, axes)) for s in splits if s.dim not in axes)

    # Shapes.

    def _moved(self, value: Relation, position: Callable[[int], int | None]) -> AnyRelation:
        """Returns a value whose dims are moved; None for a dim that does not exist any more."""
        moved = [(split, position(split.dim)) for split in value.splits]
        if any(dim is None for _, dim in moved):
            return self.lost("no rule")
        splits = tuple(sorted((s.replace(dim=dim) for s, dim in moved if dim is not None), key=lambda s: s.dim))
        stack = value.stack
        if stack is not None:
            dim = position(stack[1])
            if dim is None:
                return self.lost("no rule")
            stack = (stack[0], dim)
        rank = len(self.shape(0))
        if (
            any(len(numbers) > 1 for _, numbers in value.offset)
            and rank
            and position(rank - 1) != len(self.result_shape()) - 1
        ):
            return self.lost("index")
        return value.replace(splits=splits, stack=stack)

    def broadcast(self) -> list[AnyRelation]:
        value = self.operands[0]
        targets, sizes = self.params["broadcast_dimensions"], self.shape(0)
        if self.whole.params["broadcast_dimensions"] != targets or len(self.operands) > 1:
            return [self.lost("no rule")]
        local, whole = self.result_shape(), self.whole_result_shape()
        result = self._moved(value, lambda dim: targets[dim] if sizes[dim] == local[targets[dim]] else None)
        if isinstance(result, Lost):
            return [result]
        known = {split.dim for split in result.splits} | ({result.stack[1]} if result.stack else set())
        for dim in range(len(local)):
            if dim in known or local[dim] == whole[dim]:
                continue
            axes = self._any_group_of(local[dim], whole[dim], known={a for s in result.splits for a in s.axes})
            copies = self._group_of(whole[dim], local[dim])
            if axes is None and copies and whole[dim] == 1 and result.is_plain:
                result = result.replace(stack=(copies, dim))
                continue
            if axes is None:
                return [self._unknown_broadcast(result)]
            if result.partial & set(axes):
                return [self.lost("statistic", value)]
            if result.extreme or result.is_key:
                return [self.lost("extreme", value)]
            splits = tuple(sorted([*result.splits, Split(axes, dim, is_constant=True)], key=lambda s: s.dim))
            result = result.replace(splits=splits)
        return [result]

    def _unknown_broadcast(self, value: Relation) -> Lost:
        """A value for each pair of examples is formed in each replica alone."""
        local, whole = self.result_shape(), self.whole_result_shape()
        number = math.prod(self.analysis.axis_sizes.values())
        return self.lost(
            "pairs" if sum(w == n * number for n, w in zip(local, whole, strict=True)) > 1 else "no rule", value
        )

    def _group_of(self, local: int, whole: int, known: set[str] = frozenset()) -> tuple[str, ...] | None:  # type: ignore[assignment]
        """Returns the mesh axes along which a dim is split that has these sizes; None if they are not known."""
        found = self._groups_of(local, whole, known)
        return found[0] if len(found) == 1 else None

    def _any_group_of(self, local: int, whole: int, known: set[str]) -> tuple[str, ...] | None:
        """Returns mesh axes along which a dim may be split that has these sizes: any will do if the value is constant."""
        return next(iter(self._groups_of(local, whole, known)), None)

    def _groups_of(self, local: int, whole: int, known: set[str]) -> list[tuple[str, ...]]:
        return [
            axes
            for axes in self.analysis.groups
            if local and whole == local * self.analysis.group_size(axes) and not set(axes) & known
        ]

    def reshaped(self) -> list[AnyRelation]:
        value = self.operands[0]
        if self.params.get("dimensions") is not None or len(self.operands) > 1:
            return [self.lost("no rule")]
        has_columns = any(len(numbers) > 1 for _, numbers in value.offset)
        if has_columns and self.shape(0)[-1:] != self.result_shape()[-1:]:
            return [self.lost("index")]
        old, new, whole = self.shape(0), self.result_shape(), self.whole_result_shape()
        splits, stack = list(value.splits), value.stack
        if stack is not None:
            stack_axes, dim = stack
            merged = [s for s in splits if s.axes == stack_axes and s.dim == dim + 1 and s.outer == 1]
            stack_dim = _dim_after(old, new, dim)
            number = self.analysis.group_size(stack_axes)
            if stack_dim is not None and new[stack_dim] == number and whole[stack_dim : stack_dim + 1] == (1,):
                stack = (stack_axes, stack_dim)
            elif merged:  # the parts, one after the other, are the value of one device
                splits.remove(merged[0])
                stack = None
            elif stack_dim is not None and new[stack_dim] % number == 0 and dim + 1 <= len(old):
                stack = (stack_axes, stack_dim)
            else:
                return [self.lost("no rule")]
        result = []
        for split in splits:
            mapped = self._reshaped_split(split, old, new, whole)
            if mapped is None:
                return [self.lost("no rule")]
            result.append(mapped)
        result.sort(key=lambda s: s.dim)
        return [value.replace(splits=tuple(result), stack=stack)]

    def _reshaped_split(
        self, split: Split, old: Sequence[int], new: Sequence[int], whole: Sequence[int]
    ) -> Split | None:
        """Returns a split after a reshape: the elements before the split dim, and in each part of it, are the same."""
        before = math.prod(old[: split.dim]) * split.outer
        size = self.analysis.group_size(split.axes)
        candidates = [dim for dim in range(len(new)) if len(whole) == len(new) and whole[dim] == new[dim] * size]
        for dim in candidates:
            first = math.prod(new[:dim])
            if first and before % first == 0 and before // first and new[dim] % (before // first) == 0:
                return split.replace(dim=dim, outer=before // first)
        for dim in candidates:  # each replica divides its part into micro-batches
            first = math.prod(new[:dim])
            if before and first % before == 0:
                return split.replace(dim=dim, outer=1, regrouped=split.regrouped * (first // before))
            merged = before // max(split.regrouped, 1)
            if split.regrouped > 1 and merged and merged % max(first, 1) == 0:
                return split.replace(dim=dim, outer=merged // first, regrouped=1)
        return None

    def transposed(self) -> list[AnyRelation]:
        permutation = self.params["permutation"]
        return [self._moved(self.operands[0], lambda dim: permutation.index(dim))]

    def squeezed(self) -> list[AnyRelation]:
        dims = self.params["dimensions"]
        return [self._moved(self.operands[0], lambda dim: None if dim in dims else _shifted_dim(dim, dims))]

    def expanded(self) -> list[AnyRelation]:
        dims = set(self.params["dimensions"])
        kept = [dim for dim in range(len(self.result_shape())) if dim not in dims]
        return [self._moved(self.operands[0], lambda dim: kept[dim])]

    def reversed(self) -> list[AnyRelation]:
        value = self.operands[0]
        if any(split.dim in self.params["dimensions"] for split in value.splits) or value.stack or value.offset:
            return [self.lost("order")]
        return [value]

    def concatenated(self) -> list[AnyRelation]:
        dim = self.params["dimension"]
        values = self.operands
        if any(value.offset or value.is_index for value in values):
            return [self._concatenated_positions(dim)]
        splits = [s for value in values for s in value.splits if s.dim == dim]
        if splits:
            sizes = {self.shape(i)[dim] for i in range(len(values))}
            plain = [value.replace(splits=tuple(s for s in value.splits if s.dim != dim)) for value in values]
            joined = self.joined(plain)
            if len(splits) < len(values) or len(sizes) > 1 or {s.axes for s in splits} != {splits[0].axes}:
                return [self.lost("no rule")]
            if any(s.outer != 1 for s in splits) or isinstance(joined, Lost):
                return [joined if isinstance(joined, Lost) else self.lost("order")]
            new = sorted(
                [*joined.splits, Split(splits[0].axes, dim, len(values), splits[0].regrouped)], key=lambda s: s.dim
            )
            return [joined.replace(splits=tuple(new))]
        if any(value.stack and value.stack[1] == dim for value in values):
            return [self.lost("no rule")]
        others = [value for value in values if not value.is_zero]
        filled = [v.replace(splits=others[0].splits) if v.is_zero and others else v for v in values]
        joined = self.joined(filled)
        return [self.lost("order") if isinstance(joined, Lost) and joined.reason == "mixed" else joined]

    def _concatenated_positions(self, dim: int) -> AnyRelation:
        """Joins indices of several dims to one index: each element of the last dim has its own offset."""
        values = self.operands
        if dim != len(self.result_shape()) - 1 or any(self.shape(i)[dim] != 1 for i in range(len(values))):
            return self.lost("index")
        if len({value.splits for value in values}) > 1 or any(
            not value.is_plain and not value.offset for value in values
        ):
            return self.lost("index")
        offset = []
        for axis in self.analysis.axis_sizes:
            numbers = [dict(value.offset).get(axis, (0.0,)) for value in values]
            if any(len(one) > 1 for one in numbers):
                return self.lost("index")
            offset.append((axis, tuple(one[0] for one in numbers)))
        nonnegative = all(value.is_nonnegative for value in values)
        return Relation(splits=values[0].splits, offset=tuple(offset), is_nonnegative=nonnegative, **flags(*values))

    def sliced(self) -> list[AnyRelation]:
        own, other = self.params, self.whole.params
        rank = len(self.shape(0))
        strides = own["strides"] or (1,) * rank
        if tuple(strides) != tuple(other["strides"] or (1,) * rank):
            return [self.lost("no rule")]
        part, whole = (_Part(p["start_indices"], p["limit_indices"]) for p in (own, other))
        return [self._part(self.operands[0], part, whole, strides)]

    def split_apart(self) -> list[AnyRelation]:
        """`split` along one dim."""
        axis = self.params["axis"]
        if self.whole.params["axis"] != axis:
            return self.every(self.lost("no rule"))
        shapes = [jax_compat.shape_of(equation.invars[0]) for equation in (self.equation, self.whole)]
        sizes = [equation.params["sizes"] for equation in (self.equation, self.whole)]
        ends = [list(itertools.accumulate(one)) for one in sizes]
        results = []
        for number in range(len(sizes[0])):
            parts = []
            for k in (0, 1):
                end, size = ends[k][number], sizes[k][number]
                start = [end - size if dim == axis else 0 for dim in range(len(shapes[k]))]
                parts.append(_Part(start, [end if dim == axis else n for dim, n in enumerate(shapes[k])]))
            results.append(self._part(self.operands[0], parts[0], parts[1], (1,) * len(shapes[0])))
        return results

    def _part(self, value: Relation, own: "_Part", other: "_Part", strides: Sequence[int]) -> AnyRelation:
        """Returns the relation of a slice: whole blocks of a split dim, and the same elements of the others."""
        sizes, splits, changed = self.shape(0), [], set()
        for split in value.splits:
            dim, number = split.dim, self.analysis.group_size(split.axes)
            changed.add(dim)
            block = sizes[dim] // split.outer
            start, limit = own.start[dim], own.limit[dim]
            is_scaled = (other.start[dim], other.limit[dim]) == (start * number, limit * number)
            if strides[dim] != 1 or start % block or limit % block or not is_scaled or start == limit:
                return self.lost("part", value)
            splits.append(split.replace(outer=(limit - start) // block))
        for dim in range(len(sizes)):
            is_stack = value.stack is not None and value.stack[1] == dim
            if dim in changed or is_stack:
                continue
            if (own.start[dim], own.limit[dim]) != (other.start[dim], other.limit[dim]):
                return self.lost("no rule")
        if value.stack is not None:
            axes, dim = value.stack
            if (own.start[dim], own.limit[dim]) != (0, sizes[dim]):
                is_copy = not (
                    set(axes) & value.partial or any(set(s.axes) & set(axes) for s in splits) or value.extreme
                )
                if not is_copy or own.limit[dim] - own.start[dim] != 1 or sizes[dim] != self.analysis.group_size(axes):
                    return self.lost("index", value)
                value = value.replace(stack=None)
        if any(len(numbers) > 1 for _, numbers in value.offset) and own.limit[-1] - own.start[-1] != sizes[-1]:
            return self.lost("index")
        return value.replace(splits=tuple(splits))

    def tiled(self) -> list[AnyRelation]:
        """`tile`: a dim that is repeated is not split."""
        value, reps = self.operands[0], self.params["reps"]
        if value.is_plain and not value.splits and not value.stack and self.whole.params["reps"] != reps:
            return [self._repeated(value)]
        if self.whole.params["reps"] != reps or value.stack or value.offset:
            return [self.lost("no rule")]
        missing = len(reps) - len(self.shape(0))
        moved = self._moved(value, lambda dim: dim + missing)
        if isinstance(moved, Lost):
            return [moved]
        splits = [split.replace(outer=split.outer * reps[split.dim]) for split in moved.splits]
        if any(reps[split.dim] > 1 and split.regrouped > 1 for split in splits):
            return [self.lost("order")]
        return [moved.replace(splits=tuple(splits))]

    def stacked(self) -> list[AnyRelation]:
        """`stack` along a new dim."""
        axis = self.params["axis"]
        moved = []
        for value in self.operands:
            splits = tuple(s.replace(dim=s.dim + (s.dim >= axis)) for s in value.splits)
            stack = (value.stack[0], value.stack[1] + (value.stack[1] >= axis)) if value.stack else None
            moved.append(value.replace(splits=splits, stack=stack))
        if any(value.offset or value.is_index for value in moved):
            return [self.lost("index")]
        others = [value for value in moved if not value.is_zero]
        filled = [v.replace(splits=others[0].splits) if v.is_zero and others else v for v in moved]
        joined = self.joined(filled)
        return [self.lost("order") if isinstance(joined, Lost) and joined.reason == "mixed" else joined]

    def unstacked(self) -> list[AnyRelation]:
        """`unstack`: a dim becomes one result per index."""
        value, axis = self.operands[0], self.params["axis"]
        if len(self.whole.outvars) != len(self.equation.outvars) or value.offset:
            return self.every(self.lost("part", value))
        if value.stack and value.stack[1] == axis:
            is_copy = not (set(value.stack[0]) & value.partial or value.extreme)
            if not is_copy or any(set(split.axes) & set(value.stack[0]) for split in value.splits):
                return self.every(self.lost("index", value))
            value = value.replace(stack=None)
        if any(split.dim == axis for split in value.splits):
            return self.every(self.lost("part", value))
        return self.every(self._moved(value, lambda dim: _shifted_dim(dim, (axis,))))

    def zeros(self) -> list[AnyRelation]:
        return [self._zeros()]

    def transformed(self) -> list[AnyRelation]:
        """A linear transformation of the last dims."""
        value = self.operands[0]
        first = len(self.shape(0)) - len(self.params["fft_lengths"])
        if value.stack or value.extreme or value.is_special or any(split.dim >= first for split in value.splits):
            return [self.lost("no rule")]
        return [value.replace(is_nonnegative=False)]

    def _repeated(self, value: Relation) -> AnyRelation:
        """A value that every device has is repeated once for each of its examples."""
        local, whole = self.result_shape(), self.whole_result_shape()
        dims = [dim for dim in range(len(local)) if local[dim] != whole[dim]]
        axes = self._group_of(local[dims[0]], whole[dims[0]]) if len(dims) == 1 else None
        return value.replace(splits=(Split(axes, dims[0]),)) if axes else self.lost("no rule")

    def padded(self) -> list[AnyRelation]:
        value, filling = self.operands
        config, other = self.params["padding_config"], self.whole.params["padding_config"]
        if config != other or any(config[split.dim] != (0, 0, 0) for split in value.splits):
            return [self.lost("no rule")]
        if value.stack and config[value.stack[1]] != (0, 0, 0) or value.offset or filling.offset:
            return [self.lost("no rule")]
        if all(one == (0, 0, 0) for one in config):
            return [value]
        filling = filling.replace(splits=value.splits, stack=value.stack)
        return [self.joined([value, filling])]

    def positions(self) -> list[AnyRelation]:
        """`iota`."""
        local, whole = self.result_shape(), self.whole_result_shape()
        if local == whole:
            return [Relation(is_nonnegative=True)]
        dims = [dim for dim in range(len(local)) if local[dim] != whole[dim]]
        axes = self._group_of(local[dims[0]], whole[dims[0]])
        if len(dims) > 1 or axes is None:
            return [self.lost("no rule")]
        splits = (Split(axes, dims[0]),)
        if dims[0] != self.params["dimension"]:
            return [Relation(splits=splits, is_nonnegative=True)]
        offset, distance = [], float(local[dims[0]])
        for axis in reversed(axes):
            offset.append((axis, (distance,)))
            distance *= self.analysis.axis_sizes[axis]
        return [Relation(splits=splits, offset=_ordered(offset), is_nonnegative=True)]

    def cumulated(self) -> list[AnyRelation]:
        """A cumulative reduction; a sum is linear."""
        (value,) = self.operands
        if any(split.dim == self.params["axis"] for split in value.splits):
            return [self.lost("examples", value)]
        if self.equation.primitive.name == "cumsum" and not value.is_special and not value.extreme and not value.stack:
            return [value]
        return self.pointwise()

    def sorted(self) -> list[AnyRelation]:
        dim = self.params.get("dimension", len(self.shape(0)) - 1)
        if any(split.dim == dim for value in self.operands for split in value.splits):
            partial = next((value for value in self.operands if value.partial), None)
            return self.every(self.lost("partial", partial) if partial else self.lost("sorted"))
        if any(value.offset for value in self.operands):
            return self.every(self.lost("index"))
        if self.equation.primitive.name == "sort" and len(self.operands) == 1 and self.operands[0].is_plain:
            return self.every(self.operands[0])
        return self.pointwise()

    def matrices(self) -> list[AnyRelation]:
        """Linear algebra on the last two dims."""
        if not all(value.is_pointwise for value in self.operands):
            return self.every(self.lost("no rule"))
        spread = self._pointwise()
        ranks = [len(self.shape(i)) for i in range(len(self.operands))]
        if isinstance(spread, Lost) or any(split.dim >= min(ranks) - 2 for split in spread.splits):
            return self.every(self.lost("no rule"))
        return self.every(spread)

    def solved(self) -> list[AnyRelation]:
        """`triangular_solve`: linear in the second operand."""
        matrix, value = self.operands
        rank = len(self.shape(0))
        is_known = matrix.is_plain and matrix.factor > 0 and not (value.stack or value.extreme or value.is_special)
        axes = {axis for split in matrix.splits for axis in split.axes}
        columns = rank - 1 if self.params["left_side"] else rank - 2
        shared = tuple(split for split in value.splits if split.dim != columns)
        if not is_known or matrix.splits != shared or any(split.dim >= rank - 2 for split in shared):
            return [self.lost("no rule")]
        if value.partial & axes:
            return [self.lost("statistic", value)]
        return [value.replace(factor=value.factor / matrix.factor, is_nonnegative=False)]

    # Products.

    def contracted(self) -> list[AnyRelation]:
        """`dot_general`."""
        first, second = self.operands
        if first.stack or second.stack:
            return [self.lost("no rule")]
        contracting, batch = self.params["dimension_numbers"]
        ranks = [len(self.shape(0)), len(self.shape(1))]
        free = [[d for d in range(ranks[k]) if d not in contracting[k] and d not in batch[k]] for k in (0, 1)]
        positions: list[dict[int, int]] = []
        for k in (0, 1):
            start = len(batch[0]) + (len(free[0]) if k else 0)
            positions.append(
                {dim: n for n, dim in enumerate(batch[k])} | {dim: start + n for n, dim in enumerate(free[k])}
            )
        summed: set[str] = set()
        splits: set[Split] = set()
        for k, value in enumerate((first, second)):
            other = (second, first)[k]
            for split in value.splits:
                if split.dim in contracting[k]:
                    partner = contracting[1 - k][list(contracting[k]).index(split.dim)]
                elif split.dim in batch[k]:
                    partner = batch[1 - k][list(batch[k]).index(split.dim)]
                else:
                    splits.add(split.replace(dim=positions[k][split.dim]))
                    continue
                if split.replace(dim=partner) not in other.splits:
                    return [self.lost("order")]
                if split.dim in contracting[k]:
                    summed.update(split.axes)
                else:
                    splits.add(split.replace(dim=positions[k][split.dim]))
        return [self._bilinear(first, second, splits, summed)]

    def _bilinear(self, first: Relation, second: Relation, splits: set[Split], summed: set[str]) -> AnyRelation:
        split_axes = [axis for split in splits for axis in split.axes]
        if len(split_axes) > len(set(split_axes)) or set(split_axes) & summed:
            return self.lost("pairs")
        both = (first, second)
        axes = [{axis for split in value.splits for axis in split.axes} for value in both]
        for k, value in enumerate(both):
            if value.partial & axes[1 - k]:
                return self.lost("statistic", value)
        ordered = tuple(sorted(splits, key=lambda s: s.dim))
        result = self._product(first, second, ordered)
        if isinstance(result, Lost):
            return result
        nonnegative = first.is_nonnegative and second.is_nonnegative
        origin = self.cause(first, second) if summed else result.origin
        partial = result.partial | summed
        return result.replace(partial=partial, is_nonnegative=nonnegative, origin=origin)

    def convolved(self) -> list[AnyRelation]:
        """`conv_general_dilated`. The gradient of a kernel has the examples among the input features."""
        lhs, rhs = self.operands
        numbers = self.params["dimension_numbers"]
        groups = self.params["feature_group_count"], self.params["batch_group_count"]
        if lhs.stack or rhs.stack:
            return [self.lost("no rule")]
        splits: set[Split] = set()
        summed: set[str] = set()
        for split in lhs.splits:
            if split.dim == numbers.lhs_spec[0] and groups[1] == 1:
                splits.add(split.replace(dim=numbers.out_spec[0]))
            elif split.dim == numbers.lhs_spec[1] and groups == (1, 1):
                if split.replace(dim=numbers.rhs_spec[1]) not in rhs.splits:
                    return [self.lost("order")]
                summed.update(split.axes)
            else:
                return [self.lost("no rule")]
        for split in rhs.splits:
            if split.dim == numbers.rhs_spec[0] and groups == (1, 1):
                splits.add(split.replace(dim=numbers.out_spec[1]))
            elif split.dim != numbers.rhs_spec[1] or groups != (1, 1) or not summed:
                return [self.lost("no rule")]
        return [self._bilinear(lhs, rhs, splits, summed)]

    # Parts that are selected by indices.

    def gathered_rows(self) -> list[AnyRelation]:
        """`gather`: the operand is linear, and the indices select."""
        operand, indices = self.operands[:2]
        numbers = self.params["dimension_numbers"]
        if not self._has_same("fill_value", "mode") or operand.stack or indices.stack:
            return [self.lost("no rule")]
        offsets = list(map(int, numbers.offset_dims))
        positions = [dim for dim in range(len(self.result_shape())) if dim not in offsets]
        operand_batch, index_batch = list(numbers.operand_batching_dims), list(numbers.start_indices_batching_dims)
        rank = len(self.shape(0))
        windows = [d for d in range(rank) if d not in operand_batch and d not in numbers.collapsed_slice_dims]
        new_dims = dict(zip(windows, offsets, strict=True))
        if not self._is_selection(indices):
            return [self._unselectable(indices)]
        splits = {s.replace(dim=positions[s.dim]) for s in indices.splits if s.dim < len(positions)}
        indexed = list(numbers.start_index_map)
        uses_positions = False
        for split in operand.splits:
            dim = split.dim
            if dim in operand_batch:
                partner = index_batch[operand_batch.index(dim)]
                if split.replace(dim=partner) not in indices.splits:
                    return [self.lost("order")]
            elif dim in indexed:
                if not self._selects_own_rows(indices, indexed.index(dim), split, dim):
                    return [self.lost("part", operand)]
                uses_positions = True
            elif dim in new_dims and self.params["slice_sizes"][dim] == self.shape(0)[dim]:
                splits.add(split.replace(dim=new_dims[dim]))
            else:
                return [self.lost("part", operand)]
        if any(any(numbers_) for _, numbers_ in indices.offset) and not uses_positions:
            return [self.lost("index", indices)]
        axes = {axis for split in indices.splits for axis in split.axes}
        if operand.partial & axes or operand.extreme or operand.is_special or operand.is_index:
            return [self.lost("statistic" if operand.partial else "no rule", operand)]
        split_axes = [axis for split in splits for axis in split.axes]
        if len(split_axes) > len(set(split_axes)):
            return [self.lost("pairs")]
        ordered = tuple(sorted(splits, key=lambda s: s.dim))
        return [operand.replace(splits=ordered, is_zero=operand.is_zero, **flags(operand, indices))]

    def _is_selection(self, indices: Relation) -> bool:
        return not (
            indices.partial
            or indices.extreme
            or indices.stack
            or indices.is_first
            or indices.is_key
            or indices.is_index
        ) and is_close(indices.factor, 1)

    def _unselectable(self, indices: Relation) -> Lost:
        if indices.partial:
            return self.lost("partial", indices)
        return self.lost("index" if indices.is_index else "extreme", indices)

    def _selects_own_rows(self, indices: Relation, column: int, split: Split, dim: int) -> bool:
        """Whether a column of indices are the positions of the examples, which a replica and one device count from 0."""
        if split.outer != 1 or not any(s.axes == split.axes for s in indices.splits):
            return False
        size = self.shape(0)[dim]
        distances, distance = {}, float(size)
        for axis in reversed(split.axes):
            distances[axis] = distance
            distance *= self.analysis.axis_sizes[axis]
        own = dict(indices.offset)
        for axis, expected in distances.items():
            numbers = own.get(axis, (0.0,))
            value = numbers[0] if len(numbers) == 1 else numbers[column] if column < len(numbers) else None
            if value != expected:
                return False
        others = {i for numbers in own.values() if len(numbers) > 1 for i, x in enumerate(numbers) if x and i != column}
        return not others

    def scattered(self) -> list[AnyRelation]:
        """`scatter-add` is linear in operand and updates; another scatter selects between them."""
        operand, indices, updates = self.operands
        numbers = self.params["dimension_numbers"]
        if operand.stack or indices.stack or updates.stack:
            return [self.lost("no rule")]
        if not self._is_selection(indices):
            return [self._unselectable(indices)]
        is_sum = self.equation.primitive.name in ("scatter-add", "scatter_add", "scatter-sub")
        windows = list(numbers.update_window_dims)
        positions = [dim for dim in range(len(self.shape(2))) if dim not in windows]
        operand_batch, index_batch = list(numbers.operand_batching_dims), list(numbers.scatter_indices_batching_dims)
        kept = [
            d for d in range(len(self.shape(0))) if d not in operand_batch and d not in numbers.inserted_window_dims
        ]
        window_of = dict(zip(windows, kept, strict=True))
        indexed = list(numbers.scatter_dims_to_operand_dims)
        operand_splits: set[Split] = set()
        summed: set[str] = set()
        uses_positions = False
        updates_splits = {s for s in updates.splits}
        for split in updates.splits:
            if split.dim in window_of:
                dim = window_of[split.dim]
                if dim in indexed or self.shape(2)[split.dim] != self.shape(0)[dim]:
                    return [self.lost("part")]
                operand_splits.add(split.replace(dim=dim))
                continue
            index_dim = positions.index(split.dim)
            index_split = split.replace(dim=index_dim)
            if index_dim in index_batch:
                if index_split not in indices.splits:
                    return [self.lost("order")]
                operand_splits.add(split.replace(dim=operand_batch[index_batch.index(index_dim)]))
                continue
            own = [
                dim
                for column, dim in enumerate(indexed)
                if self._selects_own_rows(indices, column, split.replace(dim=dim, outer=1), dim)
            ]
            if own:
                uses_positions = True
                operand_splits.add(Split(split.axes, own[0]))
            elif is_sum and not any(any(x) for _, x in indices.offset):
                summed.update(split.axes)
            else:
                return [self.lost("part")]
        for split in indices.splits:
            is_of_updates = split.dim >= len(positions) or split.replace(dim=positions[split.dim]) in updates_splits
            if not is_of_updates and not updates.is_zero:
                return [self.lost("order")]
        if any(any(x) for _, x in indices.offset) and not uses_positions:
            return [self.lost("index")]
        ordered = tuple(sorted(operand_splits, key=lambda s: s.dim))
        if operand.is_zero:
            operand = operand.replace(splits=ordered)
        if operand.splits != ordered or updates.extreme or updates.is_special or operand.is_special or operand.extreme:
            return [self.lost("no rule")]
        if updates.partial & {axis for split in ordered for axis in split.axes} or updates.partial & summed:
            return [self.lost("statistic", updates)]
        moved = updates.replace(
            splits=ordered,
            partial=updates.partial | summed,
            origin=self.cause(updates) if summed else updates.origin,
        )
        if (
            is_sum
            or operand.is_zero
            and self.equation.primitive.name == "scatter"
            or self.equation.primitive.name == "scatter"
        ):
            values = [operand, moved]
        else:
            if not (operand.is_pointwise and moved.is_pointwise):
                return [self.lost("partial" if moved.partial else "no rule")]
            values = [operand, moved]
        self_operands, self.operands = self.operands, values
        fitting = aligned(values, self.analysis.axis_sizes)
        result: AnyRelation
        if fitting is None:
            result = self._mixed()
        else:
            nonnegative = operand.is_nonnegative and updates.is_nonnegative
            result = fitting[1].replace(
                is_zero=operand.is_zero and updates.is_zero, is_nonnegative=nonnegative, **flags(*values)
            )
        self.operands = self_operands
        return [result]

    def dynamic_part(self) -> list[AnyRelation]:
        """`dynamic_slice`: a split dim is taken as a whole."""
        value, *starts = self.operands
        sizes = self.params["slice_sizes"]
        own = self._own_part(value, starts)
        if own is not None:
            return [own]
        if not all(start.is_equal for start in starts[: len(sizes)]):
            if value.stack and not value.partial and not value.splits and len(sizes) and sizes[value.stack[1]] == 1:
                return [value.replace(stack=None)]
            return [self.lost("index" if any(start.is_special or start.is_index for start in starts) else "no rule")]
        if any(sizes[split.dim] != self.shape(0)[split.dim] for split in value.splits):
            return [self.lost("part", value)]
        if value.stack and sizes[value.stack[1]] != self.shape(0)[value.stack[1]]:
            splits = [s for s in value.splits if set(s.axes) & set(value.stack[0])]
            if sizes[value.stack[1]] == 1 and not splits and not value.partial and not value.extreme:
                return [value.replace(stack=None)]
            return [self.lost("index", value)]
        return [value.replace(**flags(value, *starts))]

    def _own_part(self, value: Relation, starts: Sequence[Relation]) -> Relation | None:
        """Returns the rows of each replica, if it takes them out of an array that all replicas have."""
        sizes = self.params["slice_sizes"]
        dims = [dim for dim, start in enumerate(starts[: len(sizes)]) if start.is_index]
        others = [start for start in starts if not start.is_index]
        if len(dims) != 1 or not value.is_plain or value.splits or not all(start.is_equal for start in others):
            return None
        axes, offset, distance = tuple(self.analysis.axis_sizes), dict(starts[dims[0]].offset), float(sizes[dims[0]])
        for axis in reversed(axes):
            if offset.get(axis) != (-distance,):
                return None
            distance *= self.analysis.axis_sizes[axis]
        if distance != self.shape(0)[dims[0]]:
            return None
        return value.replace(splits=(Split(axes, dims[0]),))

    def dynamic_update(self) -> list[AnyRelation]:
        value, update, *starts = self.operands
        if not all(start.is_equal for start in starts):
            return [self.lost("no rule")]
        for split in {*value.splits, *update.splits}:
            if self.shape(0)[split.dim] != self.shape(1)[split.dim]:
                return [self.lost("part", value)]
        others = [one for one in (value, update) if not one.is_zero]
        splits = others[0].splits if others else value.splits
        values = [one.replace(splits=splits) if one.is_zero else one for one in (value, update)]
        return [self.joined(values)]

    def windowed_sum(self) -> list[AnyRelation]:
        return self._windowed(self.operands[0])

    def windowed(self) -> list[AnyRelation]:
        value = self._pointwise()
        return self.every(value) if isinstance(value, Lost) else self._windowed(value)

    def _windowed(self, value: Relation) -> list[AnyRelation]:
        if value.stack or value.is_special or value.extreme or value.is_index:
            return self.every(self.lost("no rule"))
        window, strides = self.params["window_dimensions"], self.params["window_strides"]
        for split in value.splits:
            if window[split.dim] != 1 or strides[split.dim] != 1 or self.params["padding"][split.dim] != (0, 0):
                return self.every(self.lost("examples"))
        return self.every(value)

    def select_and_scatter(self) -> list[AnyRelation]:
        """The gradient of a maximum over windows: linear in the first operand."""
        source, operand = self.operands[:2]
        if not operand.is_plain or operand.factor <= 0 or source.splits != operand.splits or source.stack:
            return [self.lost("no rule")]
        if source.is_special or source.extreme or source.partial & {a for s in operand.splits for a in s.axes}:
            return [self.lost("no rule")]
        window = self.params["window_dimensions"]
        if any(window[split.dim] != 1 for split in source.splits):
            return [self.lost("order")]
        return [source.replace(**flags(source, operand))]

    # Random numbers.

    def key_kept(self) -> list[AnyRelation]:
        return [self.operands[0]]

    def folded(self) -> list[AnyRelation]:
        """`random_fold_in`: with the replica's index it is a key of the replica, with positions one of each example."""
        key, data = self.operands
        for value in (key, data):
            if value.partial or value.extreme or value.stack or value.is_first or not is_close(value.factor, 1):
                return [self.lost("partial" if value.partial else "no rule", value)]
        is_key = key.is_key or data.is_index or bool(data.offset) and not data.splits
        if data.offset and data.splits:
            return [self.lost("shared", data)]
        splits = key.splits or data.splits
        if key.splits and data.splits and key.splits != data.splits:
            return [self.lost("order")]
        return [Relation(splits=splits, is_key=is_key, **flags(key, data))]

    def seeded(self) -> list[AnyRelation]:
        (value,) = self.operands
        if value.offset or value.is_index:
            return [Relation(is_key=True)]
        return self.other()

    def drawn(self) -> list[AnyRelation]:
        """Random bits, and keys that are split from one key."""
        key = self.operands[0]
        if any(not value.is_pointwise and not value.is_key for value in self.operands):
            return self.every(self.lost("partial"))
        results = []
        for number in range(len(self.equation.outvars)):
            local, whole = self.result_shape(number), self.whole_result_shape(number)
            dims = [dim for dim in range(len(local)) if len(local) == len(whole) and local[dim] != whole[dim]]
            if not key.is_key:
                expected = {split.dim for split in key.splits}
                if set(dims) <= expected:
                    results.append(Relation(splits=key.splits, **flags(*self.operands)))
                else:
                    results.append(self.lost("shared"))
                continue
            is_of_keys = self.equation.primitive.name == "random_split"
            if not dims:
                results.append(Relation(is_key=True, **flags(key)) if is_of_keys else self.lost("noise"))
                continue
            axes = self._group_of(local[dims[0]], whole[dims[0]]) if len(dims) == 1 else None
            if axes is None or key.splits:
                results.append(self.lost("no rule"))
                continue
            results.append(
                Relation(splits=(Split(axes, dims[0]),), **{**flags(*self.operands), "in_distribution": True})
            )
        return results

    # Collectives.

    def _named(self) -> tuple[frozenset[str], bool]:
        """Returns the axes of the replicas that a collective names, and whether it has another form than the usual one."""
        names = jax_compat.contents(self.equation).names
        named = frozenset(self.analysis.axis_sizes) & names
        is_unusual = jax_compat.has_axis_index_groups(self.equation) or jax_compat.has_positional_axes(self.equation)
        return named, is_unusual

    def all_summed(self) -> list[AnyRelation]:
        """`psum`."""
        named, is_unusual = self._named()
        if is_unusual:
            return self.every(self.lost("no rule"))
        return [self._all_summed(value, named) for value in self.operands]

    def _all_summed(self, value: Relation, named: frozenset[str]) -> AnyRelation:
        if not named:
            return value if not value.is_special and not value.extreme else self.lost("index", value)
        if value.is_zero:
            return value
        split_axes = {axis for split in value.splits for axis in split.axes}
        if value.is_index or value.offset or value.is_key or value.is_first:
            return self.lost("index", value)
        if named & split_axes:
            return self.lost("examples", value)
        if value.extreme:
            return self.lost("extreme sum" if value.extreme[1] & named else "extreme", value)
        if value.stack and set(value.stack[0]) & named & value.partial:
            return self.lost("no rule", value)
        repeated = named - value.partial
        factor = value.factor / math.prod(self.analysis.axis_sizes[axis] for axis in repeated)
        parent = value.origin
        cause = Cause(self.analysis.site(self.equation), parent, parent.depth + 1 if parent else 0)
        return value.replace(partial=value.partial - named, factor=factor, origin=cause)

    def all_extreme(self, name: str) -> list[AnyRelation]:
        named, is_unusual = self._named()
        if is_unusual:
            return self.every(self.lost("no rule"))
        return [self._all_extreme(value, named, name) for value in self.operands]

    def _all_extreme(self, value: Relation, named: frozenset[str], name: str) -> AnyRelation:
        if value.is_zero or not named and value.is_pointwise:
            return value
        if value.partial:
            return self.lost("extreme of sums", value)
        if named & {axis for split in value.splits for axis in split.axes}:
            return self.lost("examples", value)
        if value.is_special or value.is_index or value.stack or value.factor <= 0:
            return self.lost("index" if value.is_special else "no rule", value)
        if value.extreme is None:
            return value
        kind, axes = value.extreme
        if kind != name:
            return self.lost("extreme", value)
        return value.replace(extreme=(kind, axes - named) if axes - named else None)

    def all_maximum(self) -> list[AnyRelation]:
        return self.all_extreme("max")

    def all_minimum(self) -> list[AnyRelation]:
        return self.all_extreme("min")

    def all_gathered(self) -> list[AnyRelation]:
        named, is_unusual = self._named()
        if is_unusual:
            return self.every(self.lost("no rule"))
        dim, tiled = jax_compat.gather_dimension(self.equation)
        return [self._all_gathered(value, named, dim, tiled) for value in self.operands]

    def _all_gathered(self, value: Relation, named: frozenset[str], dim: int, tiled: bool) -> AnyRelation:
        if not named:
            is_kept = tiled and value.is_plain and all(split.dim != dim for split in value.splits)
            return value if is_kept or value.is_equal else self.lost("no rule", value)
        if value.stack or value.offset or value.is_first or value.is_key or value.is_index:
            return self.lost("index", value)
        axes = tuple(axis for axis in self.analysis.axis_sizes if axis in named)
        own = next((split for split in value.splits if split.axes == axes), None)
        if tiled:
            if own is not None and own.dim == dim and own.outer == 1 and not value.extreme:
                kept = tuple(split for split in value.splits if split is not own)
                return value.replace(splits=kept)
            if own is not None or any(split.dim == dim for split in value.splits):
                return self.lost("order", value)
            if any(set(split.axes) & named for split in value.splits) or not (
                named <= value.partial or not named & value.partial
            ):
                return self.lost("no rule", value)
            return value.replace(stack=(axes, dim))
        if own is None and any(set(split.axes) & named for split in value.splits):
            return self.lost("no rule", value)
        if named & value.partial and not named <= value.partial:
            return self.lost("no rule", value)
        splits = tuple(split.replace(dim=split.dim + (split.dim >= dim)) for split in value.splits)
        return value.replace(splits=splits, stack=(axes, dim))

    def reduce_scattered(self) -> list[AnyRelation]:
        named, is_unusual = self._named()
        dim, tiled = jax_compat.scatter_dimension(self.equation)
        value = self.operands[0]
        axes = tuple(axis for axis in self.analysis.axis_sizes if axis in named)
        if is_unusual or not named or not tiled or any(split.dim == dim for split in value.splits):
            return self.every(self.lost("no rule"))
        result = self._all_summed(value, named)
        if isinstance(result, Lost) or result.stack:
            return [result if isinstance(result, Lost) else self.lost("no rule")]
        splits = tuple(sorted([*result.splits, Split(axes, dim)], key=lambda s: s.dim))
        return [result.replace(splits=splits)]

    def has_usual_operands(self, kind: str, *details: str) -> bool:
        """Whether a call of jdist has the operands and results that jdist gave it."""
        missing = 1 if kind == GUARD_CALL else 0
        return kind in (APPROXIMATE_CALL, FINITE_CALL) or len(self.operands) == len(self.equation.outvars) + missing

    def named_call(self, kind: str, *details: str) -> list[AnyRelation]:
        """A call of jdist whose result is known (`marks`), with the usual operands."""
        if kind == GUARD_CALL:
            return self.operands[1:]
        if kind == FINITE_CALL:
            return [self._all_finite()]
        if kind == APPROXIMATE_CALL:
            return self._approximate_means(int(details[0]), details[1])
        named = frozenset(self.analysis.axis_sizes)
        results = []
        for value in self.operands:
            if isinstance(value, Lost):
                results.append(self._lost_again(value))
            elif details == ("SUM",):
                results.append(self._all_summed(value, named))
            else:
                results.append(self._all_extreme(value, named, details[0].lower()))
        return results

    def _all_finite(self) -> AnyRelation:
        """Returns whether all operands are finite: a sum is, up to overflow, if and only if its parts are."""
        if lost := self.lost_operand():
            return lost
        if any(value.is_special or value.is_index or value.stack for value in self.operands):
            return self.lost("no rule")
        axes = frozenset().union(
            *(value.partial for value in self.operands),
            *(value.extreme[1] for value in self.operands if value.extreme),
            *(split.axes for value in self.operands for split in value.splits),
        )
        return Relation(extreme=("min", axes) if axes else None, is_nonnegative=True, **flags(*self.operands))

    def _approximate_means(self, number: int, policy: str) -> list[AnyRelation]:
        """Returns means that a policy rounds, followed by the part that a replica has not sent, and by the policy's state."""
        named = frozenset(self.analysis.axis_sizes)
        replicas = math.prod(self.analysis.axis_sizes.values())
        means: list[AnyRelation] = []
        for value in self.operands[:number]:
            total = self._lost_again(value) if isinstance(value, Lost) else self._all_summed(value, named)
            if isinstance(total, Relation):
                total = total.replace(factor=total.factor * replicas, approximate=policy)
            means.append(total)
        lost = next((self._lost_again(value) for value in self.operands if isinstance(value, Lost)), None)
        residual = lost or Relation(partial=named, approximate=policy)
        stored = lost or Relation(approximate=policy)
        return [*means, *[residual] * number, *[stored] * (len(self.equation.outvars) - 2 * number)]

    def _lost_again(self, value: Lost) -> Lost:
        parent = value.cause
        cause = Cause(self.analysis.site(self.equation), parent, parent.depth + 1) if parent else self.cause()
        return dataclasses.replace(value, cause=cause)

    def index(self) -> list[AnyRelation]:
        """`axis_index`."""
        name = self.params["axis_name"]
        if isinstance(name, str) and name in self.analysis.axis_sizes:
            return [Relation(offset=((name, (-1.0,)),), is_index=True, is_nonnegative=True, origin=self.cause())]
        named, _ = self._named()
        return self.every(self.lost("index") if named else REPLICATED)

    def exchanged(self) -> list[AnyRelation]:
        """Another collective: over other axes than those of the replicas it moves the elements of one replica."""
        named, _ = self._named()
        if named:
            return self.every(self.lost("exchange"))
        if all(value.is_equal for value in self.operands):
            return self.every(Relation(**flags(*self.operands)))
        return self.every(self.lost("no rule"))

    def inside_replica(self) -> list[AnyRelation]:
        """A permutation within a replica keeps everything."""
        named, _ = self._named()
        return self.every(self.lost("exchange")) if named else self.keeps()

    # Loops over a dim.

    def accumulated(self, start: AnyRelation, added: AnyRelation) -> AnyRelation:
        """Returns a carry of a `scan` over the examples, in which every iteration adds one value."""
        if isinstance(added, Lost):
            return self._lost_again(added)
        if isinstance(start, Lost):
            return self._lost_again(start)
        if added.is_zero:
            return start
        axes = self.analysis.groups[0]
        if not start.is_zero or not added.is_plain or added.splits or len(self.analysis.groups) > 1:
            return self.lost("no rule")
        return added.replace(partial=frozenset(axes), origin=self.cause(added))

    def without_first_dim(self, value: AnyRelation, scans_examples: bool) -> AnyRelation:
        """Returns a slice of what a `scan` iterates over."""
        if isinstance(value, Lost):
            return value
        first = [split for split in value.splits if split.dim == 0]
        if first and not scans_examples or value.stack and value.stack[1] == 0:
            return self.lost("order", value)
        if first and (any(any(x) for _, x in value.offset) or first[0].outer != 1):
            return self.lost("index", value)
        splits = tuple(split.replace(dim=split.dim - 1) for split in value.splits if split.dim)
        stack = (value.stack[0], value.stack[1] - 1) if value.stack else None
        if first and (value.partial or value.extreme):
            return self.lost("no rule", value)
        return value.replace(splits=splits, stack=stack)

    def with_first_dim(self, value: AnyRelation, scans_examples: bool) -> AnyRelation:
        """Returns the stacked results of a `scan`."""
        if isinstance(value, Lost):
            return value
        splits = tuple(split.replace(dim=split.dim + 1) for split in value.splits)
        stack = (value.stack[0], value.stack[1] + 1) if value.stack else None
        if scans_examples:
            if value.partial or value.extreme or value.splits or value.is_special:
                return self.lost("no rule", value)
            splits = (Split(self.analysis.groups[0], 0),) if len(self.analysis.groups) == 1 else ()
        return value.replace(splits=splits, stack=stack)


def _number(atom: Any) -> float:
    """Returns the value of a constant operand."""
    return float(np.asarray(atom.val))


class _Part(NamedTuple):
    """The first and the last element of a slice in each dim, as indices."""

    start: Sequence[int]
    limit: Sequence[int]


def _kind(dtype: np.dtype) -> str:
    return "f" if dtype.kind == "V" else dtype.kind


def _shifted_dim(dim: int, removed: Sequence[int]) -> int:
    return dim - sum(other < dim for other in removed)


def _dim_after(old: Sequence[int], new: Sequence[int], dim: int) -> int | None:
    """Returns the dim after a reshape that begins with the same elements as `dim` before it."""
    before = math.prod(old[:dim])
    products = [math.prod(new[:n]) for n in range(len(new))]
    found = [n for n, product in enumerate(products) if product == before]
    return next((n for n in reversed(found)), None)


def _ordered(offset: Iterable[tuple[str, tuple[float, ...]]]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return tuple(sorted((axis, numbers) for axis, numbers in offset if any(numbers)))


def _added_offsets(first: Any, second: Any, sign: int) -> tuple[tuple[str, tuple[float, ...]], ...]:
    totals = dict(first)
    for axis, numbers in second:
        old = totals.get(axis, (0.0,))
        length = max(len(old), len(numbers))
        pairs = zip(old * (length // len(old)), numbers * (length // len(numbers)), strict=True)
        totals[axis] = tuple(a + sign * b for a, b in pairs)
    return _ordered(totals.items())


def _table() -> dict[str, Callable[[Step], list[AnyRelation]]]:
    rules: dict[str, Callable[[Step], list[AnyRelation]]] = {}

    def add(rule: Callable[[Step], list[AnyRelation]], names: str) -> None:
        rules.update(dict.fromkeys(names.split(), rule))

    add(
        Step.pointwise,
        """
        acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh digamma erf erf_inv erfc expm1 floor igamma lgamma log log1p
        nextafter not rem round sin sinh tan tanh random_gamma_grad bessel_i0e bessel_i1e regularized_incomplete_beta
        polygamma population_count clz shift_left shift_right_logical shift_right_arithmetic and or xor bitcast_convert_type
        threefry2x32 log2 one_minus_square zeta igammac igamma_grad_a mulhi complex polynomial
        """,
    )
    add(Step.nonnegative, "exp exp2 logistic")
    add(
        Step.keeps,
        "copy copy_p name reduce_precision optimization_barrier stop_gradient pvary pbroadcast sharding_constraint",
    )
    add(Step.keeps, "reshard mesh_cast layout_constraint real imag conj random_wrap random_unwrap device_put")
    add(Step.negated, "neg")
    add(Step.converted, "convert_element_type")
    add(Step.integer_power, "integer_pow")
    add(Step.square, "square")
    add(Step.square_root, "sqrt")
    add(Step.inverse_square_root, "rsqrt")
    add(Step.absolute, "abs")
    add(Step.sign, "sign")
    add(Step.finite, "is_finite")
    add(Step.bounded, "max min")
    add(Step.clamped, "clamp")
    add(Step.compared, "eq ne lt le gt ge eq_to le_to lt_to")
    add(Step.added, "add sub add_any")
    add(Step.multiplied, "mul")
    add(Step.divided, "div")
    add(Step.raised, "pow")
    add(Step.selected, "select_n")
    add(Step.summed, "reduce_sum")
    add(Step.maximum, "reduce_max reduce_or")
    add(Step.minimum, "reduce_min reduce_and")
    add(Step.reduced, "reduce_prod argmax argmin reduce_xor")
    add(Step.broadcast, "broadcast_in_dim")
    add(Step.reshaped, "reshape")
    add(Step.transposed, "transpose")
    add(Step.squeezed, "squeeze")
    add(Step.expanded, "expand_dims")
    add(Step.reversed, "rev")
    add(Step.tiled, "tile")
    add(Step.concatenated, "concatenate")
    add(Step.sliced, "slice")
    add(Step.split_apart, "split")
    add(Step.padded, "pad")
    add(Step.positions, "iota")
    add(Step.cumulated, "cumsum cumprod cummax cummin cumlogsumexp")
    add(Step.sorted, "sort top_k")
    add(Step.stacked, "stack")
    add(Step.unstacked, "unstack")
    add(Step.zeros, "zeros_like full_like")
    add(Step.transformed, "fft")
    add(Step.matrices, "cholesky lu eigh eig svd qr geqrf householder_product tridiagonal_solve schur")
    add(Step.solved, "triangular_solve")
    add(Step.contracted, "dot_general")
    add(Step.convolved, "conv_general_dilated")
    add(Step.gathered_rows, "gather")
    add(
        Step.scattered,
        "scatter-add scatter_add scatter scatter-sub scatter-mul scatter_mul scatter-min scatter-max scatter_min scatter_max",
    )
    add(Step.dynamic_part, "dynamic_slice")
    add(Step.dynamic_update, "dynamic_update_slice")
    add(Step.windowed_sum, "reduce_window_sum")
    add(Step.windowed, "reduce_window_max reduce_window_min reduce_window")
    add(Step.select_and_scatter, "select_and_scatter_add select_and_gather_add")
    add(Step.folded, "random_fold_in")
    add(Step.seeded, "random_seed")
    add(Step.drawn, "random_bits random_gamma random_split rng_bit_generator random_clone")
    add(Step.all_summed, "psum psum_invariant")
    add(Step.all_maximum, "pmax")
    add(Step.all_minimum, "pmin")
    add(Step.all_gathered, "all_gather all_gather_invariant")
    add(Step.reduce_scattered, "reduce_scatter")
    add(Step.index, "axis_index")
    add(Step.exchanged, "all_to_all pgather")
    add(Step.inside_replica, "ppermute")
    return rules


RULES = _table()

# Primitives of which each element of the result is computed from the same element of the operands.
POINTWISE = frozenset(
    name
    for name, rule in RULES.items()
    if rule
    in (
        Step.pointwise,
        Step.nonnegative,
        Step.negated,
        Step.square,
        Step.square_root,
        Step.inverse_square_root,
        Step.absolute,
        Step.sign,
        Step.bounded,
        Step.clamped,
        Step.multiplied,
        Step.divided,
        Step.raised,
    )
) | {"add", "sub", "add_any"}
