"""Rules for calls of jdist whose results are known (`marks`)."""

from jdist._src.jaxpr.marks import APPROXIMATE_CALL, FINITE_CALL, GUARD_CALL
from jdist._src.jaxpr.relation_rules.collectives import extreme_over, summed_over
from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair
from jdist._src.jaxpr.relations import AnyRelation, Lost, Relation, inherited


def has_usual_operands(pair: EquationPair, kind: str) -> bool:
    """Whether a call of jdist has the operands and results that jdist gave it, as a derivative of the call may not."""
    num_conditions = 1 if kind == GUARD_CALL else 0
    return kind in (APPROXIMATE_CALL, FINITE_CALL) or len(pair.operands) == len(pair.equation.outvars) + num_conditions


def marked_call(pair: EquationPair, kind: str, *details: str) -> list[AnyRelation]:
    """Returns the results of a call of jdist (`marks`) with the usual operands."""
    if kind == GUARD_CALL:
        return pair.operands[1:]
    if kind == FINITE_CALL:
        return [_all_finite(pair)]
    if kind == APPROXIMATE_CALL:
        return _approximate_means(pair, int(details[0]), details[1])
    named = frozenset(pair.analysis.axis_sizes)
    results = []
    for value in pair.operands:
        if isinstance(value, Lost):
            results.append(pair.lost_again(value))
        elif details == ("SUM",):
            results.append(summed_over(pair, value, named))
        else:
            results.append(extreme_over(pair, value, named, details[0].lower()))
    return results


def _all_finite(pair: EquationPair) -> AnyRelation:
    """Returns whether all operands are finite: a sum is, up to overflow, if and only if its parts are."""
    if lost := pair.lost_operand():
        return lost
    if any(value.is_special or value.is_index or value.stack for value in pair.operands):
        return pair.lost("no rule")
    axes = frozenset().union(
        *(value.partial for value in pair.operands),
        *(value.extreme[1] for value in pair.operands if value.extreme),
        *(split.axes for value in pair.operands for split in value.splits),
    )
    return Relation(extreme=("min", axes) if axes else None, is_nonnegative=True, **inherited(*pair.operands))


def _approximate_means(pair: EquationPair, number: int, policy: str) -> list[AnyRelation]:
    """Returns means that a policy rounds, followed by the part that a replica has not sent, and by the policy's state."""
    named = frozenset(pair.analysis.axis_sizes)
    means: list[AnyRelation] = []
    for value in pair.operands[:number]:
        total = pair.lost_again(value) if isinstance(value, Lost) else summed_over(pair, value, named)
        if isinstance(total, Relation):
            total = total.replace(factor=total.factor * pair.num_replicas, approximate=policy)
        means.append(total)
    lost = next((pair.lost_again(value) for value in pair.operands if isinstance(value, Lost)), None)
    residual = lost or Relation(partial=named, approximate=policy)
    stored = lost or Relation(approximate=policy)
    return [*means, *[residual] * number, *[stored] * (len(pair.equation.outvars) - 2 * number)]
