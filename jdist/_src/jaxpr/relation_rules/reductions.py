"""Rules for reductions over dims and over windows."""

from collections.abc import Iterable, Sequence

from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair, rule, shifted_dim
from jdist._src.jaxpr.relations import ZERO, AnyRelation, Lost, Relation, Split, inherited, is_close


@rule("reduce_sum")
def summed(pair: EquationPair) -> list[AnyRelation]:
    (value,) = pair.operands
    axes = pair.params["axes"]
    if value.is_zero:
        return [ZERO.replace(splits=_without_dims(value.splits, axes))]
    if value.is_special or value.is_index:
        return [pair.lost("index")]
    if value.extreme:
        return [pair.lost("extreme")]
    removed = {axis for split in value.splits if split.dim in axes for axis in split.axes}
    factor, partial, stack = value.factor, value.partial, value.stack
    if stack is not None and stack[1] in axes:
        stack_axes = set(stack[0])
        if stack_axes <= partial:
            partial -= stack_axes
        elif stack_axes <= removed:
            removed -= stack_axes
        elif any(set(split.axes) & stack_axes for split in value.splits):
            return [pair.lost("extreme")]
        else:
            factor /= pair.analysis.group_size(stack[0])
        stack = None
    elif stack is not None:
        stack = (stack[0], shifted_dim(stack[1], axes))
    new_partial = partial | removed
    origin = value.origin if not removed else pair.cause(value)
    return [
        Relation(
            factor,
            _without_dims(value.splits, axes),
            new_partial,
            stack=stack,
            is_nonnegative=value.is_nonnegative,
            **{**inherited(value), "origin": origin},
        )
    ]


@rule("reduce_max reduce_or reduce_min reduce_and")
def extreme(pair: EquationPair) -> list[AnyRelation]:
    """A maximum or a minimum over dims."""
    (value,) = pair.operands
    kind = "max" if pair.equation.primitive.name in ("reduce_max", "reduce_or") else "min"
    axes = pair.params["axes"]
    if value.partial:
        return [pair.lost("partial", value)]
    if value.is_special or value.is_index or value.factor <= 0 or value.stack:
        return [pair.lost("no rule")]
    if value.extreme and value.extreme[0] != kind:
        return [pair.lost("extreme")]
    removed = frozenset(axis for split in value.splits if split.dim in axes for axis in split.axes)
    over = removed | (value.extreme[1] if value.extreme else frozenset())
    return [
        value.replace(
            splits=_without_dims(value.splits, axes),
            extreme=(kind, over) if over else None,
            origin=pair.cause(value) if removed else value.origin,
        )
    ]


@rule("reduce_prod argmax argmin reduce_xor")
def reduced(pair: EquationPair) -> list[AnyRelation]:
    """Another reduction over dims."""
    (value,) = pair.operands
    axes = pair.params["axes"]
    if value.partial:
        return pair.every(pair.lost("partial", value))
    if any(split.dim in axes for split in value.splits):
        return pair.every(pair.lost("examples", value))
    if not value.is_plain or value.factor <= 0:
        return pair.every(pair.lost("no rule"))
    if pair.equation.primitive.name == "reduce_prod" and not is_close(value.factor, 1):
        return pair.every(pair.lost("factor", value))
    factor = 1.0 if pair.equation.primitive.name.startswith("arg") else value.factor
    return pair.every(value.replace(factor=factor, is_zero=False, splits=_without_dims(value.splits, axes)))


def _without_dims(splits: Iterable[Split], axes: Sequence[int]) -> tuple[Split, ...]:
    return tuple(s.replace(dim=shifted_dim(s.dim, axes)) for s in splits if s.dim not in axes)


@rule("cumsum cumprod cummax cummin cumlogsumexp")
def cumulated(pair: EquationPair) -> list[AnyRelation]:
    """A cumulative reduction; a sum is linear."""
    (value,) = pair.operands
    if any(split.dim == pair.params["axis"] for split in value.splits):
        return [pair.lost("examples", value)]
    if pair.equation.primitive.name == "cumsum" and not value.is_special and not value.extreme and not value.stack:
        return [value]
    return pair.every(pair.pointwise())


@rule("sort top_k")
def sorted_values(pair: EquationPair) -> list[AnyRelation]:
    dim = pair.params.get("dimension", len(pair.shape(0)) - 1)
    if any(split.dim == dim for value in pair.operands for split in value.splits):
        partial = next((value for value in pair.operands if value.partial), None)
        return pair.every(pair.lost("partial", partial) if partial else pair.lost("sorted"))
    if any(value.offset for value in pair.operands):
        return pair.every(pair.lost("index"))
    if pair.equation.primitive.name == "sort" and len(pair.operands) == 1 and pair.operands[0].is_plain:
        return pair.every(pair.operands[0])
    return pair.every(pair.pointwise())


@rule("reduce_window_sum")
def windowed_sum(pair: EquationPair) -> list[AnyRelation]:
    return _windowed(pair, pair.operands[0])


@rule("reduce_window_max reduce_window_min reduce_window")
def windowed(pair: EquationPair) -> list[AnyRelation]:
    value = pair.pointwise()
    return pair.every(value) if isinstance(value, Lost) else _windowed(pair, value)


def _windowed(pair: EquationPair, value: Relation) -> list[AnyRelation]:
    if value.stack or value.is_special or value.extreme or value.is_index:
        return pair.every(pair.lost("no rule"))
    window, strides = pair.params["window_dimensions"], pair.params["window_strides"]
    for split in value.splits:
        if window[split.dim] != 1 or strides[split.dim] != 1 or pair.params["padding"][split.dim] != (0, 0):
            return pair.every(pair.lost("examples"))
    return pair.every(value)


@rule("select_and_scatter_add select_and_gather_add")
def select_and_scatter(pair: EquationPair) -> list[AnyRelation]:
    """The gradient of a maximum over windows: linear in the first operand."""
    source, operand = pair.operands[:2]
    if not operand.is_plain or operand.factor <= 0 or source.splits != operand.splits or source.stack:
        return [pair.lost("no rule")]
    if source.is_special or source.extreme or source.partial & {a for s in operand.splits for a in s.axes}:
        return [pair.lost("no rule")]
    window = pair.params["window_dimensions"]
    if any(window[split.dim] != 1 for split in source.splits):
        return [pair.lost("order")]
    return [source.replace(**inherited(source, operand))]
