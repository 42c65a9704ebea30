"""Evaluates jaxprs with numpy in float64: without compilation, so a small program takes milliseconds.

All floating-point values are float64, also those that the jaxpr computes in float32. The integer types of the jaxpr stay.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.jaxpr.interpreter import Interpreter


class TooLargeError(Exception):
    """The evaluation of a jaxpr takes more operations than allowed."""


def evaluate(program: Any, arguments: Sequence[Any], max_operations: float = math.inf) -> list[np.ndarray]:
    """Returns the outputs of a closed jaxpr without collectives.

    Args:
        program: The closed jaxpr. Collectives are those of `jax.vmap`, over dims.
        arguments: The values of its inputs.
        max_operations: The largest number of operations, in units of one element of an array.

    Raises:
        TooLargeError: It takes more operations.
    """
    with np.errstate(all="ignore"), jax.ensure_compile_time_eval():
        return _Numpy(max_operations).run(
            jax_compat.open_jaxpr(program), list(map(_wide, program.consts)), list(map(_wide, arguments))
        )


def _wide(value: Any) -> Any:
    """Returns `value` as a numpy array, in float64 if it is a floating-point number. Random keys stay JAX arrays."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    value = np.asarray(value)
    return value.astype(np.float64) if jnp.issubdtype(value.dtype, np.floating) else value


def _dtype(dtype: Any) -> np.dtype:
    return np.dtype(np.float64) if jnp.issubdtype(dtype, np.floating) else np.dtype(dtype)


class _Numpy(Interpreter[Any]):
    """Runs control flow as Python loops and branches."""

    def __init__(self, max_operations: float):
        self._remaining = max_operations

    def constant(self, value: Any) -> Any:
        return _wide(value)

    def primitive(self, jaxpr: Any, equation: Any, operands: list[Any]) -> list[Any]:
        name = equation.primitive.name
        self._count(equation)
        if any(isinstance(value, jax.Array) for value in operands):  # random keys
            return self._with_jax(jaxpr, equation, operands)
        if name in _ELEMENTWISE:
            return [np.asarray(_ELEMENTWISE[name](*operands))]
        if name not in _RULES:
            return self._with_jax(jaxpr, equation, operands)
        results = _RULES[name](*operands, **equation.params)
        return list(results) if isinstance(results, list | tuple) else [np.asarray(results)]

    def _count(self, equation: Any) -> None:
        name = equation.primitive.name
        sizes = [math.prod(getattr(atom.aval, "shape", ())) for atom in (*equation.invars, *equation.outvars)]
        cost = 300.0 + 10_000 * (name not in _ELEMENTWISE and name not in _RULES)  # of the call itself
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            cost += sizes[-1] * math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
        elif name == "gather" or name.startswith("scatter"):
            cost += 1000 * math.prod(equation.invars[1].aval.shape[:-1])
        else:
            cost += sum(sizes)
        self._remaining -= cost
        if self._remaining < 0:
            raise TooLargeError

    def _with_jax(self, jaxpr: Any, equation: Any, operands: list[Any]) -> list[Any]:
        dtypes = [getattr(atom.aval, "dtype", None) for atom in equation.invars]
        arrays = [
            value if isinstance(value, jax.Array) else jnp.asarray(value, dtype)
            for value, dtype in zip(operands, dtypes, strict=True)
        ]
        return list(map(_wide, jax_compat.evaluate_equation(jaxpr, equation, arrays)))

    def switch(self, equation: Any, index: Any, branches: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        return branches[min(max(int(index), 0), len(branches) - 1)](operands)

    def while_loop(self, equation: Any, test: Any, body: Any, carry: Sequence[Any]) -> list[Any]:
        carry = list(carry)
        while (more := np.asarray(test(carry))).any():  # `jax.vmap` makes a predicate per replica
            new = body(carry)
            carry = [
                np.where(more.reshape(more.shape + (1,) * (a.ndim - more.ndim)), a, b)
                for a, b in zip(new, carry, strict=True)
            ]
        return carry

    def scan(self, equation: Any, body: Any, carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        options = jax_compat.scan_parts(equation).options
        order = range(options["length"])
        order = order[::-1] if options["reverse"] else order
        rows, carry = [], list(carry)
        for i in order:
            carry, ys = body(carry, [x[i] for x in xs])
            rows.append(ys)
        rows = rows[::-1] if options["reverse"] else rows
        return [*carry, *(np.stack(column) for column in zip(*rows, strict=True))]


def _div(a, b):
    if a.dtype.kind == "f":
        return a / b
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _div,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "sign": np.sign,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "square": np.square,
    "pow": np.power,
    "floor": np.floor,
    "ceil": np.ceil,
    "is_finite": np.isfinite,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "rem": np.fmod,
    "atan2": np.arctan2,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "logistic": lambda a: 1 / (1 + np.exp(-a)),
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "one_minus_square": lambda a: 1 - a * a,
    "clamp": lambda low, a, high: np.clip(a, low, high),
    "stop_gradient": np.asarray,
    "copy": np.asarray,
    "copy_p": np.asarray,
}


def _select(which, *cases):
    if which.dtype == np.bool_:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _broadcast(a, *sizes, shape, broadcast_dimensions, **_):
    dims = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, a.shape, strict=True):
        dims[axis] = size
    return np.broadcast_to(a.reshape(dims), shape)


def _dot_general(a, b, dimension_numbers, **_):
    (a_contract, b_contract), (a_batch, b_batch) = dimension_numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    names_a = [next(letters) for _ in a.shape]
    names_b = [next(letters) for _ in b.shape]
    for i, j in [*zip(a_contract, b_contract, strict=True), *zip(a_batch, b_batch, strict=True)]:
        names_b[j] = names_a[i]
    free_a = [name for i, name in enumerate(names_a) if i not in a_contract and i not in a_batch]
    free_b = [name for i, name in enumerate(names_b) if i not in b_contract and i not in b_batch]
    result = [names_a[i] for i in a_batch] + free_a + free_b
    return np.einsum(f"{''.join(names_a)},{''.join(names_b)}->{''.join(result)}", a, b)


def _pad(a, value, padding_config):
    shape = [
        size + max(size - 1, 0) * inner + low + high
        for size, (low, high, inner) in zip(a.shape, padding_config, strict=True)
    ]
    low = [max(one[0], 0) for one in padding_config]
    large = np.full(
        [size + max(-one[0], 0) + max(-one[1], 0) for size, one in zip(shape, padding_config, strict=True)],
        value,
        a.dtype,
    )
    spans = [
        slice(start, start + size + max(size - 1, 0) * one[2], one[2] + 1)
        for start, size, one in zip(low, a.shape, padding_config, strict=True)
    ]
    large[tuple(spans)] = a
    return large[
        tuple(slice(max(-one[0], 0), max(-one[0], 0) + size) for one, size in zip(padding_config, shape, strict=True))
    ]


def _slice(a, start_indices, limit_indices, strides):
    return a[tuple(map(slice, start_indices, limit_indices, strides or [1] * a.ndim))]


def _starts(a, starts, sizes):
    return [min(max(int(start), 0), size - part) for start, size, part in zip(starts, a.shape, sizes, strict=True)]


def _dynamic_slice(a, *starts, slice_sizes):
    begin = _starts(a, starts, slice_sizes)
    return a[tuple(slice(i, i + size) for i, size in zip(begin, slice_sizes, strict=True))]


def _dynamic_update_slice(a, update, *starts):
    begin = _starts(a, starts, update.shape)
    a = a.copy()
    a[tuple(slice(i, i + size) for i, size in zip(begin, update.shape, strict=True))] = update
    return a


def _cumulative(ufunc):
    def apply(a, axis, reverse):
        a = np.flip(a, axis) if reverse else a
        result = ufunc.accumulate(a, axis, dtype=a.dtype)
        return np.flip(result, axis) if reverse else result

    return apply


def _sort(*operands, dimension, num_keys, **_):
    order = np.lexsort([np.moveaxis(key, dimension, -1) for key in operands[:num_keys][::-1]], axis=-1)
    order = np.moveaxis(order, -1, dimension)
    return [np.take_along_axis(one, order, dimension) for one in operands]


def _top_k(a, k, axis=-1, **_):
    order = np.take(np.argsort(-a, axis, kind="stable"), np.arange(k), axis)
    return np.take_along_axis(a, order, axis), order.astype(np.int32)


def _gather(a, indices, dimension_numbers, slice_sizes, mode, fill_value, **_):
    numbers = dimension_numbers
    batch = indices.shape[:-1]
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [size for axis, size in enumerate(slice_sizes) if axis not in removed]
    fill = np.nan if fill_value is None and a.dtype.kind == "f" else 0 if fill_value is None else fill_value
    result = np.full((*batch, *window), fill, a.dtype)
    for position in np.ndindex(batch):
        start, is_inside = _window(a.shape, slice_sizes, indices[position], position, numbers.start_index_map,
                                   numbers.operand_batching_dims, numbers.start_indices_batching_dims, mode)  # fmt: skip
        if is_inside:
            result[position] = a[tuple(slice(i, i + n) for i, n in zip(start, slice_sizes, strict=True))].reshape(
                window
            )
    others = [axis for axis in range(result.ndim) if axis not in numbers.offset_dims]
    return np.moveaxis(result, range(result.ndim), [*others, *numbers.offset_dims])


def _window(shape, sizes, index, position, index_map, operand_batching, indices_batching, mode):
    """Returns the start of a slice of an operand, and whether the slice is inside the operand and used."""
    start = [0] * len(shape)
    for axis, i in zip(index_map, index, strict=True):
        start[axis] = int(i)
    for axis, other in zip(operand_batching, indices_batching, strict=True):
        start[axis] = position[other]
    clipped = [min(max(i, 0), size - part) for i, size, part in zip(start, shape, sizes, strict=True)]
    return clipped, clipped == start or mode != lax.GatherScatterMode.FILL_OR_DROP


def _scatter(combine):
    def apply(a, indices, updates, dimension_numbers, mode, **_):
        numbers, result = dimension_numbers, a.copy()
        removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        others = [axis for axis in range(updates.ndim) if axis not in numbers.update_window_dims]
        moved = np.moveaxis(updates, [*others, *numbers.update_window_dims], range(updates.ndim))
        sizes = iter(moved.shape[len(others) :])
        sizes = [1 if axis in removed else next(sizes) for axis in range(a.ndim)]
        for position in np.ndindex(indices.shape[:-1]):
            start, is_inside = _window(a.shape, sizes, indices[position], position, numbers.scatter_dims_to_operand_dims,
                                       numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, mode)  # fmt: skip
            if is_inside:
                span = tuple(slice(i, i + n) for i, n in zip(start, sizes, strict=True))
                result[span] = combine(result[span], moved[position].reshape(sizes))
        return result

    return apply


def _sum(a, axis):
    return np.sum(a, axis, dtype=a.dtype)


def _reduce(function):
    return lambda a, axes, **_: function(a, axis=tuple(map(int, axes)))


def _collective(function):
    """Returns the rule of a collective, whose mesh axes `jax.vmap` has replaced by dimensions of the operands."""
    return lambda *operands, axes, **_: [function(one, axis=tuple(axes)) for one in operands]


def _split(a, sizes, axis):
    return np.split(a, np.cumsum(sizes)[:-1], axis)


def _round(a, rounding_method):
    return np.round(a) if int(rounding_method) == 1 else np.trunc(a + np.copysign(0.5, a))


_RULES: dict[str, Callable[..., Any]] = {
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda a, new_sizes, **_: a.reshape(new_sizes),
    "squeeze": lambda a, dimensions: np.squeeze(a, tuple(dimensions)),
    "expand_dims": lambda a, dimensions: np.expand_dims(a, tuple(dimensions)),
    "transpose": lambda a, permutation: np.transpose(a, permutation),
    "convert_element_type": lambda a, new_dtype, **_: a.astype(_dtype(new_dtype)),
    "reduce_precision": lambda a, **_: a,
    "optimization_barrier": lambda *operands: operands,
    "integer_pow": lambda a, y: a**y if y >= 0 else 1 / a**-y,
    "iota": lambda dtype, shape, dimension, **_: np.broadcast_to(
        np.arange(shape[dimension], dtype=_dtype(dtype)).reshape(
            [-1 if i == dimension else 1 for i in range(len(shape))]
        ),
        shape,
    ),
    "concatenate": lambda *operands, dimension: np.concatenate(operands, dimension),
    "stack": lambda *operands, axis: np.stack(operands, axis),
    "unstack": lambda a, axis: list(np.moveaxis(a, axis, 0)),
    "split": _split,
    "rev": lambda a, dimensions: np.flip(a, tuple(dimensions)),
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot_general,
    "reduce_sum": _reduce(_sum),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "psum": _collective(_sum),
    "pmax": _collective(np.max),
    "pmin": _collective(np.min),
    "reduce_prod": _reduce(np.prod),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "argmax": lambda a, axes, index_dtype: np.argmax(a, axes[0]).astype(index_dtype),
    "argmin": lambda a, axes, index_dtype: np.argmin(a, axes[0]).astype(index_dtype),
    "cumsum": _cumulative(np.add),
    "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
    "cumprod": _cumulative(np.multiply),
    "sort": _sort,
    "top_k": _top_k,
    "round": _round,
    "gather": _gather,
    "scatter": _scatter(lambda old, new: new),
    "scatter-add": _scatter(np.add),
    "scatter-mul": _scatter(np.multiply),
    "scatter-max": _scatter(np.maximum),
    "scatter-min": _scatter(np.minimum),
}
_RULES |= {name.replace("-", "_"): rule for name, rule in _RULES.items()}
