"""Rules for calls of jdist whose results are known (`marks`)."""

from jdist._src.jaxpr.marks import APPROXIMATE_CALL, FINITE_CALL, GUARD_CALL
from jdist._src.jaxpr.relation_rules.collectives import extreme_over, summed_over
from jdist._src.jaxpr.relation_rules.step import Step
from jdist._src.jaxpr.relations import AnyRelation, Lost, Relation, flags


def has_usual_operands(step: Step, kind: str, *details: str) -> bool:
    """Whether a call of jdist has the operands and results that jdist gave it."""
    missing = 1 if kind == GUARD_CALL else 0
    return kind in (APPROXIMATE_CALL, FINITE_CALL) or len(step.operands) == len(step.equation.outvars) + missing


def marked_call(step: Step, kind: str, *details: str) -> list[AnyRelation]:
    """A call of jdist whose result is known (`marks`), with the usual operands."""
    if kind == GUARD_CALL:
        return step.operands[1:]
    if kind == FINITE_CALL:
        return [_all_finite(step)]
    if kind == APPROXIMATE_CALL:
        return _approximate_means(step, int(details[0]), details[1])
    named = frozenset(step.analysis.axis_sizes)
    results = []
    for value in step.operands:
        if isinstance(value, Lost):
            results.append(step.lost_again(value))
        elif details == ("SUM",):
            results.append(summed_over(step, value, named))
        else:
            results.append(extreme_over(step, value, named, details[0].lower()))
    return results


def _all_finite(step: Step) -> AnyRelation:
    """Returns whether all operands are finite: a sum is, up to overflow, if and only if its parts are."""
    if lost := step.lost_operand():
        return lost
    if any(value.is_special or value.is_index or value.stack for value in step.operands):
        return step.lost("no rule")
    axes = frozenset().union(
        *(value.partial for value in step.operands),
        *(value.extreme[1] for value in step.operands if value.extreme),
        *(split.axes for value in step.operands for split in value.splits),
    )
    return Relation(extreme=("min", axes) if axes else None, is_nonnegative=True, **flags(*step.operands))


def _approximate_means(step: Step, number: int, policy: str) -> list[AnyRelation]:
    """Returns means that a policy rounds, followed by the part that a replica has not sent, and by the policy's state."""
    named = frozenset(step.analysis.axis_sizes)
    means: list[AnyRelation] = []
    for value in step.operands[:number]:
        total = step.lost_again(value) if isinstance(value, Lost) else summed_over(step, value, named)
        if isinstance(total, Relation):
            total = total.replace(factor=total.factor * step.num_replicas, approximate=policy)
        means.append(total)
    lost = next((step.lost_again(value) for value in step.operands if isinstance(value, Lost)), None)
    residual = lost or Relation(partial=named, approximate=policy)
    stored = lost or Relation(approximate=policy)
    return [*means, *[residual] * number, *[stored] * (len(step.equation.outvars) - 2 * number)]
