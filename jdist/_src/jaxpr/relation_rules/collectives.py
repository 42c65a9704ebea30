"""Rules for collectives."""

import math

from jdist._src.core import jax_compat
from jdist._src.jaxpr.relation_rules.step import Step, rule
from jdist._src.jaxpr.relations import REPLICATED, AnyRelation, Lost, Relation, Split, flags


def _named(step: Step) -> tuple[frozenset[str], bool]:
    """Returns the axes of the replicas that a collective names, and whether it has another form than the usual one."""
    names = jax_compat.contents(step.equation).names
    named = frozenset(step.analysis.axis_sizes) & names
    is_unusual = jax_compat.has_axis_index_groups(step.equation) or jax_compat.has_positional_axes(step.equation)
    return named, is_unusual


@rule("psum psum_invariant")
def all_summed(step: Step) -> list[AnyRelation]:
    """`psum`."""
    named, is_unusual = _named(step)
    if is_unusual:
        return step.every(step.lost("no rule"))
    return [summed_over(step, value, named) for value in step.operands]


def summed_over(step: Step, value: Relation, named: frozenset[str]) -> AnyRelation:
    """Returns the sum of a value over mesh axes."""
    if not named:
        return value if not value.is_special and not value.extreme else step.lost("index", value)
    if value.is_zero:
        return value
    split_axes = {axis for split in value.splits for axis in split.axes}
    if value.is_index or value.offset or value.is_key or value.is_first:
        return step.lost("index", value)
    if named & split_axes:
        return step.lost("examples", value)
    if value.extreme:
        return step.lost("extreme sum" if value.extreme[1] & named else "extreme", value)
    if value.stack and set(value.stack[0]) & named & value.partial:
        return step.lost("no rule", value)
    repeated = named - value.partial
    factor = value.factor / math.prod(step.analysis.axis_sizes[axis] for axis in repeated)
    return value.replace(partial=value.partial - named, factor=factor, origin=step.cause(value))


@rule("pmax pmin")
def all_extreme(step: Step) -> list[AnyRelation]:
    """`pmax` and `pmin`."""
    named, is_unusual = _named(step)
    if is_unusual:
        return step.every(step.lost("no rule"))
    kind = step.equation.primitive.name.removeprefix("p")
    return [extreme_over(step, value, named, kind) for value in step.operands]


def extreme_over(step: Step, value: Relation, named: frozenset[str], name: str) -> AnyRelation:
    """Returns the greatest or the least of a value over mesh axes."""
    if value.is_zero or not named and value.is_pointwise:
        return value
    if value.partial:
        return step.lost("extreme of sums", value)
    if named & {axis for split in value.splits for axis in split.axes}:
        return step.lost("examples", value)
    if value.is_special or value.is_index or value.stack or value.factor <= 0:
        return step.lost("index" if value.is_special else "no rule", value)
    if value.extreme is None:
        return value
    kind, axes = value.extreme
    if kind != name:
        return step.lost("extreme", value)
    return value.replace(extreme=(kind, axes - named) if axes - named else None)


@rule("all_gather all_gather_invariant")
def all_gathered(step: Step) -> list[AnyRelation]:
    named, is_unusual = _named(step)
    if is_unusual:
        return step.every(step.lost("no rule"))
    dim, tiled = jax_compat.gather_dimension(step.equation)
    return [_all_gathered(step, value, named, dim, tiled) for value in step.operands]


def _all_gathered(step: Step, value: Relation, named: frozenset[str], dim: int, tiled: bool) -> AnyRelation:
    if not named:
        is_kept = tiled and value.is_plain and all(split.dim != dim for split in value.splits)
        return value if is_kept or value.is_equal else step.lost("no rule", value)
    if value.stack or value.offset or value.is_first or value.is_key or value.is_index:
        return step.lost("index", value)
    axes = tuple(axis for axis in step.analysis.axis_sizes if axis in named)
    own = next((split for split in value.splits if split.axes == axes), None)
    if tiled:
        if own is not None and own.dim == dim and own.outer == 1 and not value.extreme:
            kept = tuple(split for split in value.splits if split is not own)
            return value.replace(splits=kept)
        if own is not None or any(split.dim == dim for split in value.splits):
            return step.lost("order", value)
        if any(set(split.axes) & named for split in value.splits) or not (
            named <= value.partial or not named & value.partial
        ):
            return step.lost("no rule", value)
        return value.replace(stack=(axes, dim))
    if own is None and any(set(split.axes) & named for split in value.splits):
        return step.lost("no rule", value)
    if named & value.partial and not named <= value.partial:
        return step.lost("no rule", value)
    splits = tuple(split.replace(dim=split.dim + (split.dim >= dim)) for split in value.splits)
    return value.replace(splits=splits, stack=(axes, dim))


@rule("reduce_scatter")
def reduce_scattered(step: Step) -> list[AnyRelation]:
    named, is_unusual = _named(step)
    dim, tiled = jax_compat.scatter_dimension(step.equation)
    value = step.operands[0]
    axes = tuple(axis for axis in step.analysis.axis_sizes if axis in named)
    if is_unusual or not named or not tiled or any(split.dim == dim for split in value.splits):
        return step.every(step.lost("no rule"))
    result = summed_over(step, value, named)
    if isinstance(result, Lost) or result.stack:
        return [result if isinstance(result, Lost) else step.lost("no rule")]
    splits = tuple(sorted([*result.splits, Split(axes, dim)], key=lambda s: s.dim))
    return [result.replace(splits=splits)]


@rule("axis_index")
def index(step: Step) -> list[AnyRelation]:
    """`axis_index`."""
    name = step.params["axis_name"]
    if isinstance(name, str) and name in step.analysis.axis_sizes:
        return [Relation(offset=((name, (-1.0,)),), is_index=True, is_nonnegative=True, origin=step.cause())]
    named, _ = _named(step)
    return step.every(step.lost("index") if named else REPLICATED)


@rule("all_to_all pgather")
def exchanged(step: Step) -> list[AnyRelation]:
    """Another collective: it exchanges the elements of one replica, if it names no axis of the replicas."""
    named, _ = _named(step)
    if named:
        return step.every(step.lost("exchange"))
    if all(value.is_equal for value in step.operands):
        return step.every(Relation(**flags(*step.operands)))
    return step.every(step.lost("no rule"))


@rule("ppermute")
def inside_replica(step: Step) -> list[AnyRelation]:
    """A permutation within a replica keeps everything."""
    named, _ = _named(step)
    return step.every(step.lost("exchange")) if named else step.keeps()
