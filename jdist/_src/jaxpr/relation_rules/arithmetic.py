"""Rules for sums, products, quotients and powers."""

from typing import Any

import numpy as np

from jdist._src.core.jax_compat import Literal
from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair, number_of, ordered_offset, rule
from jdist._src.jaxpr.relations import (
    ZERO,
    AnyRelation,
    Lost,
    Relation,
    Split,
    inherited,
    is_close,
    with_equal_partial_axes,
)


@rule("neg", elementwise=True)
def negated(pair: EquationPair) -> list[AnyRelation]:
    (value,) = pair.operands
    if value.extreme:
        return [pair.lost("extreme", value)]
    offset = tuple((axis, tuple(-x for x in numbers)) for axis, numbers in value.offset)
    return [value.replace(offset=offset, is_nonnegative=value.is_zero)]


def power(pair: EquationPair, exponent: float, **known: Any) -> list[AnyRelation]:
    """A power: that of a factor is a factor."""
    (value,) = pair.operands
    if exponent > 0 and value.is_zero:
        return [value]
    if value.is_plain and value.factor > 0:
        return [value.replace(factor=value.factor**exponent, is_zero=False, **{"is_nonnegative": False, **known})]
    return [pair.pointwise(**known)]


@rule("integer_pow")
def integer_power(pair: EquationPair) -> list[AnyRelation]:
    y = pair.params["y"]
    if pair.single.params["y"] != y:
        return [pair.lost("no rule")]
    if y == 1:
        return pair.keeps()
    return power(pair, y, is_nonnegative=y % 2 == 0 or pair.operands[0].is_nonnegative)


@rule("square", elementwise=True)
def square(pair: EquationPair) -> list[AnyRelation]:
    return power(pair, 2, is_nonnegative=True)


@rule("sqrt", elementwise=True)
def square_root(pair: EquationPair) -> list[AnyRelation]:
    return power(pair, 0.5, is_nonnegative=True)


@rule("rsqrt", elementwise=True)
def inverse_square_root(pair: EquationPair) -> list[AnyRelation]:
    return power(pair, -0.5, is_nonnegative=True)


@rule("abs", elementwise=True)
def absolute(pair: EquationPair) -> list[AnyRelation]:
    (value,) = pair.operands
    return [value] if value.is_nonnegative and not value.offset else power(pair, 1, is_nonnegative=True)


@rule("sign", elementwise=True)
def sign(pair: EquationPair) -> list[AnyRelation]:
    return power(pair, 0)


@rule("add sub add_any", elementwise=True)
def added(pair: EquationPair) -> list[AnyRelation]:
    """A sum or a difference."""
    first, second = pair.operands
    is_difference = pair.equation.primitive.name == "sub"
    if is_difference and pair.is_same_operand():
        return [ZERO.replace(splits=first.splits)]
    if second.is_zero or first.is_zero:
        return [_added_zero(pair, is_difference)]
    if first.extreme or second.extreme or first.is_key or second.is_key or first.is_first or second.is_first:
        return [pair.lost("extreme")]
    offset = _added_offsets(first.offset, second.offset, -1 if is_difference else 1)
    if first.offset or second.offset:
        return [_added_positions(pair, offset)]
    spread = pair.spread([first, second])
    if isinstance(spread, Lost):
        return [spread]
    pair.operands = spread
    fitting = with_equal_partial_axes(pair.operands, pair.analysis.axis_sizes)
    if fitting is None:
        return [pair.mixed(*pair.operands)]
    nonnegative = not is_difference and first.is_nonnegative and second.is_nonnegative
    return [fitting[0].replace(is_zero=False, is_nonnegative=nonnegative, **inherited(first, second))]


def _added_zero(pair: EquationPair, is_difference: bool) -> AnyRelation:
    spread = pair.spread(pair.operands)
    if isinstance(spread, Lost):
        return spread
    first, second = spread
    if second.is_zero:
        return first
    pair.operands = [second]
    return negated(pair)[0] if is_difference else second


def _added_positions(pair: EquationPair, offset: tuple[Any, ...]) -> AnyRelation:
    """The sum of a multiple of the replica's index, or of positions, and another value."""
    spread = pair.spread(pair.operands)
    if isinstance(spread, Lost):
        return spread
    first, second = spread
    if first.partial or second.partial or first.stack or second.stack:
        return pair.lost("index")
    if not (is_close(first.factor, 1) and is_close(second.factor, 1)):
        # A number of positions, such as the size in the wrap of a negative index, differs between the programs.
        return pair.lost("index")
    splits = first.splits or second.splits
    if first.splits and second.splits and first.splits != second.splits:
        return pair.lost("order")
    is_index = first.is_index and second.is_index
    nonnegative = first.is_nonnegative and second.is_nonnegative and pair.equation.primitive.name != "sub"
    return Relation(
        splits=splits, offset=offset, is_index=is_index, is_nonnegative=nonnegative, **inherited(first, second)
    )


@rule("mul", elementwise=True)
def multiplied(pair: EquationPair) -> list[AnyRelation]:
    for value in pair.operands:
        if isinstance(value, Relation) and value.is_zero:
            return [pair.zeros()]
    if lost := pair.lost_operand():
        is_weighted = lost.reason == "ratio" and any(
            isinstance(value, Relation) and value.partial for value in pair.operands
        )
        return [pair.lost("no rule") if is_weighted else lost]  # the mean of a replica, times its count
    first, second = pair.operands
    if any(value.offset or value.is_index for value in pair.operands):
        return [_multiple_of_positions(pair)]
    result = _noted(pair, product(pair, first, second))
    if isinstance(result, Lost):
        return [result]
    nonnegative = pair.is_same_operand() or first.is_nonnegative and second.is_nonnegative
    return [result.replace(is_nonnegative=nonnegative)]


def _multiple_of_positions(pair: EquationPair) -> AnyRelation:
    """Returns a multiple of positions, or of the index, which is 0 on one device and so allows any factor."""
    for value, other, atom in zip(pair.operands, pair.operands[::-1], pair.equation.invars[::-1], strict=True):
        if isinstance(atom, Literal) and (value.is_index or value.offset and other.factor == 1):
            factor = number_of(atom)
            offset = tuple((axis, tuple(x * factor for x in numbers)) for axis, numbers in value.offset)
            is_nonnegative = value.is_index and value.is_nonnegative and factor > 0
            return value.replace(offset=offset, is_nonnegative=is_nonnegative)
    return pair.lost("index")


def product(
    pair: EquationPair, first: Relation, second: Relation, splits: tuple[Split, ...] | None = None
) -> AnyRelation:
    """The relation of a product, in which each operand is linear."""
    for value, other in ((first, second), (second, first)):
        if value.extreme or value.is_special:
            return pair.lost("index" if value.is_special else "extreme", value)
        other_axes = {axis for split in other.splits for axis in split.axes}
        if value.partial & other.partial:
            return pair.lost("partial", value, other)
        if splits is None and value.partial & other_axes:
            return pair.lost("statistic", value)
    stack = None
    if splits is None:
        spread = pair.spread([first, second])
        if isinstance(spread, Lost):
            return spread
        splits, stack = spread[0].splits, spread[0].stack
    return Relation(
        first.factor * second.factor,
        splits,
        first.partial | second.partial,
        stack=stack,
        **{**inherited(first, second), "doubt": pair.doubt()},
    )


def _noted(pair: EquationPair, result: AnyRelation) -> AnyRelation:
    """Returns a product; with this equation as its origin, if the factor of a value that is not partial changes here."""
    if isinstance(result, Lost) or result.partial or is_close(result.factor, 1):
        return result
    if any(is_close(value.factor, result.factor) for value in pair.operands):
        return result
    return result.replace(origin=pair.cause())


@rule("div", elementwise=True)
def divided(pair: EquationPair) -> list[AnyRelation]:
    first, second = pair.operands
    if first.is_zero:
        return [first]
    if first.is_special or first.is_index or second.is_special or second.is_index:
        return [pair.lost("index")]
    if second.partial:
        return [pair.lost("ratio" if first.partial else "partial", second)]
    if second.extreme or first.extreme:
        return [pair.lost("extreme")]
    inverse = second.replace(factor=1 / second.factor)
    result = _noted(pair, product(pair, first, inverse))
    if isinstance(result, Lost):
        return [result]
    return [result.replace(is_nonnegative=first.is_nonnegative and second.is_nonnegative)]


@rule("pow", elementwise=True)
def raised(pair: EquationPair) -> list[AnyRelation]:
    """`pow` with a constant exponent."""
    exponent = pair.equation.invars[1]
    if isinstance(exponent, Literal) and pair.operands[1].is_equal:
        number = float(np.asarray(exponent.val))
        pair.operands = pair.operands[:1]
        return power(pair, number, is_nonnegative=pair.operands[0].is_nonnegative)
    return pair.every(pair.pointwise())


def _added_offsets(first: Any, second: Any, sign: int) -> tuple[tuple[str, tuple[float, ...]], ...]:
    totals = dict(first)
    for axis, numbers in second:
        old = totals.get(axis, (0.0,))
        length = max(len(old), len(numbers))
        pairs = zip(old * (length // len(old)), numbers * (length // len(numbers)), strict=True)
        totals[axis] = tuple(a + sign * b for a, b in pairs)
    return ordered_offset(totals.items())
