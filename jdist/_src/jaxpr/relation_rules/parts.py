"""Rules for values that are joined from parts, and for slices."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jdist._src.core import jax_compat
from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair, rule, shifted_dim
from jdist._src.jaxpr.relation_rules.shapes import moved
from jdist._src.jaxpr.relations import AnyRelation, Lost, Relation, Split, inherited


class _Part(NamedTuple):
    """The index of the first element of a slice in each dim, and the index after its last element."""

    start: Sequence[int]
    limit: Sequence[int]


@rule("concatenate")
def concatenated(pair: EquationPair) -> list[AnyRelation]:
    dim = pair.params["dimension"]
    values = pair.operands
    if any(value.offset or value.is_index for value in values):
        return [_concatenated_positions(pair, dim)]
    splits = [s for value in values for s in value.splits if s.dim == dim]
    if splits:
        sizes = {pair.shape(i)[dim] for i in range(len(values))}
        plain = [value.replace(splits=tuple(s for s in value.splits if s.dim != dim)) for value in values]
        joined = pair.joined(plain)
        if len(splits) < len(values) or len(sizes) > 1 or {s.axes for s in splits} != {splits[0].axes}:
            return [pair.lost("no rule")]
        if any(s.outer != 1 for s in splits) or isinstance(joined, Lost):
            return [joined if isinstance(joined, Lost) else pair.lost("order")]
        new = sorted(
            [*joined.splits, Split(splits[0].axes, dim, len(values), splits[0].regrouped)], key=lambda s: s.dim
        )
        return [joined.replace(splits=tuple(new))]
    if any(value.stack and value.stack[1] == dim for value in values):
        return [pair.lost("no rule")]
    return [_joined_parts(pair, values)]


def _joined_parts(pair: EquationPair, values: Sequence[Relation]) -> AnyRelation:
    """Returns the relation of parts along a dim that is not split. Zeros have the splits of the other parts."""
    others = [value for value in values if not value.is_zero]
    filled = [v.replace(splits=others[0].splits) if v.is_zero and others else v for v in values]
    joined = pair.joined(filled)
    return pair.lost("order") if isinstance(joined, Lost) and joined.reason == "mixed" else joined


def _concatenated_positions(pair: EquationPair, dim: int) -> AnyRelation:
    """Joins indices of several dims to one index: each element of the last dim has its own offset."""
    values = pair.operands
    if dim != len(pair.result_shape()) - 1 or any(pair.shape(i)[dim] != 1 for i in range(len(values))):
        return pair.lost("index")
    if len({value.splits for value in values}) > 1 or any(not value.is_plain and not value.offset for value in values):
        return pair.lost("index")
    offset = []
    for axis in pair.analysis.axis_sizes:
        numbers = [dict(value.offset).get(axis, (0.0,)) for value in values]
        if any(len(one) > 1 for one in numbers):
            return pair.lost("index")
        offset.append((axis, tuple(one[0] for one in numbers)))
    nonnegative = all(value.is_nonnegative for value in values)
    return Relation(splits=values[0].splits, offset=tuple(offset), is_nonnegative=nonnegative, **inherited(*values))


@rule("slice")
def sliced(pair: EquationPair) -> list[AnyRelation]:
    own, other = pair.params, pair.single.params
    rank = len(pair.shape(0))
    strides = own["strides"] or (1,) * rank
    if tuple(strides) != tuple(other["strides"] or (1,) * rank):
        return [pair.lost("no rule")]
    part, single = (_Part(p["start_indices"], p["limit_indices"]) for p in (own, other))
    return [_part(pair, pair.operands[0], part, single, strides)]


@rule("split")
def split_apart(pair: EquationPair) -> list[AnyRelation]:
    """`split` along one dim."""
    axis = pair.params["axis"]
    if pair.single.params["axis"] != axis:
        return pair.every(pair.lost("no rule"))
    shapes = [jax_compat.shape_of(equation.invars[0]) for equation in (pair.equation, pair.single)]
    sizes = [equation.params["sizes"] for equation in (pair.equation, pair.single)]
    ends = [list(itertools.accumulate(one)) for one in sizes]
    results = []
    for number in range(len(sizes[0])):
        parts = []
        for k in (0, 1):
            end, size = ends[k][number], sizes[k][number]
            start = [end - size if dim == axis else 0 for dim in range(len(shapes[k]))]
            parts.append(_Part(start, [end if dim == axis else n for dim, n in enumerate(shapes[k])]))
        results.append(_part(pair, pair.operands[0], parts[0], parts[1], (1,) * len(shapes[0])))
    return results


def _part(pair: EquationPair, value: Relation, own: _Part, other: _Part, strides: Sequence[int]) -> AnyRelation:
    """Returns the relation of a slice: complete blocks of a split dim, and the same elements of the others."""
    sizes, splits, changed = pair.shape(0), [], set()
    for split in value.splits:
        dim, number = split.dim, pair.analysis.group_size(split.axes)
        changed.add(dim)
        block = sizes[dim] // split.outer
        start, limit = own.start[dim], own.limit[dim]
        is_scaled = (other.start[dim], other.limit[dim]) == (start * number, limit * number)
        if strides[dim] != 1 or start % block or limit % block or not is_scaled or start == limit:
            return pair.lost("part", value)
        splits.append(split.replace(outer=(limit - start) // block))
    for dim in range(len(sizes)):
        is_stack = value.stack is not None and value.stack[1] == dim
        if dim in changed or is_stack:
            continue
        if (own.start[dim], own.limit[dim]) != (other.start[dim], other.limit[dim]):
            return pair.lost("no rule")
    if value.stack is not None:
        axes, dim = value.stack
        if (own.start[dim], own.limit[dim]) != (0, sizes[dim]):
            is_copy = not (set(axes) & value.partial or any(set(s.axes) & set(axes) for s in splits) or value.extreme)
            if not is_copy or own.limit[dim] - own.start[dim] != 1 or sizes[dim] != pair.analysis.group_size(axes):
                return pair.lost("index", value)
            value = value.replace(stack=None)
    if any(len(numbers) > 1 for _, numbers in value.offset) and own.limit[-1] - own.start[-1] != sizes[-1]:
        return pair.lost("index")
    return value.replace(splits=tuple(splits))


@rule("stack")
def stacked(pair: EquationPair) -> list[AnyRelation]:
    """`stack` along a new dim."""
    axis = pair.params["axis"]
    values = []
    for value in pair.operands:
        splits = tuple(s.replace(dim=s.dim + (s.dim >= axis)) for s in value.splits)
        stack = (value.stack[0], value.stack[1] + (value.stack[1] >= axis)) if value.stack else None
        values.append(value.replace(splits=splits, stack=stack))
    if any(value.offset or value.is_index for value in values):
        return [pair.lost("index")]
    return [_joined_parts(pair, values)]


@rule("unstack")
def unstacked(pair: EquationPair) -> list[AnyRelation]:
    """`unstack`: a dim becomes one result per index."""
    value, axis = pair.operands[0], pair.params["axis"]
    if len(pair.single.outvars) != len(pair.equation.outvars) or value.offset:
        return pair.every(pair.lost("part", value))
    if value.stack and value.stack[1] == axis:
        is_copy = not (set(value.stack[0]) & value.partial or value.extreme)
        if not is_copy or any(set(split.axes) & set(value.stack[0]) for split in value.splits):
            return pair.every(pair.lost("index", value))
        value = value.replace(stack=None)
    if any(split.dim == axis for split in value.splits):
        return pair.every(pair.lost("part", value))
    return pair.every(moved(pair, value, lambda dim: shifted_dim(dim, (axis,))))
