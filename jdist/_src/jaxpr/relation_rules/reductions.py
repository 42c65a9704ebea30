"""Rules for reductions over dims and over windows."""

from collections.abc import Iterable, Sequence

from jdist._src.jaxpr.relation_rules.step import Step, rule, shifted_dim
from jdist._src.jaxpr.relations import ZERO, AnyRelation, Lost, Relation, Split, flags, is_close


@rule("reduce_sum")
def summed(step: Step) -> list[AnyRelation]:
    (value,) = step.operands
    axes = step.params["axes"]
    if value.is_zero:
        return [ZERO.replace(splits=_without_dims(value.splits, axes))]
    if value.is_special or value.is_index:
        return [step.lost("index")]
    if value.extreme:
        return [step.lost("extreme")]
    removed = {axis for split in value.splits if split.dim in axes for axis in split.axes}
    factor, partial, stack = value.factor, value.partial, value.stack
    if stack is not None and stack[1] in axes:
        stack_axes = set(stack[0])
        if stack_axes <= partial:
            partial -= stack_axes
        elif stack_axes <= removed:
            removed -= stack_axes
        elif any(set(split.axes) & stack_axes for split in value.splits):
            return [step.lost("extreme")]
        else:
            factor /= step.analysis.group_size(stack[0])
        stack = None
    elif stack is not None:
        stack = (stack[0], shifted_dim(stack[1], axes))
    new_partial = partial | removed
    origin = value.origin if not removed else step.cause(value)
    return [
        Relation(
            factor,
            _without_dims(value.splits, axes),
            new_partial,
            stack=stack,
            is_nonnegative=value.is_nonnegative,
            **{**flags(value), "origin": origin},
        )
    ]


@rule("reduce_max reduce_or reduce_min reduce_and")
def extreme(step: Step) -> list[AnyRelation]:
    """A maximum or a minimum over dims."""
    (value,) = step.operands
    kind = "max" if step.equation.primitive.name in ("reduce_max", "reduce_or") else "min"
    axes = step.params["axes"]
    if value.partial:
        return [step.lost("partial", value)]
    if value.is_special or value.is_index or value.factor <= 0 or value.stack:
        return [step.lost("no rule")]
    if value.extreme and value.extreme[0] != kind:
        return [step.lost("extreme")]
    removed = frozenset(axis for split in value.splits if split.dim in axes for axis in split.axes)
    over = removed | (value.extreme[1] if value.extreme else frozenset())
    return [
        value.replace(
            splits=_without_dims(value.splits, axes),
            extreme=(kind, over) if over else None,
            origin=step.cause(value) if removed else value.origin,
        )
    ]


@rule("reduce_prod argmax argmin reduce_xor")
def reduced(step: Step) -> list[AnyRelation]:
    """Another reduction over dims."""
    (value,) = step.operands
    axes = step.params["axes"]
    if value.partial:
        return step.every(step.lost("partial", value))
    if any(split.dim in axes for split in value.splits):
        return step.every(step.lost("examples", value))
    if not value.is_plain or value.factor <= 0:
        return step.every(step.lost("no rule"))
    if step.equation.primitive.name == "reduce_prod" and not is_close(value.factor, 1):
        return step.every(step.lost("factor", value))
    factor = 1.0 if step.equation.primitive.name.startswith("arg") else value.factor
    return step.every(value.replace(factor=factor, is_zero=False, splits=_without_dims(value.splits, axes)))


def _without_dims(splits: Iterable[Split], axes: Sequence[int]) -> tuple[Split, ...]:
    return tuple(s.replace(dim=shifted_dim(s.dim, axes)) for s in splits if s.dim not in axes)


@rule("cumsum cumprod cummax cummin cumlogsumexp")
def cumulated(step: Step) -> list[AnyRelation]:
    """A cumulative reduction; a sum is linear."""
    (value,) = step.operands
    if any(split.dim == step.params["axis"] for split in value.splits):
        return [step.lost("examples", value)]
    if step.equation.primitive.name == "cumsum" and not value.is_special and not value.extreme and not value.stack:
        return [value]
    return step.every(step.pointwise())


@rule("sort top_k")
def sorted_values(step: Step) -> list[AnyRelation]:
    dim = step.params.get("dimension", len(step.shape(0)) - 1)
    if any(split.dim == dim for value in step.operands for split in value.splits):
        partial = next((value for value in step.operands if value.partial), None)
        return step.every(step.lost("partial", partial) if partial else step.lost("sorted"))
    if any(value.offset for value in step.operands):
        return step.every(step.lost("index"))
    if step.equation.primitive.name == "sort" and len(step.operands) == 1 and step.operands[0].is_plain:
        return step.every(step.operands[0])
    return step.every(step.pointwise())


@rule("reduce_window_sum")
def windowed_sum(step: Step) -> list[AnyRelation]:
    return _windowed(step, step.operands[0])


@rule("reduce_window_max reduce_window_min reduce_window")
def windowed(step: Step) -> list[AnyRelation]:
    value = step.pointwise()
    return step.every(value) if isinstance(value, Lost) else _windowed(step, value)


def _windowed(step: Step, value: Relation) -> list[AnyRelation]:
    if value.stack or value.is_special or value.extreme or value.is_index:
        return step.every(step.lost("no rule"))
    window, strides = step.params["window_dimensions"], step.params["window_strides"]
    for split in value.splits:
        if window[split.dim] != 1 or strides[split.dim] != 1 or step.params["padding"][split.dim] != (0, 0):
            return step.every(step.lost("examples"))
    return step.every(value)


@rule("select_and_scatter_add select_and_gather_add")
def select_and_scatter(step: Step) -> list[AnyRelation]:
    """The gradient of a maximum over windows: linear in the first operand."""
    source, operand = step.operands[:2]
    if not operand.is_plain or operand.factor <= 0 or source.splits != operand.splits or source.stack:
        return [step.lost("no rule")]
    if source.is_special or source.extreme or source.partial & {a for s in operand.splits for a in s.axes}:
        return [step.lost("no rule")]
    window = step.params["window_dimensions"]
    if any(window[split.dim] != 1 for split in source.splits):
        return [step.lost("order")]
    return [source.replace(**flags(source, operand))]
