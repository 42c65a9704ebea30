"""Rules for functions of single elements, except for sums and products."""

import numpy as np

from jdist._src.core import jax_compat
from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair, kind_of_dtype, rule
from jdist._src.jaxpr.relations import ZERO, AnyRelation, Lost, Relation, inherited


@rule(
    """
    acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh digamma erf erf_inv erfc expm1 floor igamma lgamma log
    log1p nextafter not rem round sin sinh tan tanh random_gamma_grad bessel_i0e bessel_i1e
    regularized_incomplete_beta polygamma population_count clz shift_left shift_right_logical shift_right_arithmetic
    and or xor bitcast_convert_type threefry2x32 log2 one_minus_square zeta igammac igamma_grad_a mulhi complex
    polynomial
    """,
    elementwise=True,
)
def any_function(pair: EquationPair) -> list[AnyRelation]:
    """Any function of single elements."""
    return pair.every(pair.pointwise())


@rule("exp exp2 logistic", elementwise=True)
def nonnegative(pair: EquationPair) -> list[AnyRelation]:
    """A function of single elements whose results are at least 0."""
    return pair.every(pair.pointwise(is_nonnegative=True))


@rule(
    """
    copy copy_p name reduce_precision optimization_barrier stop_gradient pvary pbroadcast sharding_constraint reshard
    mesh_cast layout_constraint real imag conj random_wrap random_unwrap device_put
    """,
)
def keeps_operand(pair: EquationPair) -> list[AnyRelation]:
    """The result is the operand."""
    return pair.keeps()


@rule("convert_element_type")
def converted(pair: EquationPair) -> list[AnyRelation]:
    (value,) = pair.operands
    old, new = (np.dtype(jax_compat.dtype_of(atom)) for atom in (pair.equation.invars[0], pair.equation.outvars[0]))
    rounds = kind_of_dtype(old) in "fc" and kind_of_dtype(new) not in "fc"
    if value.is_first:
        return [value]
    if new.kind == "b" and old.kind != "b" or rounds:
        return [pair.pointwise(is_nonnegative=value.is_nonnegative, is_zero=value.is_zero)]
    nonnegative = value.is_nonnegative or old.kind in "bu"
    return [value.replace(is_nonnegative=nonnegative)]


@rule("is_finite")
def finite(pair: EquationPair) -> list[AnyRelation]:
    """A sum is finite if and only if its parts are, up to overflow."""
    (value,) = pair.operands
    if value.partial and not (value.extreme or value.stack or value.is_special):
        return [value.replace(factor=1.0, partial=frozenset(), extreme=("min", value.partial))]
    if value.is_plain:
        return [value.replace(factor=1.0, is_zero=False, is_nonnegative=True)]
    return [pair.pointwise()]


@rule("max min", elementwise=True)
def bounded(pair: EquationPair) -> list[AnyRelation]:
    """`max` and `min`: equal factors are kept, and so is a bound that has no effect."""
    first, second = pair.operands
    if pair.is_same_operand():
        return [first]
    if pair.equation.primitive.name == "max":
        for value, bound in ((first, second), (second, first)):
            if bound.is_zero and value.is_nonnegative and not value.offset:
                return [value]
    return [_with_equal_factors(pair, first.is_nonnegative or second.is_nonnegative)]


@rule("clamp", elementwise=True)
def clamped(pair: EquationPair) -> list[AnyRelation]:
    return [_with_equal_factors(pair, pair.operands[0].is_nonnegative)]


def _with_equal_factors(pair: EquationPair, is_nonnegative: bool) -> AnyRelation:
    others = [value for value in pair.operands if not value.is_zero]
    factors = {value.factor for value in others}
    if len(factors) == 1 and all(value.is_plain for value in others):
        scaled, pair.operands = pair.operands, [value.replace(factor=1.0) for value in pair.operands]
        result = pair.pointwise(is_nonnegative=is_nonnegative)
        pair.operands = scaled
        return result if isinstance(result, Lost) else result.replace(factor=factors.pop())
    return pair.pointwise(is_nonnegative=is_nonnegative)


@rule("eq ne lt le gt ge eq_to le_to lt_to")
def compared(pair: EquationPair) -> list[AnyRelation]:
    first, second = pair.operands
    name = pair.equation.primitive.name
    index, other = (first, second) if first.is_index else (second, first)
    if name == "eq" and index.is_index and other.is_zero and _is_pure_index(pair, index):
        return [Relation(is_first=True)]
    if pair.is_same_operand():  # except for NaN
        return [Relation(splits=first.splits)]
    # The test for a negative index: positions of examples are at least 0.
    if name == "lt" and second.is_zero and first.is_nonnegative and (first.is_index or first.offset):
        return [ZERO.replace(splits=first.splits)]
    result = _with_equal_factors(pair, False)
    if isinstance(result, Lost):
        return [result]
    zero_test = first if name == "eq" and second.is_zero else None
    return [result.replace(factor=1.0, zero_test=zero_test)]


def _is_pure_index(pair: EquationPair, value: Relation) -> bool:
    """Whether a multiple of the index is 0 on the first replica only."""
    axes = {axis for axis, numbers in value.offset if all(numbers)}
    return axes == set(pair.analysis.axis_sizes)


@rule("select_n")
def selected(pair: EquationPair) -> list[AnyRelation]:
    """`select_n`: a choice between values, element by element."""
    predicate, *cases = pair.operands
    first = pair.equation.invars[1]
    if all(atom is first for atom in pair.equation.invars[1:]):
        return [cases[0]]
    if isinstance(predicate, Relation):
        if predicate.is_zero:
            return [cases[0]]
        if predicate.is_first and len(cases) == 2:
            return [_of_first_replica(pair, *cases)]
    if lost := pair.lost_operand():
        return [lost]
    # `where(x == 0, 1, x)` guards a division, of a number that is 0 if `x` is.
    if len(cases) == 2 and predicate.zero_test is cases[0] and predicate.is_pointwise and cases[0].is_plain:
        return [cases[0].replace(is_zero=False)]
    if not predicate.is_pointwise:
        return [pair.pointwise() if predicate.is_special or predicate.is_index else pair.lost("predicate", predicate)]
    spread = pair.spread(pair.operands)
    if isinstance(spread, Lost):
        return [spread]
    pair.operands = spread[1:]
    joined = pair.joined(pair.operands)
    if isinstance(joined, Lost):
        return [pair.mixed(*pair.operands[:2]) if joined.reason == "mixed" else joined]
    return [joined.replace(**inherited(predicate, joined))]


def _of_first_replica(pair: EquationPair, others: AnyRelation, first: AnyRelation) -> AnyRelation:
    """A value on replica 0, and zeros elsewhere: a replicated value becomes its partial sum, as in a broadcast."""
    has_zeros = isinstance(others, Relation) and others.is_zero
    if has_zeros and isinstance(first, Relation) and first.is_plain and not first.splits:
        return first.replace(
            partial=frozenset(pair.analysis.axis_sizes),
            is_zero=False,
            origin=first.origin or pair.cause(),
        )
    return pair.lost("first", *(value for value in (others, first) if isinstance(value, Relation)))
