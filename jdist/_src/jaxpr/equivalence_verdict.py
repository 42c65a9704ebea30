"""The verdict of the equivalence analysis on one result, with its reason in terms of the user's code."""

import dataclasses
import fractions
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from jdist._src.core import source_lines
from jdist._src.jaxpr.causes import lines_of_places, shortened
from jdist._src.jaxpr.collective_lines import collective_name
from jdist._src.jaxpr.marks import REDUCE_CALL, call_name
from jdist._src.jaxpr.primitives import REPLICATING_COLLECTIVES
from jdist._src.jaxpr.relations import (
    UNKNOWN_REASONS,
    AnyRelation,
    Lost,
    Relation,
    Site,
    SiteCause,
    Split,
    is_close,
    may_be_one,
)
from jdist._src.jaxpr.replication import batch_norm_fix

VerdictName: TypeAlias = Literal["equivalent", "not equivalent", "unknown"]
ResultKind: TypeAlias = Literal["replicated", "split", "sum", "mean", "per replica"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a result on N replicas is the result on one device with the global batch.

    Attributes:
        name: `"equivalent"`, `"not equivalent"` or `"unknown"`.
        reason: The reason. For an equivalent result: in which sense it is equivalent, or an empty string.
        factor: How many times too large a result is that is not equivalent, if this is known; else None.
        fix: The change of the user's code, or an empty string.
        by_design: Whether a policy means the results to differ, as local SGD does.
        may_be_refuted: Whether a difference for random inputs shows that an unknown result is not equivalent.
    """

    name: VerdictName
    reason: str = ""
    factor: float | None = None
    fix: str = ""
    by_design: bool = False
    may_be_refuted: bool = False
    _cause: SiteCause | None = dataclasses.field(default=None, repr=False, compare=False)
    _begin: Site | None = dataclasses.field(default=None, repr=False, compare=False)

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """The chain of operations with their lines, from where the difference begins."""
        return _lines(self._cause)

    @functools.cached_property
    def place(self) -> source_lines.Frame | None:
        """The user's line to change, or None."""
        return self._begin.line if self._begin else None

    @property
    def depth(self) -> int:
        """The number of operations from where the difference begins to the result."""
        return self._cause.depth if self._cause else 0

    def __reduce__(self) -> tuple[Any, ...]:
        # With the lines in place of the equations.
        fields = self.name, self.reason, self.factor, self.fix, self.by_design, self.may_be_refuted
        return _restored, (fields, self.lines, self.place)

    def __str__(self) -> str:
        where = f" at {self.place}" if self.name != "equivalent" and self.place else ""
        return f"{self.name} ({self.reason}{where})" if self.reason else self.name


def _restored(fields: tuple[Any, ...], lines: tuple[str, ...], place: source_lines.Frame | None) -> Verdict:
    verdict = Verdict(*fields)
    vars(verdict).update(lines=lines, place=place)
    return verdict


EQUIVALENT = Verdict("equivalent")


def verdict_of(
    relation: AnyRelation,
    kind: ResultKind,
    axis_sizes: Mapping[str, int],
    is_replicated: bool,
    splits: tuple[Split, ...] = (),
) -> Verdict:
    """Returns the verdict on a result with this relation.

    Args:
        relation: The relation of the values of the replicas to that of one device.
        kind: How the result is read: as one replicated value, as the parts of one value, as partial values whose sum or
            mean is read, or as one value per replica.
        axis_sizes: The mesh axes of the replicas and their sizes.
        is_replicated: Whether the result is proved to be the same on all replicas.
        splits: The dims of a result of kind `"split"`; by default the first one over all axes.
    """
    if isinstance(relation, Lost):
        return _of_lost(relation, tuple(axis_sizes))
    number = math.prod(axis_sizes.values())
    if relation.is_special or relation.is_index or relation.stack:
        return Verdict("unknown", "it depends on the index of the replica")
    if relation.is_zero and not relation.splits and kind != "split":
        return EQUIVALENT
    value = relation
    if is_replicated and (value.partial or value.extreme):
        repeated = math.prod(axis_sizes[axis] for axis in value.partial)
        value = value.replace(factor=value.factor * repeated, partial=frozenset(), extreme=None)
    if value.extreme:
        return Verdict("unknown", f"each replica has the {value.extreme[0]} of its examples")
    if kind == "split" or kind == "per replica" and value.splits:
        if value.splits == (splits or (Split(tuple(axis_sizes), 0),)) and not value.partial:
            return _of_factor(value, number, value.factor, "")
        return Verdict("unknown", "its parts are not in the order of the batch")
    if value.splits:
        return Verdict("unknown", "each replica has a part of it")
    over_all = value.factor * math.prod(axis_sizes[axis] for axis in frozenset(axis_sizes) - value.partial) ** -1.0
    if kind == "sum":
        return _of_factor(value, number, over_all, "the sum over the replicas is that of one device")
    if kind == "mean":
        return _of_factor(value, number, over_all * number, "the mean over the replicas is that of one device")
    if value.partial:
        if is_close(over_all, 1) or is_close(over_all * number, 1):
            sense = "sum" if is_close(over_all, 1) else "mean"
            return _of_factor(value, number, 1.0, f"the {sense} over the replicas is that of one device")
        return Verdict("unknown", "each replica has a part of the sum")
    return _of_factor(value, number, value.factor, "")


def _of_factor(value: Relation, number: int, factor: float, sense: str) -> Verdict:
    if is_close(factor, 1):
        if value.in_distribution:
            return Verdict("equivalent", "in distribution: each replica draws its own random numbers")
        if value.approximate:
            return Verdict("equivalent", f"up to the rounding of {value.approximate}")
        return Verdict("equivalent", sense)
    times = 1 / factor
    begin = value.origin.site if value.origin else None
    if may_be_one(value, factor, number):
        reason = f"it is {_times(times)}, unless a constant is the number of replicas"
        return Verdict("unknown", reason, _cause=value.origin, _begin=begin)
    fix = _fix_of_factor(times)
    return Verdict("not equivalent", f"it is {_times(times)}", times, fix, _cause=value.origin, _begin=begin)


def _fix_of_factor(times: float) -> str:
    if times > 1:
        return (
            'Average instead of adding: `jdist.all_reduce("mean", x)`, or `jax.lax.pmean`. If the loss is divided by the size '
            "of the global batch already, reduce once, by a sum."
        )
    return (
        'Add instead of averaging, `jdist.all_reduce("sum", x)`, if the loss is divided by the size of the global batch '
        "already; otherwise divide once."
    )


def _times(times: float) -> str:
    if times < 0:
        return "of the other sign"
    ratio = fractions.Fraction(times if times > 1 else 1 / times).limit_denominator(1000)
    text = f"{ratio.numerator}" if ratio.denominator == 1 else f"{float(ratio):.4g}"
    return f"{text} times too {'large' if times > 1 else 'small'}"


def _of_lost(lost: Lost, axes: tuple[str, ...]) -> Verdict:
    norm_fix = batch_norm_fix(source_lines.calling_equation(*lost.begin), axes) if lost.begin else ""
    if lost.is_unknown:
        may_be_refuted = lost.reason not in ("input", "order", "exchange", "doubt")
        return Verdict(
            "unknown",
            UNKNOWN_REASONS[lost.reason],
            fix=norm_fix,
            may_be_refuted=may_be_refuted,
            _cause=lost.cause,
            _begin=lost.begin,
        )
    reason, fix = _REASONS[lost.reason]
    if lost.factor is not None:
        reason, fix = reason.format(times=_times(lost.factor)), _fix_of_factor(lost.factor)
    elif norm_fix:
        reason, fix = LOCAL_NORMALIZATION, norm_fix
    is_design = lost.reason == "design"
    return Verdict("not equivalent", reason, None, fix, is_design, _cause=lost.cause, _begin=lost.begin)


def _lines(cause: SiteCause | None) -> tuple[str, ...]:
    """Returns the chain of causes, with one line per place in the user's code or in a library other than jdist."""
    if cause is None:
        return ()
    places = [
        (place, _name(site))
        for site in cause.chain()
        if site.name != "name" and (place := site.line) and not source_lines.is_in_jdist(place)
    ]
    return tuple(shortened(lines_of_places(places), 6))


def _name(site: Site) -> str:
    if call_name(site.equation)[:1] == [REDUCE_CALL]:
        return "all_reduce"
    return collective_name(site.equation) if site.name in REPLICATING_COLLECTIVES else site.name


LOCAL_NORMALIZATION = "batch normalization uses the statistics of each replica's part of the batch"
_MEAN_FIRST = 'Reduce the sums over the replicas first, `jdist.all_reduce("mean", x)`, and compute with the result.'
_REASONS = {
    "partial": ("a function that is not linear is applied to the sum over the examples of one replica", _MEAN_FIRST),
    "ratio": (
        "a sum over the examples of one replica is divided by a count of these examples only",
        "Divide the sums of all replicas: `jdist.global_mean(values, weights)`, as a loss too; or reduce both, "
        '`jdist.all_reduce("mean", (total, count))`, and divide then.',
    ),
    "statistic": (
        "the examples of a replica are combined with a statistic of these examples only",
        'Use the statistic of the global batch: `jdist.all_reduce("mean", x.mean(0))`; for batch normalization, '
        "`BatchNorm(axis_name=...)`.",
    ),
    "mixed": (
        "a sum over the examples of one replica and a value of another scale are added",
        "If each replica averages over its examples, average over the replicas. In a sum over the replicas, a term that every "
        "replica computes in full, such as weight decay, counts once per replica: `jdist.scale_regularization_loss`.",
    ),
    "factor": ("it is computed from a value that is {times}", ""),
    "extreme of sums": (
        "the greatest or least of the replicas' sums is not their sum",
        'Use `jdist.all_reduce("mean", x)` for values that each replica has averaged over its examples.',
    ),
    "extreme sum": (
        "the greatest or least values of the replicas are added",
        'Use `jdist.all_reduce("max", x)` or `"min"` for values that each replica has computed so.',
    ),
    "first": (
        "only the examples of replica 0 count",
        "Reduce the values of all replicas; use the index only for random keys (`jdist.replica_key`) and for the positions of "
        "examples.",
    ),
    "predicate": (
        "a branch, a loop or a choice depends on the examples of one replica",
        'Make the predicate one of all replicas: `jdist.all_reduce("max", predicate.astype(int))`.',
    ),
    "examples": (
        "an operation over the examples of the batch sees those of one replica only",
        "Gather the examples first, `jdist.all_gather(x)`, or combine the results of the replicas.",
    ),
    "pairs": (
        "pairs of examples are formed within each replica only",
        "Gather the other side of the pairs: `x @ jdist.all_gather(x).T`.",
    ),
    "shared": (
        "each replica draws the same random numbers for its examples",
        "Draw from `jdist.replica_key(key)`, or per example from `jdist.example_key(key, index)`.",
    ),
    "noise": (
        "each replica draws other random numbers, and they are not per example",
        "Draw from the key that all replicas share.",
    ),
    "constant": ("a constant differs between a part of the batch and the global batch", ""),
    "design": (
        "by design of the policy: the parameters of the replicas differ between the steps that synchronize them",
        "",
    ),
}
