"""Rules for equations that move, repeat or add dims."""

import math
from collections.abc import Callable, Sequence

from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair, ordered_offset, rule, shifted_dim
from jdist._src.jaxpr.relations import AnyRelation, Lost, Relation, Split


def moved(pair: EquationPair, value: Relation, position: Callable[[int], int | None]) -> AnyRelation:
    """Returns a value whose dims are moved: `position` returns the new dim of a dim, or None if there is none."""
    new_dims = [(split, position(split.dim)) for split in value.splits]
    if any(dim is None for _, dim in new_dims):
        return pair.lost("no rule")
    splits = tuple(sorted((s.replace(dim=dim) for s, dim in new_dims if dim is not None), key=lambda s: s.dim))
    stack = value.stack
    if stack is not None:
        dim = position(stack[1])
        if dim is None:
            return pair.lost("no rule")
        stack = (stack[0], dim)
    rank = len(pair.shape(0))
    if (
        any(len(numbers) > 1 for _, numbers in value.offset)
        and rank
        and position(rank - 1) != len(pair.result_shape()) - 1
    ):
        return pair.lost("index")
    return value.replace(splits=splits, stack=stack)


@rule("broadcast_in_dim")
def broadcast(pair: EquationPair) -> list[AnyRelation]:
    value = pair.operands[0]
    targets, sizes = pair.params["broadcast_dimensions"], pair.shape(0)
    if pair.single.params["broadcast_dimensions"] != targets or len(pair.operands) > 1:
        return [pair.lost("no rule")]
    local, single = pair.result_shape(), pair.single_result_shape()
    result = moved(pair, value, lambda dim: targets[dim] if sizes[dim] == local[targets[dim]] else None)
    if isinstance(result, Lost):
        return [result]
    known = {split.dim for split in result.splits} | ({result.stack[1]} if result.stack else set())
    for dim in range(len(local)):
        if dim in known or local[dim] == single[dim]:
            continue
        axes = pair.any_group_of(local[dim], single[dim], used_axes={a for s in result.splits for a in s.axes})
        copies = pair.group_of(single[dim], local[dim])
        if axes is None and copies and single[dim] == 1 and result.is_plain:
            result = result.replace(stack=(copies, dim))
            continue
        if axes is None:
            return [_unknown_broadcast(pair, result)]
        if result.partial & set(axes):
            return [pair.lost("statistic", value)]
        if result.extreme or result.is_key:
            return [pair.lost("extreme", value)]
        splits = tuple(sorted([*result.splits, Split(axes, dim, is_constant=True)], key=lambda s: s.dim))
        result = result.replace(splits=splits)
    return [result]


def _unknown_broadcast(pair: EquationPair, value: Relation) -> Lost:
    """A value for each pair of examples is formed in each replica alone."""
    local, single = pair.result_shape(), pair.single_result_shape()
    number = pair.num_replicas
    return pair.lost(
        "pairs" if sum(w == n * number for n, w in zip(local, single, strict=True)) > 1 else "no rule", value
    )


@rule("reshape")
def reshaped(pair: EquationPair) -> list[AnyRelation]:
    value = pair.operands[0]
    if pair.params.get("dimensions") is not None or len(pair.operands) > 1:
        return [pair.lost("no rule")]
    has_columns = any(len(numbers) > 1 for _, numbers in value.offset)
    if has_columns and pair.shape(0)[-1:] != pair.result_shape()[-1:]:
        return [pair.lost("index")]
    old, new, single = pair.shape(0), pair.result_shape(), pair.single_result_shape()
    splits, stack = list(value.splits), value.stack
    if stack is not None:
        stack_axes, dim = stack
        merged = [s for s in splits if s.axes == stack_axes and s.dim == dim + 1 and s.outer == 1]
        stack_dim = _dim_after(old, new, dim)
        number = pair.analysis.group_size(stack_axes)
        if stack_dim is not None and new[stack_dim] == number and single[stack_dim : stack_dim + 1] == (1,):
            stack = (stack_axes, stack_dim)
        elif merged:  # the parts, one after the other, are the value of one device
            splits.remove(merged[0])
            stack = None
        elif stack_dim is not None and new[stack_dim] % number == 0 and dim + 1 <= len(old):
            stack = (stack_axes, stack_dim)
        else:
            return [pair.lost("no rule")]
    result = []
    for split in splits:
        mapped = _reshaped_split(pair, split, old, new, single)
        if mapped is None:
            return [pair.lost("no rule")]
        result.append(mapped)
    result.sort(key=lambda s: s.dim)
    return [value.replace(splits=tuple(result), stack=stack)]


def _reshaped_split(
    pair: EquationPair, split: Split, old: Sequence[int], new: Sequence[int], single: Sequence[int]
) -> Split | None:
    """Returns a split after a reshape: the elements before the split dim, and in each part of it, are the same."""
    before = math.prod(old[: split.dim]) * split.outer
    size = pair.analysis.group_size(split.axes)
    candidates = [dim for dim in range(len(new)) if len(single) == len(new) and single[dim] == new[dim] * size]
    for dim in candidates:
        first = math.prod(new[:dim])
        if first and before % first == 0 and before // first and new[dim] % (before // first) == 0:
            return split.replace(dim=dim, outer=before // first)
    for dim in candidates:  # each replica divides its part into micro-batches
        first = math.prod(new[:dim])
        if before and first % before == 0:
            return split.replace(dim=dim, outer=1, regrouped=split.regrouped * (first // before))
        merged = before // max(split.regrouped, 1)
        if split.regrouped > 1 and merged and merged % max(first, 1) == 0:
            return split.replace(dim=dim, outer=merged // first, regrouped=1)
    return None


@rule("transpose")
def transposed(pair: EquationPair) -> list[AnyRelation]:
    permutation = pair.params["permutation"]
    return [moved(pair, pair.operands[0], lambda dim: permutation.index(dim))]


@rule("squeeze")
def squeezed(pair: EquationPair) -> list[AnyRelation]:
    dims = pair.params["dimensions"]
    return [moved(pair, pair.operands[0], lambda dim: None if dim in dims else shifted_dim(dim, dims))]


@rule("expand_dims")
def expanded(pair: EquationPair) -> list[AnyRelation]:
    dims = set(pair.params["dimensions"])
    old_dims = [dim for dim in range(len(pair.result_shape())) if dim not in dims]
    return [moved(pair, pair.operands[0], lambda dim: old_dims[dim])]


@rule("rev")
def reversed_dims(pair: EquationPair) -> list[AnyRelation]:
    value = pair.operands[0]
    if any(split.dim in pair.params["dimensions"] for split in value.splits) or value.stack or value.offset:
        return [pair.lost("order")]
    return [value]


@rule("tile")
def tiled(pair: EquationPair) -> list[AnyRelation]:
    """`tile`: a dim that is repeated is not split."""
    value, reps = pair.operands[0], pair.params["reps"]
    if value.is_plain and not value.splits and not value.stack and pair.single.params["reps"] != reps:
        return [_repeated(pair, value)]
    if pair.single.params["reps"] != reps or value.stack or value.offset:
        return [pair.lost("no rule")]
    missing = len(reps) - len(pair.shape(0))
    result = moved(pair, value, lambda dim: dim + missing)
    if isinstance(result, Lost):
        return [result]
    splits = [split.replace(outer=split.outer * reps[split.dim]) for split in result.splits]
    if any(reps[split.dim] > 1 and split.regrouped > 1 for split in splits):
        return [pair.lost("order")]
    return [result.replace(splits=tuple(splits))]


def _repeated(pair: EquationPair, value: Relation) -> AnyRelation:
    """A value that every device has is repeated once for each of its examples."""
    local, single = pair.result_shape(), pair.single_result_shape()
    dims = [dim for dim in range(len(local)) if local[dim] != single[dim]]
    axes = pair.group_of(local[dims[0]], single[dims[0]]) if len(dims) == 1 else None
    return value.replace(splits=(Split(axes, dims[0]),)) if axes else pair.lost("no rule")


@rule("pad")
def padded(pair: EquationPair) -> list[AnyRelation]:
    value, filling = pair.operands
    config, other = pair.params["padding_config"], pair.single.params["padding_config"]
    if config != other or any(config[split.dim] != (0, 0, 0) for split in value.splits):
        return [pair.lost("no rule")]
    if value.stack and config[value.stack[1]] != (0, 0, 0) or value.offset or filling.offset:
        return [pair.lost("no rule")]
    if all(one == (0, 0, 0) for one in config):
        return [value]
    filling = filling.replace(splits=value.splits, stack=value.stack)
    return [pair.joined([value, filling])]


@rule("zeros_like full_like")
def zeros_of_shape(pair: EquationPair) -> list[AnyRelation]:
    return [pair.zeros()]


@rule("iota")
def positions(pair: EquationPair) -> list[AnyRelation]:
    """`iota`."""
    local, single = pair.result_shape(), pair.single_result_shape()
    if local == single:
        return [Relation(is_nonnegative=True)]
    dims = [dim for dim in range(len(local)) if local[dim] != single[dim]]
    axes = pair.group_of(local[dims[0]], single[dims[0]])
    if len(dims) > 1 or axes is None:
        return [pair.lost("no rule")]
    splits = (Split(axes, dims[0]),)
    if dims[0] != pair.params["dimension"]:
        return [Relation(splits=splits, is_nonnegative=True)]
    offset, distance = [], float(local[dims[0]])
    for axis in reversed(axes):
        offset.append((axis, (distance,)))
        distance *= pair.analysis.axis_sizes[axis]
    return [Relation(splits=splits, offset=ordered_offset(offset), is_nonnegative=True)]


def _dim_after(old: Sequence[int], new: Sequence[int], dim: int) -> int | None:
    """Returns the dim after a reshape that begins with the same elements as `dim` before it."""
    before = math.prod(old[:dim])
    products = [math.prod(new[:n]) for n in range(len(new))]
    return next((n for n in reversed(range(len(new))) if products[n] == before), None)
