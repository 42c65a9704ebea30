"""Rules for equations that move, repeat or add dims."""

import math
from collections.abc import Callable, Sequence

from jdist._src.jaxpr.relation_rules.step import Step, ordered_offset, rule, shifted_dim
from jdist._src.jaxpr.relations import AnyRelation, Lost, Relation, Split


def moved(step: Step, value: Relation, position: Callable[[int], int | None]) -> AnyRelation:
    """Returns a value whose dims are moved; None for a dim that does not exist any more."""
    moved = [(split, position(split.dim)) for split in value.splits]
    if any(dim is None for _, dim in moved):
        return step.lost("no rule")
    splits = tuple(sorted((s.replace(dim=dim) for s, dim in moved if dim is not None), key=lambda s: s.dim))
    stack = value.stack
    if stack is not None:
        dim = position(stack[1])
        if dim is None:
            return step.lost("no rule")
        stack = (stack[0], dim)
    rank = len(step.shape(0))
    if (
        any(len(numbers) > 1 for _, numbers in value.offset)
        and rank
        and position(rank - 1) != len(step.result_shape()) - 1
    ):
        return step.lost("index")
    return value.replace(splits=splits, stack=stack)


@rule("broadcast_in_dim")
def broadcast(step: Step) -> list[AnyRelation]:
    value = step.operands[0]
    targets, sizes = step.params["broadcast_dimensions"], step.shape(0)
    if step.single.params["broadcast_dimensions"] != targets or len(step.operands) > 1:
        return [step.lost("no rule")]
    local, single = step.result_shape(), step.single_result_shape()
    result = moved(step, value, lambda dim: targets[dim] if sizes[dim] == local[targets[dim]] else None)
    if isinstance(result, Lost):
        return [result]
    known = {split.dim for split in result.splits} | ({result.stack[1]} if result.stack else set())
    for dim in range(len(local)):
        if dim in known or local[dim] == single[dim]:
            continue
        axes = step.any_group_of(local[dim], single[dim], known={a for s in result.splits for a in s.axes})
        copies = step.group_of(single[dim], local[dim])
        if axes is None and copies and single[dim] == 1 and result.is_plain:
            result = result.replace(stack=(copies, dim))
            continue
        if axes is None:
            return [_unknown_broadcast(step, result)]
        if result.partial & set(axes):
            return [step.lost("statistic", value)]
        if result.extreme or result.is_key:
            return [step.lost("extreme", value)]
        splits = tuple(sorted([*result.splits, Split(axes, dim, is_constant=True)], key=lambda s: s.dim))
        result = result.replace(splits=splits)
    return [result]


def _unknown_broadcast(step: Step, value: Relation) -> Lost:
    """A value for each pair of examples is formed in each replica alone."""
    local, single = step.result_shape(), step.single_result_shape()
    number = step.num_replicas
    return step.lost(
        "pairs" if sum(w == n * number for n, w in zip(local, single, strict=True)) > 1 else "no rule", value
    )


@rule("reshape")
def reshaped(step: Step) -> list[AnyRelation]:
    value = step.operands[0]
    if step.params.get("dimensions") is not None or len(step.operands) > 1:
        return [step.lost("no rule")]
    has_columns = any(len(numbers) > 1 for _, numbers in value.offset)
    if has_columns and step.shape(0)[-1:] != step.result_shape()[-1:]:
        return [step.lost("index")]
    old, new, single = step.shape(0), step.result_shape(), step.single_result_shape()
    splits, stack = list(value.splits), value.stack
    if stack is not None:
        stack_axes, dim = stack
        merged = [s for s in splits if s.axes == stack_axes and s.dim == dim + 1 and s.outer == 1]
        stack_dim = _dim_after(old, new, dim)
        number = step.analysis.group_size(stack_axes)
        if stack_dim is not None and new[stack_dim] == number and single[stack_dim : stack_dim + 1] == (1,):
            stack = (stack_axes, stack_dim)
        elif merged:  # the parts, one after the other, are the value of one device
            splits.remove(merged[0])
            stack = None
        elif stack_dim is not None and new[stack_dim] % number == 0 and dim + 1 <= len(old):
            stack = (stack_axes, stack_dim)
        else:
            return [step.lost("no rule")]
    result = []
    for split in splits:
        mapped = _reshaped_split(step, split, old, new, single)
        if mapped is None:
            return [step.lost("no rule")]
        result.append(mapped)
    result.sort(key=lambda s: s.dim)
    return [value.replace(splits=tuple(result), stack=stack)]


def _reshaped_split(
    step: Step, split: Split, old: Sequence[int], new: Sequence[int], single: Sequence[int]
) -> Split | None:
    """Returns a split after a reshape: the elements before the split dim, and in each part of it, are the same."""
    before = math.prod(old[: split.dim]) * split.outer
    size = step.analysis.group_size(split.axes)
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
def transposed(step: Step) -> list[AnyRelation]:
    permutation = step.params["permutation"]
    return [moved(step, step.operands[0], lambda dim: permutation.index(dim))]


@rule("squeeze")
def squeezed(step: Step) -> list[AnyRelation]:
    dims = step.params["dimensions"]
    return [moved(step, step.operands[0], lambda dim: None if dim in dims else shifted_dim(dim, dims))]


@rule("expand_dims")
def expanded(step: Step) -> list[AnyRelation]:
    dims = set(step.params["dimensions"])
    kept = [dim for dim in range(len(step.result_shape())) if dim not in dims]
    return [moved(step, step.operands[0], lambda dim: kept[dim])]


@rule("rev")
def reversed_dims(step: Step) -> list[AnyRelation]:
    value = step.operands[0]
    if any(split.dim in step.params["dimensions"] for split in value.splits) or value.stack or value.offset:
        return [step.lost("order")]
    return [value]


@rule("tile")
def tiled(step: Step) -> list[AnyRelation]:
    """`tile`: a dim that is repeated is not split."""
    value, reps = step.operands[0], step.params["reps"]
    if value.is_plain and not value.splits and not value.stack and step.single.params["reps"] != reps:
        return [_repeated(step, value)]
    if step.single.params["reps"] != reps or value.stack or value.offset:
        return [step.lost("no rule")]
    missing = len(reps) - len(step.shape(0))
    result = moved(step, value, lambda dim: dim + missing)
    if isinstance(result, Lost):
        return [result]
    splits = [split.replace(outer=split.outer * reps[split.dim]) for split in result.splits]
    if any(reps[split.dim] > 1 and split.regrouped > 1 for split in splits):
        return [step.lost("order")]
    return [result.replace(splits=tuple(splits))]


def _repeated(step: Step, value: Relation) -> AnyRelation:
    """A value that every device has is repeated once for each of its examples."""
    local, single = step.result_shape(), step.single_result_shape()
    dims = [dim for dim in range(len(local)) if local[dim] != single[dim]]
    axes = step.group_of(local[dims[0]], single[dims[0]]) if len(dims) == 1 else None
    return value.replace(splits=(Split(axes, dims[0]),)) if axes else step.lost("no rule")


@rule("pad")
def padded(step: Step) -> list[AnyRelation]:
    value, filling = step.operands
    config, other = step.params["padding_config"], step.single.params["padding_config"]
    if config != other or any(config[split.dim] != (0, 0, 0) for split in value.splits):
        return [step.lost("no rule")]
    if value.stack and config[value.stack[1]] != (0, 0, 0) or value.offset or filling.offset:
        return [step.lost("no rule")]
    if all(one == (0, 0, 0) for one in config):
        return [value]
    filling = filling.replace(splits=value.splits, stack=value.stack)
    return [step.joined([value, filling])]


@rule("zeros_like full_like")
def zeros_of_shape(step: Step) -> list[AnyRelation]:
    return [step.zeros()]


@rule("iota")
def positions(step: Step) -> list[AnyRelation]:
    """`iota`."""
    local, single = step.result_shape(), step.single_result_shape()
    if local == single:
        return [Relation(is_nonnegative=True)]
    dims = [dim for dim in range(len(local)) if local[dim] != single[dim]]
    axes = step.group_of(local[dims[0]], single[dims[0]])
    if len(dims) > 1 or axes is None:
        return [step.lost("no rule")]
    splits = (Split(axes, dims[0]),)
    if dims[0] != step.params["dimension"]:
        return [Relation(splits=splits, is_nonnegative=True)]
    offset, distance = [], float(local[dims[0]])
    for axis in reversed(axes):
        offset.append((axis, (distance,)))
        distance *= step.analysis.axis_sizes[axis]
    return [Relation(splits=splits, offset=ordered_offset(offset), is_nonnegative=True)]


def _dim_after(old: Sequence[int], new: Sequence[int], dim: int) -> int | None:
    """Returns the dim after a reshape that begins with the same elements as `dim` before it."""
    before = math.prod(old[:dim])
    products = [math.prod(new[:n]) for n in range(len(new))]
    found = [n for n, product in enumerate(products) if product == before]
    return next((n for n in reversed(found)), None)
