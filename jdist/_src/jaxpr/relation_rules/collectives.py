"""Rules for collectives."""

import math

from jdist._src.core import jax_compat
from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair, rule
from jdist._src.jaxpr.relations import REPLICATED, AnyRelation, Lost, Relation, Split, inherited


def _named(pair: EquationPair) -> tuple[frozenset[str], bool]:
    """Returns the axes of the replicas that a collective names, and whether it has another form than the usual one."""
    names = jax_compat.contents(pair.equation).names
    named = frozenset(pair.analysis.axis_sizes) & names
    is_unusual = jax_compat.has_axis_index_groups(pair.equation) or jax_compat.has_positional_axes(pair.equation)
    return named, is_unusual


@rule("psum psum_invariant")
def all_summed(pair: EquationPair) -> list[AnyRelation]:
    """`psum`."""
    named, is_unusual = _named(pair)
    if is_unusual:
        return pair.every(pair.lost("no rule"))
    return [summed_over(pair, value, named) for value in pair.operands]


def summed_over(pair: EquationPair, value: Relation, named: frozenset[str]) -> AnyRelation:
    """Returns the sum of a value over mesh axes."""
    if not named:
        return value if not value.is_special and not value.extreme else pair.lost("index", value)
    if value.is_zero:
        return value
    split_axes = {axis for split in value.splits for axis in split.axes}
    if value.is_index or value.offset or value.is_key or value.is_first:
        return pair.lost("index", value)
    if named & split_axes:
        return pair.lost("examples", value)
    if value.extreme:
        return pair.lost("extreme sum" if value.extreme[1] & named else "extreme", value)
    if value.stack and set(value.stack[0]) & named & value.partial:
        return pair.lost("no rule", value)
    repeated = named - value.partial
    factor = value.factor / math.prod(pair.analysis.axis_sizes[axis] for axis in repeated)
    return value.replace(partial=value.partial - named, factor=factor, origin=pair.cause(value))


@rule("pmax pmin")
def all_extreme(pair: EquationPair) -> list[AnyRelation]:
    """`pmax` and `pmin`."""
    named, is_unusual = _named(pair)
    if is_unusual:
        return pair.every(pair.lost("no rule"))
    kind = pair.equation.primitive.name.removeprefix("p")
    return [extreme_over(pair, value, named, kind) for value in pair.operands]


def extreme_over(pair: EquationPair, value: Relation, named: frozenset[str], name: str) -> AnyRelation:
    """Returns the greatest or the least of a value over mesh axes."""
    if value.is_zero or not named and value.is_pointwise:
        return value
    if value.partial:
        return pair.lost("extreme of sums", value)
    if named & {axis for split in value.splits for axis in split.axes}:
        return pair.lost("examples", value)
    if value.is_special or value.is_index or value.stack or value.factor <= 0:
        return pair.lost("index" if value.is_special else "no rule", value)
    if value.extreme is None:
        return value
    kind, axes = value.extreme
    if kind != name:
        return pair.lost("extreme", value)
    return value.replace(extreme=(kind, axes - named) if axes - named else None)


@rule("all_gather all_gather_invariant")
def all_gathered(pair: EquationPair) -> list[AnyRelation]:
    named, is_unusual = _named(pair)
    if is_unusual:
        return pair.every(pair.lost("no rule"))
    dim, tiled = jax_compat.gather_dimension(pair.equation)
    return [_all_gathered(pair, value, named, dim, tiled) for value in pair.operands]


def _all_gathered(pair: EquationPair, value: Relation, named: frozenset[str], dim: int, tiled: bool) -> AnyRelation:
    if not named:
        is_unchanged = tiled and value.is_plain and all(split.dim != dim for split in value.splits)
        return value if is_unchanged or value.is_equal else pair.lost("no rule", value)
    if value.stack or value.offset or value.is_first or value.is_key or value.is_index:
        return pair.lost("index", value)
    axes = tuple(axis for axis in pair.analysis.axis_sizes if axis in named)
    own = next((split for split in value.splits if split.axes == axes), None)
    if tiled:
        if own is not None and own.dim == dim and own.outer == 1 and not value.extreme:
            return value.replace(splits=tuple(split for split in value.splits if split is not own))
        if own is not None or any(split.dim == dim for split in value.splits):
            return pair.lost("order", value)
        if any(set(split.axes) & named for split in value.splits) or not (
            named <= value.partial or not named & value.partial
        ):
            return pair.lost("no rule", value)
        return value.replace(stack=(axes, dim))
    if own is None and any(set(split.axes) & named for split in value.splits):
        return pair.lost("no rule", value)
    if named & value.partial and not named <= value.partial:
        return pair.lost("no rule", value)
    splits = tuple(split.replace(dim=split.dim + (split.dim >= dim)) for split in value.splits)
    return value.replace(splits=splits, stack=(axes, dim))


@rule("reduce_scatter")
def reduce_scattered(pair: EquationPair) -> list[AnyRelation]:
    named, is_unusual = _named(pair)
    dim, tiled = jax_compat.scatter_dimension(pair.equation)
    value = pair.operands[0]
    axes = tuple(axis for axis in pair.analysis.axis_sizes if axis in named)
    if is_unusual or not named or not tiled or any(split.dim == dim for split in value.splits):
        return pair.every(pair.lost("no rule"))
    result = summed_over(pair, value, named)
    if isinstance(result, Lost) or result.stack:
        return [result if isinstance(result, Lost) else pair.lost("no rule")]
    splits = tuple(sorted([*result.splits, Split(axes, dim)], key=lambda s: s.dim))
    return [result.replace(splits=splits)]


@rule("axis_index")
def index(pair: EquationPair) -> list[AnyRelation]:
    """`axis_index`."""
    name = pair.params["axis_name"]
    if isinstance(name, str) and name in pair.analysis.axis_sizes:
        return [Relation(offset=((name, (-1.0,)),), is_index=True, is_nonnegative=True, origin=pair.cause())]
    named, _ = _named(pair)
    return pair.every(pair.lost("index") if named else REPLICATED)


@rule("all_to_all pgather")
def exchanged(pair: EquationPair) -> list[AnyRelation]:
    """`all_to_all` and `pgather`: within a replica they exchange its elements."""
    named, _ = _named(pair)
    if named:
        return pair.every(pair.lost("exchange"))
    if all(value.is_equal for value in pair.operands):
        return pair.every(Relation(**inherited(*pair.operands)))
    return pair.every(pair.lost("no rule"))


@rule("ppermute")
def inside_replica(pair: EquationPair) -> list[AnyRelation]:
    """`ppermute`: a permutation within a replica does not change the relation."""
    named, _ = _named(pair)
    return pair.every(pair.lost("exchange")) if named else pair.keeps()
