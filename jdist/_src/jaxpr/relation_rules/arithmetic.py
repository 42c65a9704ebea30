"""Rules for sums, products, quotients and powers."""

from typing import Any

import numpy as np

from jdist._src.core.jax_compat import Literal
from jdist._src.jaxpr.relation_rules.step import Step, number_of, ordered_offset, rule
from jdist._src.jaxpr.relations import ZERO, AnyRelation, Lost, Relation, Split, aligned, flags, is_close


@rule("neg", elementwise=True)
def negated(step: Step) -> list[AnyRelation]:
    (value,) = step.operands
    if value.extreme:
        return [step.lost("extreme", value)]
    offset = tuple((axis, tuple(-x for x in numbers)) for axis, numbers in value.offset)
    return [value.replace(offset=offset, is_nonnegative=value.is_zero)]


def power(step: Step, exponent: float, **known: Any) -> list[AnyRelation]:
    """A power: that of a factor is a factor."""
    (value,) = step.operands
    if exponent > 0 and value.is_zero:
        return [value]
    if value.is_plain and value.factor > 0:
        return [value.replace(factor=value.factor**exponent, is_zero=False, **{"is_nonnegative": False, **known})]
    return [step.pointwise(**known)]


@rule("integer_pow")
def integer_power(step: Step) -> list[AnyRelation]:
    y = step.params["y"]
    if step.single.params["y"] != y:
        return [step.lost("no rule")]
    if y == 1:
        return step.keeps()
    return power(step, y, is_nonnegative=y % 2 == 0 or step.operands[0].is_nonnegative)


@rule("square", elementwise=True)
def square(step: Step) -> list[AnyRelation]:
    return power(step, 2, is_nonnegative=True)


@rule("sqrt", elementwise=True)
def square_root(step: Step) -> list[AnyRelation]:
    return power(step, 0.5, is_nonnegative=True)


@rule("rsqrt", elementwise=True)
def inverse_square_root(step: Step) -> list[AnyRelation]:
    return power(step, -0.5, is_nonnegative=True)


@rule("abs", elementwise=True)
def absolute(step: Step) -> list[AnyRelation]:
    (value,) = step.operands
    return [value] if value.is_nonnegative and not value.offset else power(step, 1, is_nonnegative=True)


@rule("sign", elementwise=True)
def sign(step: Step) -> list[AnyRelation]:
    return power(step, 0)


@rule("add sub add_any", elementwise=True)
def added(step: Step) -> list[AnyRelation]:
    """A sum or a difference."""
    first, second = step.operands
    is_difference = step.equation.primitive.name == "sub"
    if is_difference and step.is_same_operand():
        return [ZERO.replace(splits=first.splits)]
    if second.is_zero or first.is_zero:
        return [_added_zero(step, is_difference)]
    if first.extreme or second.extreme or first.is_key or second.is_key or first.is_first or second.is_first:
        return [step.lost("extreme")]
    offset = _added_offsets(first.offset, second.offset, -1 if is_difference else 1)
    if first.offset or second.offset:
        return [_added_positions(step, offset)]
    spread = step.spread([first, second])
    if isinstance(spread, Lost):
        return [spread]
    step.operands = spread
    fitting = aligned(step.operands, step.analysis.axis_sizes)
    if fitting is None:
        return [step.mixed(*step.operands)]
    nonnegative = not is_difference and first.is_nonnegative and second.is_nonnegative
    return [fitting[0].replace(is_zero=False, is_nonnegative=nonnegative, **flags(first, second))]


def _added_zero(step: Step, is_difference: bool) -> AnyRelation:
    spread = step.spread(step.operands)
    if isinstance(spread, Lost):
        return spread
    first, second = spread
    if second.is_zero:
        return first
    step.operands = [second]
    return negated(step)[0] if is_difference else second


def _added_positions(step: Step, offset: tuple[Any, ...]) -> AnyRelation:
    """The sum of a multiple of the replica's index, or of positions, and another value."""
    spread = step.spread(step.operands)
    if isinstance(spread, Lost):
        return spread
    first, second = spread
    if first.partial or second.partial or first.stack or second.stack:
        return step.lost("index")
    if not (is_close(first.factor, 1) and is_close(second.factor, 1)):
        # A number of positions, such as the size in the wrap of a negative index, differs between the programs.
        return step.lost("index")
    splits = first.splits or second.splits
    if first.splits and second.splits and first.splits != second.splits:
        return step.lost("order")
    is_index = first.is_index and second.is_index
    nonnegative = first.is_nonnegative and second.is_nonnegative and step.equation.primitive.name != "sub"
    return Relation(splits=splits, offset=offset, is_index=is_index, is_nonnegative=nonnegative, **flags(first, second))


@rule("mul", elementwise=True)
def multiplied(step: Step) -> list[AnyRelation]:
    for value in step.operands:
        if isinstance(value, Relation) and value.is_zero:
            return [step.zeros()]
    if lost := step.lost_operand():
        is_weighted = lost.reason == "ratio" and any(
            isinstance(value, Relation) and value.partial for value in step.operands
        )
        return [step.lost("no rule") if is_weighted else lost]  # the mean of a replica, times its count
    first, second = step.operands
    if any(value.offset or value.is_index for value in step.operands):
        return [_multiple_of_positions(step)]
    result = _noted(step, product(step, first, second))
    if isinstance(result, Lost):
        return [result]
    nonnegative = step.is_same_operand() or first.is_nonnegative and second.is_nonnegative
    return [result.replace(is_nonnegative=nonnegative)]


def _multiple_of_positions(step: Step) -> AnyRelation:
    """Returns a multiple of positions, or of the index, which is 0 on one device and so allows any factor."""
    for value, other, atom in zip(step.operands, step.operands[::-1], step.equation.invars[::-1], strict=True):
        if isinstance(atom, Literal) and (value.is_index or value.offset and other.factor == 1):
            factor = number_of(atom)
            offset = tuple((axis, tuple(x * factor for x in numbers)) for axis, numbers in value.offset)
            is_nonnegative = value.is_index and value.is_nonnegative and factor > 0
            return value.replace(offset=offset, is_nonnegative=is_nonnegative)
    return step.lost("index")


def product(step: Step, first: Relation, second: Relation, splits: tuple[Split, ...] | None = None) -> AnyRelation:
    """The relation of a product, in which each operand is linear."""
    for value, other in ((first, second), (second, first)):
        if value.extreme or value.is_special:
            return step.lost("index" if value.is_special else "extreme", value)
        other_axes = {axis for split in other.splits for axis in split.axes}
        if value.partial & other.partial:
            return step.lost("partial", value, other)
        if splits is None and value.partial & other_axes:
            return step.lost("statistic", value)
    stack = None
    if splits is None:
        spread = step.spread([first, second])
        if isinstance(spread, Lost):
            return spread
        splits, stack = spread[0].splits, spread[0].stack
    return Relation(
        first.factor * second.factor,
        splits,
        first.partial | second.partial,
        stack=stack,
        **{**flags(first, second), "doubt": step.doubt()},
    )


def _noted(step: Step, result: AnyRelation) -> AnyRelation:
    """Returns a product; with this equation as its origin, if the factor of a value that is not partial changes here."""
    if isinstance(result, Lost) or result.partial or is_close(result.factor, 1):
        return result
    if any(is_close(value.factor, result.factor) for value in step.operands):
        return result
    return result.replace(origin=step.cause())


@rule("div", elementwise=True)
def divided(step: Step) -> list[AnyRelation]:
    first, second = step.operands
    if first.is_zero:
        return [first]
    if first.is_special or first.is_index or second.is_special or second.is_index:
        return [step.lost("index")]
    if second.partial:
        return [step.lost("ratio" if first.partial else "partial", second)]
    if second.extreme or first.extreme:
        return [step.lost("extreme")]
    inverse = second.replace(factor=1 / second.factor)
    result = _noted(step, product(step, first, inverse))
    if isinstance(result, Lost):
        return [result]
    return [result.replace(is_nonnegative=first.is_nonnegative and second.is_nonnegative)]


@rule("pow", elementwise=True)
def raised(step: Step) -> list[AnyRelation]:
    """`pow` with a constant exponent."""
    exponent = step.equation.invars[1]
    if isinstance(exponent, Literal) and step.operands[1].is_equal:
        number = float(np.asarray(exponent.val))
        step.operands = step.operands[:1]
        return power(step, number, is_nonnegative=step.operands[0].is_nonnegative)
    return step.every(step.pointwise())


def _added_offsets(first: Any, second: Any, sign: int) -> tuple[tuple[str, tuple[float, ...]], ...]:
    totals = dict(first)
    for axis, numbers in second:
        old = totals.get(axis, (0.0,))
        length = max(len(old), len(numbers))
        pairs = zip(old * (length // len(old)), numbers * (length // len(numbers)), strict=True)
        totals[axis] = tuple(a + sign * b for a, b in pairs)
    return ordered_offset(totals.items())
