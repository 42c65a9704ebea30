"""Rules for parts that indices select."""

from collections.abc import Sequence

from jdist._src.jaxpr.dims import gather_dims
from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair, rule
from jdist._src.jaxpr.relations import (
    AnyRelation,
    Lost,
    Relation,
    Split,
    inherited,
    is_close,
    with_equal_partial_axes,
)


@rule("gather")
def gathered_rows(pair: EquationPair) -> list[AnyRelation]:
    """`gather`: the operand is linear, and the indices select."""
    operand, indices = pair.operands[:2]
    numbers = pair.params["dimension_numbers"]
    if not pair.has_same("fill_value", "mode") or operand.stack or indices.stack:
        return [pair.lost("no rule")]
    operand_batch, index_batch = list(numbers.operand_batching_dims), list(numbers.start_indices_batching_dims)
    window_dims, index_dims = gather_dims(pair.equation)
    if not _is_selection(indices):
        return [_unselectable(pair, indices)]
    splits = {s.replace(dim=index_dims[s.dim]) for s in indices.splits if s.dim < len(index_dims)}
    indexed = list(numbers.start_index_map)
    uses_positions = False
    for split in operand.splits:
        dim = split.dim
        if dim in operand_batch:
            partner = index_batch[operand_batch.index(dim)]
            if split.replace(dim=partner) not in indices.splits:
                return [pair.lost("order")]
        elif dim in indexed:
            if not _selects_own_rows(pair, indices, indexed.index(dim), split, dim):
                return [pair.lost("part", operand)]
            uses_positions = True
        elif dim in window_dims and pair.params["slice_sizes"][dim] == pair.shape(0)[dim]:
            splits.add(split.replace(dim=window_dims[dim]))
        else:
            return [pair.lost("part", operand)]
    if any(any(numbers_) for _, numbers_ in indices.offset) and not uses_positions:
        return [pair.lost("index", indices)]
    axes = {axis for split in indices.splits for axis in split.axes}
    if operand.partial & axes or operand.extreme or operand.is_special or operand.is_index:
        return [pair.lost("statistic" if operand.partial else "no rule", operand)]
    split_axes = [axis for split in splits for axis in split.axes]
    if len(split_axes) > len(set(split_axes)):
        return [pair.lost("pairs")]
    ordered = tuple(sorted(splits, key=lambda s: s.dim))
    return [operand.replace(splits=ordered, is_zero=operand.is_zero, **inherited(operand, indices))]


def _is_selection(indices: Relation) -> bool:
    return not (
        indices.partial or indices.extreme or indices.stack or indices.is_first or indices.is_key or indices.is_index
    ) and is_close(indices.factor, 1)


def _unselectable(pair: EquationPair, indices: Relation) -> Lost:
    if indices.partial:
        return pair.lost("partial", indices)
    return pair.lost("index" if indices.is_index else "extreme", indices)


def _selects_own_rows(pair: EquationPair, indices: Relation, column: int, split: Split, dim: int) -> bool:
    """Whether a column of indices are the positions of the examples, which a replica and one device count from 0."""
    if split.outer != 1 or not any(s.axes == split.axes for s in indices.splits):
        return False
    size = pair.shape(0)[dim]
    distances, distance = {}, float(size)
    for axis in reversed(split.axes):
        distances[axis] = distance
        distance *= pair.analysis.axis_sizes[axis]
    offsets = dict(indices.offset)
    for axis, expected in distances.items():
        numbers = offsets.get(axis, (0.0,))
        value = numbers[0] if len(numbers) == 1 else numbers[column] if column < len(numbers) else None
        if value != expected:
            return False
    others = {i for numbers in offsets.values() if len(numbers) > 1 for i, x in enumerate(numbers) if x and i != column}
    return not others


@rule(
    "scatter-add scatter_add scatter scatter-sub scatter-mul scatter_mul scatter-min scatter-max scatter_min scatter_max"
)
def scattered(pair: EquationPair) -> list[AnyRelation]:
    """`scatter-add` is linear in operand and updates; another scatter selects between them."""
    operand, indices, updates = pair.operands
    numbers = pair.params["dimension_numbers"]
    if operand.stack or indices.stack or updates.stack:
        return [pair.lost("no rule")]
    if not _is_selection(indices):
        return [_unselectable(pair, indices)]
    is_sum = pair.equation.primitive.name in ("scatter-add", "scatter_add", "scatter-sub")
    windows = list(numbers.update_window_dims)
    positions = [dim for dim in range(len(pair.shape(2))) if dim not in windows]
    operand_batch, index_batch = list(numbers.operand_batching_dims), list(numbers.scatter_indices_batching_dims)
    rank = len(pair.shape(0))
    window_dims = [d for d in range(rank) if d not in operand_batch and d not in numbers.inserted_window_dims]
    window_of = dict(zip(windows, window_dims, strict=True))
    indexed = list(numbers.scatter_dims_to_operand_dims)
    operand_splits: set[Split] = set()
    summed: set[str] = set()
    uses_positions = False
    updates_splits = set(updates.splits)
    for split in updates.splits:
        if split.dim in window_of:
            dim = window_of[split.dim]
            if dim in indexed or pair.shape(2)[split.dim] != pair.shape(0)[dim]:
                return [pair.lost("part")]
            operand_splits.add(split.replace(dim=dim))
            continue
        index_dim = positions.index(split.dim)
        index_split = split.replace(dim=index_dim)
        if index_dim in index_batch:
            if index_split not in indices.splits:
                return [pair.lost("order")]
            operand_splits.add(split.replace(dim=operand_batch[index_batch.index(index_dim)]))
            continue
        own_dims = [
            dim
            for column, dim in enumerate(indexed)
            if _selects_own_rows(pair, indices, column, split.replace(dim=dim, outer=1), dim)
        ]
        if own_dims:
            uses_positions = True
            operand_splits.add(Split(split.axes, own_dims[0]))
        elif is_sum and not any(any(x) for _, x in indices.offset):
            summed.update(split.axes)
        else:
            return [pair.lost("part")]
    for split in indices.splits:
        is_of_updates = split.dim >= len(positions) or split.replace(dim=positions[split.dim]) in updates_splits
        if not is_of_updates and not updates.is_zero:
            return [pair.lost("order")]
    if any(any(x) for _, x in indices.offset) and not uses_positions:
        return [pair.lost("index")]
    ordered = tuple(sorted(operand_splits, key=lambda s: s.dim))
    if operand.is_zero:
        operand = operand.replace(splits=ordered)
    if operand.splits != ordered or updates.extreme or updates.is_special or operand.is_special or operand.extreme:
        return [pair.lost("no rule")]
    if updates.partial & {axis for split in ordered for axis in split.axes} or updates.partial & summed:
        return [pair.lost("statistic", updates)]
    moved = updates.replace(
        splits=ordered,
        partial=updates.partial | summed,
        origin=pair.cause(updates) if summed else updates.origin,
    )
    is_choice = is_sum or pair.equation.primitive.name == "scatter"
    if not is_choice and not (operand.is_pointwise and moved.is_pointwise):
        return [pair.lost("partial" if moved.partial else "no rule")]
    fitting = with_equal_partial_axes([operand, moved], pair.analysis.axis_sizes)
    if fitting is None:
        return [pair.mixed(operand, moved)]
    nonnegative = operand.is_nonnegative and updates.is_nonnegative
    is_zero = operand.is_zero and updates.is_zero
    return [fitting[1].replace(is_zero=is_zero, is_nonnegative=nonnegative, **inherited(operand, moved))]


@rule("dynamic_slice")
def dynamic_part(pair: EquationPair) -> list[AnyRelation]:
    """`dynamic_slice`: a split dim is taken completely."""
    value, *starts = pair.operands
    sizes = pair.params["slice_sizes"]
    own_part = _own_part(pair, value, starts)
    if own_part is not None:
        return [own_part]
    if not all(start.is_equal for start in starts[: len(sizes)]):
        if value.stack and not value.partial and not value.splits and len(sizes) and sizes[value.stack[1]] == 1:
            return [value.replace(stack=None)]
        return [pair.lost("index" if any(start.is_special or start.is_index for start in starts) else "no rule")]
    if any(sizes[split.dim] != pair.shape(0)[split.dim] for split in value.splits):
        return [pair.lost("part", value)]
    if value.stack and sizes[value.stack[1]] != pair.shape(0)[value.stack[1]]:
        splits = [s for s in value.splits if set(s.axes) & set(value.stack[0])]
        if sizes[value.stack[1]] == 1 and not splits and not value.partial and not value.extreme:
            return [value.replace(stack=None)]
        return [pair.lost("index", value)]
    return [value.replace(**inherited(value, *starts))]


def _own_part(pair: EquationPair, value: Relation, starts: Sequence[Relation]) -> Relation | None:
    """Returns the rows of each replica, if it takes them out of an array that all replicas have."""
    sizes = pair.params["slice_sizes"]
    dims = [dim for dim, start in enumerate(starts[: len(sizes)]) if start.is_index]
    others = [start for start in starts if not start.is_index]
    if len(dims) != 1 or not value.is_plain or value.splits or not all(start.is_equal for start in others):
        return None
    axes, offset, distance = tuple(pair.analysis.axis_sizes), dict(starts[dims[0]].offset), float(sizes[dims[0]])
    for axis in reversed(axes):
        if offset.get(axis) != (-distance,):
            return None
        distance *= pair.analysis.axis_sizes[axis]
    if distance != pair.shape(0)[dims[0]]:
        return None
    return value.replace(splits=(Split(axes, dims[0]),))


@rule("dynamic_update_slice")
def dynamic_update(pair: EquationPair) -> list[AnyRelation]:
    value, update, *starts = pair.operands
    if not all(start.is_equal for start in starts):
        return [pair.lost("no rule")]
    for split in {*value.splits, *update.splits}:
        if pair.shape(0)[split.dim] != pair.shape(1)[split.dim]:
            return [pair.lost("part", value)]
    others = [one for one in (value, update) if not one.is_zero]
    splits = others[0].splits if others else value.splits
    values = [one.replace(splits=splits) if one.is_zero else one for one in (value, update)]
    return [pair.joined(values)]
