"""Follows dims of values through the equations of a jaxpr: which dims of a result come from given dims of an operand."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation
from jdist._src.jaxpr.interpreter import ScanFunction, scan_to_fixed_point

Dims: TypeAlias = frozenset[int]
NO_DIMS: Dims = frozenset()


def result_dims(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    """Returns the dims of `result` that come from `dims` of operand `i`.

    A primitive without a rule keeps the dims whose size and position do not change.
    """
    return _RULES.get(equation.primitive.name, same_dims)(equation, i, dims, result) if dims else NO_DIMS


def scan_with_dims(
    body: ScanFunction[Any], carry: Sequence[Any], xs: Sequence[Any], join: Callable[[Any, Any], Any]
) -> list[Any]:
    """Returns the results of a `scan` in a domain of dataclasses with a field `dims`; see `Interpreter.scan`."""
    slices = [dataclasses.replace(x, dims=_shifted(x.dims, -1)) for x in xs]
    last, ys = scan_to_fixed_point(body, carry, slices, join)
    return [*last, *(dataclasses.replace(y, dims=_shifted(y.dims, 1)) for y in ys)]


def _shifted(dims: Dims, by: int) -> Dims:
    """Returns `dims` of a value with `by` more dims in front; with a negative `by`, fewer."""
    return frozenset(dim + by for dim in dims if dim + by >= 0)


def same_dims(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    """Returns the dims of operand `i` that `result` has in the same position."""
    old, new = jax_compat.shape_of(equation.invars[i]), jax_compat.shape_of(result)
    if len(old) != len(new) or any(size not in (1, new_size) for size, new_size in zip(old, new, strict=True)):
        return NO_DIMS
    return frozenset(dim for dim in dims if old[dim] == new[dim])


def _same_rank(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    same = len(jax_compat.shape_of(equation.invars[i])) == len(jax_compat.shape_of(result))
    return dims if same else NO_DIMS


def _first_operand(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    return dims if i == 0 else NO_DIMS


def _broadcast(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    if i:  # a dynamic shape
        return NO_DIMS
    sizes, targets = jax_compat.shape_of(equation.invars[0]), equation.params["broadcast_dimensions"]
    new_sizes = jax_compat.shape_of(result)
    return frozenset(targets[dim] for dim in dims if sizes[dim] == new_sizes[targets[dim]])


def _transpose(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    permutation = equation.params["permutation"]
    return frozenset(new for new, old in enumerate(permutation) if old in dims)


def _without(removed: Iterable[int], dims: Dims) -> Dims:
    removed = set(removed)
    return frozenset(dim - sum(other < dim for other in removed) for dim in dims if dim not in removed)


def _squeeze(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    return _without(equation.params["dimensions"], dims)


def _stack(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    return frozenset(dim + (dim >= equation.params["axis"]) for dim in dims)


def _unstack(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    return _without((equation.params["axis"],), dims)


def _reduce(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    return _without(equation.params["axes"], dims)


def _reshape(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    groups = _reshape_groups(jax_compat.shape_of(equation.invars[0]), jax_compat.shape_of(result))
    return frozenset(itertools.chain.from_iterable(new for old, new in groups if dims & set(old)))


def _reshape_groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the smallest groups of old and new dims with the same number of elements, in order."""
    if 0 in old:
        return
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (size := math.prod(old[first:i])) != (new_size := math.prod(new[second:j])):
            i, j = (i + 1, j) if size < new_size else (i, j + 1)
        yield list(range(first, i)), list(range(second, j))


def _dot_general(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    new_dims = dot_general_dims(equation)[i]
    return frozenset(new_dims[dim] for dim in dims if dim in new_dims)


def dot_general_dims(equation: Equation) -> list[dict[int, int]]:
    """Returns for each operand of a `dot_general`, and each of its dims that is not contracted, the dim of the result."""
    contracting, batch = equation.params["dimension_numbers"]
    ranks = [len(jax_compat.shape_of(atom)) for atom in equation.invars]
    free = [[d for d in range(ranks[k]) if d not in contracting[k] and d not in batch[k]] for k in (0, 1)]
    starts = len(batch[0]), len(batch[0]) + len(free[0])
    return [
        {dim: n for n, dim in enumerate(batch[k])} | {dim: starts[k] + n for n, dim in enumerate(free[k])}
        for k in (0, 1)
    ]


def _convolution(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    numbers = equation.params["dimension_numbers"]
    if i:  # the kernel: output features
        return frozenset({numbers.out_spec[1]}) if numbers.rhs_spec[0] in dims else NO_DIMS
    pairs = zip(numbers.lhs_spec, numbers.out_spec, strict=True)
    return frozenset(new for n, (old, new) in enumerate(pairs) if n != 1 and old in dims)  # not the features


def _gather(equation: Equation, i: int, dims: Dims, result: Any) -> Dims:
    window_dims, index_dims = gather_dims(equation)
    if i == 1:
        return frozenset(index_dims[dim] for dim in dims if dim < len(index_dims))
    numbers = equation.params["dimension_numbers"]
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    new_dims = window_dims | {old: index_dims[index] for old, index in batching}
    return frozenset(new_dims[dim] for dim in dims if dim in new_dims)


def gather_dims(equation: Equation) -> tuple[dict[int, int], list[int]]:
    """Returns the dims of the result of a `gather` by the dims of the operand in a slice, and for each dim of the indices."""
    numbers = equation.params["dimension_numbers"]
    offsets = list(map(int, numbers.offset_dims))
    rank, result_rank = (len(jax_compat.shape_of(atom)) for atom in (equation.invars[0], equation.outvars[0]))
    removed = {*numbers.operand_batching_dims, *numbers.collapsed_slice_dims}
    window_dims = dict(zip([d for d in range(rank) if d not in removed], offsets, strict=True))
    return window_dims, [d for d in range(result_rank) if d not in offsets]


def _same_rule(names: str, rule: Callable[..., Dims]) -> dict[str, Callable[..., Dims]]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Callable[[Equation, int, Dims, Any], Dims]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "stack": _stack,
    "unstack": _unstack,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    **_same_rule("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin", _reduce),
    **_same_rule("slice dynamic_slice dynamic_update_slice pad concatenate split", _same_rank),
    **_same_rule("reduce_window reduce_window_sum reduce_window_max reduce_window_min", _same_rank),
    **_same_rule("select_and_gather_add select_and_scatter_add select_and_scatter", _same_rank),
    **_same_rule("scatter scatter-add scatter_add scatter_mul scatter_min scatter_max", _first_operand),
}
