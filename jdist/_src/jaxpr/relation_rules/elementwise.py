"""Rules for functions of single elements, except for sums and products."""

import numpy as np

from jdist._src.core import jax_compat
from jdist._src.jaxpr.relation_rules.step import Step, kind_of_dtype, rule
from jdist._src.jaxpr.relations import ZERO, AnyRelation, Lost, Relation, flags


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
def any_function(step: Step) -> list[AnyRelation]:
    """Any function of single elements."""
    return step.every(step.pointwise())


@rule("exp exp2 logistic", elementwise=True)
def nonnegative(step: Step) -> list[AnyRelation]:
    """A function of single elements whose results are at least 0."""
    return step.every(step.pointwise(is_nonnegative=True))


@rule(
    """
    copy copy_p name reduce_precision optimization_barrier stop_gradient pvary pbroadcast sharding_constraint reshard
    mesh_cast layout_constraint real imag conj random_wrap random_unwrap device_put
    """,
)
def keeps_operand(step: Step) -> list[AnyRelation]:
    """The result is the operand."""
    return step.keeps()


@rule("convert_element_type")
def converted(step: Step) -> list[AnyRelation]:
    (value,) = step.operands
    old, new = (np.dtype(jax_compat.dtype_of(atom)) for atom in (step.equation.invars[0], step.equation.outvars[0]))
    rounds = kind_of_dtype(old) in "fc" and kind_of_dtype(new) not in "fc"
    if value.is_first:
        return [value]
    if new.kind == "b" and old.kind != "b" or rounds:
        return [step.pointwise(is_nonnegative=value.is_nonnegative, is_zero=value.is_zero)]
    nonnegative = value.is_nonnegative or old.kind in "bu"
    return [value.replace(is_nonnegative=nonnegative)]


@rule("is_finite")
def finite(step: Step) -> list[AnyRelation]:
    """A sum is finite if and only if its parts are, up to overflow."""
    (value,) = step.operands
    if value.partial and not (value.extreme or value.stack or value.is_special):
        return [value.replace(factor=1.0, partial=frozenset(), extreme=("min", value.partial))]
    if value.is_plain:
        return [value.replace(factor=1.0, is_zero=False, is_nonnegative=True)]
    return [step.pointwise()]


@rule("max min", elementwise=True)
def bounded(step: Step) -> list[AnyRelation]:
    """`max` and `min`: equal factors are kept, and so is a bound that has no effect."""
    first, second = step.operands
    if step.is_same_operand():
        return [first]
    if step.equation.primitive.name == "max":
        for value, bound in ((first, second), (second, first)):
            if bound.is_zero and value.is_nonnegative and not value.offset:
                return [value]
    return [_with_equal_factors(step, first.is_nonnegative or second.is_nonnegative)]


@rule("clamp", elementwise=True)
def clamped(step: Step) -> list[AnyRelation]:
    return [_with_equal_factors(step, step.operands[0].is_nonnegative)]


def _with_equal_factors(step: Step, is_nonnegative: bool) -> AnyRelation:
    others = [value for value in step.operands if not value.is_zero]
    factors = {value.factor for value in others}
    if len(factors) == 1 and all(value.is_plain for value in others):
        scaled, step.operands = step.operands, [value.replace(factor=1.0) for value in step.operands]
        result = step.pointwise(is_nonnegative=is_nonnegative)
        step.operands = scaled
        return result if isinstance(result, Lost) else result.replace(factor=factors.pop())
    return step.pointwise(is_nonnegative=is_nonnegative)


@rule("eq ne lt le gt ge eq_to le_to lt_to")
def compared(step: Step) -> list[AnyRelation]:
    first, second = step.operands
    name = step.equation.primitive.name
    index, other = (first, second) if first.is_index else (second, first)
    if name == "eq" and index.is_index and other.is_zero and _is_pure_index(step, index):
        return [Relation(is_first=True)]
    if step.is_same_operand():  # except for NaN
        return [Relation(splits=first.splits)]
    # The test for a negative index: positions of examples are at least 0.
    if name == "lt" and second.is_zero and first.is_nonnegative and (first.is_index or first.offset):
        return [ZERO.replace(splits=first.splits)]
    result = _with_equal_factors(step, False)
    if isinstance(result, Lost):
        return [result]
    zero_test = first if name == "eq" and second.is_zero else None
    return [result.replace(factor=1.0, zero_test=zero_test)]


def _is_pure_index(step: Step, value: Relation) -> bool:
    """Whether a multiple of the index is 0 on the first replica only."""
    axes = {axis for axis, numbers in value.offset if all(numbers)}
    return axes == set(step.analysis.axis_sizes)


@rule("select_n")
def selected(step: Step) -> list[AnyRelation]:
    """`select_n`: a choice between values, element by element."""
    predicate, *cases = step.operands
    first = step.equation.invars[1]
    if all(atom is first for atom in step.equation.invars[1:]):
        return [cases[0]]
    if isinstance(predicate, Relation):
        if predicate.is_zero:
            return [cases[0]]
        if predicate.is_first and len(cases) == 2:
            return [_of_first_replica(step, *cases)]
    if lost := step.lost_operand():
        return [lost]
    # `where(x == 0, 1, x)` guards a division, of a number that is 0 if `x` is.
    if len(cases) == 2 and predicate.zero_test is cases[0] and predicate.is_pointwise and cases[0].is_plain:
        return [cases[0].replace(is_zero=False)]
    if not predicate.is_pointwise:
        return [step.pointwise() if predicate.is_special or predicate.is_index else step.lost("predicate", predicate)]
    spread = step.spread(step.operands)
    if isinstance(spread, Lost):
        return [spread]
    step.operands = spread[1:]
    joined = step.joined(step.operands)
    if isinstance(joined, Lost):
        return [step.mixed(*step.operands[:2]) if joined.reason == "mixed" else joined]
    return [joined.replace(**flags(predicate, joined))]


def _of_first_replica(step: Step, others: AnyRelation, first: AnyRelation) -> AnyRelation:
    """A value on replica 0, and zeros elsewhere: a replicated value becomes its partial sum, as in a broadcast."""
    has_zeros = isinstance(others, Relation) and others.is_zero
    if has_zeros and isinstance(first, Relation) and first.is_plain and not first.splits:
        return first.replace(
            partial=frozenset(step.analysis.axis_sizes),
            is_zero=False,
            origin=first.origin or step.cause(),
        )
    return step.lost("first", *(value for value in (others, first) if isinstance(value, Relation)))
