"""Warns of a mean over replicas of values that each replica has divided by its own count, such as its number of tokens.

The mean over the replicas of `sum(loss * mask) / sum(mask)` is the mean over the tokens of the global batch only if all
replicas have the same number of tokens. The gradient contains the same division. See
https://github.com/huggingface/transformers/pull/19494 and https://github.com/horovod/horovod/issues/2897.

An abstract interpretation of the traced function (`interpreter`) looks for exactly this:

* A *count* is one number, the sum over all examples of a replica of values that are computed from the data alone, such as a
  mask or weights. It may be multiplied by constants and bounded; a square root or a statistic per feature is not a count.
* A *ratio* is a value that is proportional to the inverse of a count: a quotient, and what linear operations make of it. The
  backward pass of a loss consists of these. A nonlinear function, and the difference between a value and a ratio, are not.
* It warns if a ratio is an operand of `jdist.all_reduce("mean", ...)`, `lax.pmean` or a policy of gradients. A product with a
  count is not a ratio, and neither is its quotient by a count: the weights of the replicas are in it.

The size of the batch is a constant, so the loss `jnp.mean(losses)` does not warn. A primitive without a rule ends the search.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.errors import LocalCountWarning
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.jaxpr.dims import NO_DIMS, Dims, result_dims, scan_with_dims
from jdist._src.jaxpr.interpreter import Function, Interpreter, ScanFunction, all_equations, fixed_point
from jdist._src.jaxpr.marks import GRADIENT_MARK, MEAN_MARK, mark_of
from jdist._src.jaxpr.primitives import REPLICATING_COLLECTIVES, primitive_names
from jdist._src.jaxpr.relations import Site
from jdist._src.jaxpr.replication import Input, warn_once


class _Kind(enum.Enum):
    CONSTANT = enum.auto()
    REPLICATED = enum.auto()  # also parameters
    DATA = enum.auto()  # varies, and is computed from the data and constants alone
    COUNT = enum.auto()
    MULTIPLE = enum.auto()  # varies, and is a product with a count
    RATIO = enum.auto()
    SUM = enum.auto()  # of ratios, over the replicas
    OTHER = enum.auto()  # varies


_CONSTANTS = frozenset({_Kind.CONSTANT})
_REPLICATED = frozenset({_Kind.CONSTANT, _Kind.REPLICATED, _Kind.SUM})
_DATA = frozenset({_Kind.CONSTANT, _Kind.DATA, _Kind.COUNT})


@dataclasses.dataclass(frozen=True)
class _Value:
    """The kind of a value, and the properties of the values of some kinds.

    Attributes:
        kind: The kind.
        dims: The dims of DATA that index examples.
        division: The equation that divided a RATIO by a count.
    """

    kind: _Kind
    dims: Dims = NO_DIMS
    division: Site | None = None


_CONSTANT, _OTHER = _Value(_Kind.CONSTANT), _Value(_Kind.OTHER)


def warn_of_local_counts(
    program: Jaxpr, inputs: Sequence[Input], num_state_leaves: int, axes: Sequence[str], num_replicas: int
) -> None:
    """Warns if values that each replica divided by its own count are averaged over the replicas.

    Args:
        program: The traced function. Each input that varies is `[1, batch, ...]`.
        inputs: For each input, its name and the axes along which it may vary.
        num_state_leaves: The number of inputs, from the first, that are leaves of the state.
        axes: The mesh axes of the replicas.
        num_replicas: The number of replicas.

    Warns:
        LocalCountWarning: The mean over the replicas is not the mean over the counted values of the global batch.
    """
    if num_replicas == 1 or not any(map(_is_division, all_equations(program))):
        return
    values = []
    for i, (one, var) in enumerate(zip(inputs, program.invars, strict=True)):
        is_data = bool(one.axes) and i >= num_state_leaves
        dims = frozenset({1}) if len(jax_compat.shape_of(var)) > 1 else NO_DIMS
        values.append(_Value(_Kind.DATA, dims) if is_data else _OTHER if one.axes else _Value(_Kind.REPLICATED))
    analysis = _CountAnalysis(frozenset(axes), num_replicas)
    analysis.run(program, [_CONSTANT] * len(program.constvars), values)
    sites = [(division, mean) for division, mean in analysis.means.values() if division]
    # The lines are read only here: most programs have many divisions, and no mean of ratios.
    division, mean = (_line(sites[0][0]), sites[0][1].line) if sites else (None, None)
    if division is None or mean is None:
        return
    warn_once(
        f"This value is divided by a count of each replica, such as the number of its tokens, and {mean} averages it over the "
        f"{num_replicas} replicas. If the counts differ, the result is not the mean over the global batch. Use "
        "`jdist.global_mean(values, weights)`, as a loss too; or divide by the count of all replicas, "
        '`jdist.all_reduce("mean", count)`.',
        LocalCountWarning,
        division,
    )


def _is_division(equation: Equation) -> bool:
    return equation.primitive.name == "div" or _is_reciprocal(equation)


def _is_reciprocal(equation: Equation) -> bool:
    return equation.primitive.name == "integer_pow" and equation.params["y"] == -1


class _CountAnalysis(Interpreter[_Value]):
    """Computes the kind of each value.

    Equations in loops are interpreted several times. The last time is at the fixed point, so it replaces the ones before.

    Attributes:
        means: By the `id` of the equation and of the calls that contain it, each mean over the replicas: the equation that
            divided its operand by a count, or None; and the equation of the mean.
    """

    def __init__(self, axes: frozenset[str], num_replicas: int):
        self._axes, self._num_replicas = axes, num_replicas
        self.means: dict[tuple[int, ...], tuple[Site | None, Site]] = {}

    def constant(self, value: Any) -> _Value:
        return _CONSTANT

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[_Value]) -> list[_Value]:
        name, contents = equation.primitive.name, jax_compat.contents(equation)
        if mark_of(equation) in (MEAN_MARK, GRADIENT_MARK):
            self._record_mean(equation, operands[0], _Kind.RATIO)
        if self._axes & contents.names:
            if name in REPLICATING_COLLECTIVES and not jax_compat.has_axis_index_groups(equation):
                return [self._reduced(name, value, contents.names >= self._axes) for value in operands]
            return [_OTHER] * len(equation.outvars)
        if contents.jaxprs or contents.opaque or any(map(jax_compat.may_vary_between_replicas, equation.effects)):
            return [_OTHER] * len(equation.outvars)
        if name == "optimization_barrier":
            return list(operands)
        self._look_for_mean(equation, operands)
        result = self._proportional(equation, operands)
        if result:
            return [result] * len(equation.outvars)
        result = _combined(operands)
        return [
            self._of_data(equation, operands, var) if result.kind is _Kind.DATA else result for var in equation.outvars
        ]

    def switch(
        self, equation: Equation, index: _Value, branches: Sequence[Function[_Value]], operands: Sequence[_Value]
    ) -> list[_Value]:
        results = [branch(operands) for branch in branches]
        return [_below(index, _join(*alternatives)) for alternatives in zip(*results, strict=True)]

    def while_loop(
        self,
        equation: Equation,
        test: Callable[[Sequence[_Value]], _Value],
        body: Function[_Value],
        carry: Sequence[_Value],
    ) -> list[_Value]:
        def step(carry: Sequence[_Value]) -> list[_Value]:
            predicate = test(carry)
            return [_below(predicate, value) for value in body(carry)]

        return fixed_point(step, carry, _join)

    def scan(
        self, equation: Equation, body: ScanFunction[_Value], carry: Sequence[_Value], xs: Sequence[_Value]
    ) -> list[_Value]:
        return scan_with_dims(body, carry, xs, _join)

    def _record_mean(self, equation: Equation, operand: _Value, kind: _Kind) -> None:
        division = operand.division if operand.kind is kind else None
        key = (id(equation), *map(id, self.calls))
        self.means[key] = division, Site(equation, tuple(self.calls))

    def _look_for_mean(self, equation: Equation, operands: Sequence[_Value]) -> None:
        """Records a sum of ratios that is divided by the number of replicas, as `lax.pmean` does."""
        name = equation.primitive.name
        if (
            name not in ("div", "mul")
            or operands[0].kind is not _Kind.SUM
            or not isinstance(equation.invars[1], Literal)
        ):
            return
        factor = self._num_replicas if name == "div" else 1 / self._num_replicas
        if np.all(np.isclose(np.asarray(equation.invars[1].val, np.float64), factor)):
            self._record_mean(equation, operands[0], _Kind.SUM)

    def _reduced(self, name: str, value: _Value, over_all_axes: bool) -> _Value:
        """Returns the result of a collective with the same result on every replica of its axes."""
        if value.kind in _REPLICATED or value.kind is _Kind.RATIO and not over_all_axes:
            return value
        if not over_all_axes:
            return _OTHER
        is_sum = value.kind is _Kind.RATIO and name == "psum"
        return _Value(_Kind.SUM, division=value.division) if is_sum else _Value(_Kind.REPLICATED)

    def _of_data(self, equation: Equation, operands: Sequence[_Value], result: Any) -> _Value:
        dims = NO_DIMS.union(*(result_dims(equation, i, value.dims, result) for i, value in enumerate(operands)))
        is_total = equation.primitive.name == "reduce_sum" and operands[0].dims and not dims
        is_number = all(size == 1 for size in jax_compat.shape_of(result))
        return _Value(_Kind.COUNT) if is_total and is_number else _Value(_Kind.DATA, dims)

    def _proportional(self, equation: Equation, operands: list[_Value]) -> _Value | None:
        """Returns the result if it is a count, a ratio, or a sum of ratios over the replicas; None otherwise."""
        name = equation.primitive.name
        first = operands[0] if operands else _CONSTANT
        if name in _KEEPS_FIRST:
            return first if first.kind in (_Kind.COUNT, _Kind.MULTIPLE, _Kind.RATIO, _Kind.SUM) else None
        if _is_reciprocal(equation) and first.kind is _Kind.COUNT:
            return self._ratio(equation)
        if name == "div":
            return self._quotient(equation, first, operands[1])
        if name in _BILINEAR:
            return _product(first, operands[1])
        values = operands[1:] if name == "select_n" else operands[:2] if name in _UPDATES else operands
        kinds = {value.kind for value in values}
        if name in _BOUNDS and _Kind.COUNT in kinds and kinds <= {_Kind.COUNT, _Kind.CONSTANT}:
            return _Value(_Kind.COUNT)
        if _Kind.RATIO in kinds and (name in _SUMS or name in _UPDATES or name in ("select_n", "concatenate")):
            is_number = name in _SUMS and all(size == 1 for size in jax_compat.shape_of(equation.outvars[0]))
            if kinds <= _REPLICATED | {_Kind.RATIO} or is_number and _Kind.COUNT not in kinds:  # a loss plus another
                return next(value for value in values if value.kind is _Kind.RATIO)
        return None

    def _quotient(self, equation: Equation, numerator: _Value, divisor: _Value) -> _Value | None:
        if divisor.kind is _Kind.COUNT:
            is_reduced = numerator.kind in (_Kind.COUNT, _Kind.MULTIPLE, _Kind.RATIO)
            return None if is_reduced else self._ratio(equation)
        is_proportional = numerator.kind in (_Kind.RATIO, _Kind.SUM) and divisor.kind is not _Kind.RATIO
        if is_proportional or numerator.kind is _Kind.COUNT and divisor.kind in _REPLICATED:
            return numerator
        return None

    def _ratio(self, equation: Equation) -> _Value:
        return _Value(_Kind.RATIO, division=Site(equation, tuple(self.calls)))


def _line(division: Site) -> source_lines.Frame | None:
    """Returns the user's line of a division; if only libraries traced it, the line of the current call."""
    place = division.line
    return place if place and source_lines.is_user_frame(place) else source_lines.caller_frame() or place


def _product(first: _Value, second: _Value) -> _Value | None:
    for value, factor in ((first, second), (second, first)):
        if value.kind is _Kind.RATIO and factor.kind not in (_Kind.RATIO, _Kind.COUNT):
            return value
        if value.kind in (_Kind.COUNT, _Kind.SUM) and factor.kind in (_Kind.CONSTANT, _Kind.REPLICATED):
            return value
        if value.kind is _Kind.COUNT and factor.kind in (_Kind.DATA, _Kind.OTHER, _Kind.MULTIPLE):
            return _Value(_Kind.MULTIPLE)
    return None


def _combined(operands: Sequence[_Value]) -> _Value:
    """Returns the result of an operation that is not linear, or that has no rule. The dims of DATA are missing."""
    kinds = {value.kind for value in operands}
    if kinds <= _CONSTANTS:
        return _CONSTANT
    if kinds <= _REPLICATED:
        return _Value(_Kind.REPLICATED)
    return _Value(_Kind.DATA) if kinds <= _DATA else _OTHER


def _join(*values: _Value) -> _Value:
    """Returns a value that is one of `values`."""
    kinds = {value.kind for value in values}
    ratio = next((value for value in values if value.kind is _Kind.RATIO), None)
    if ratio and kinds <= _REPLICATED | {_Kind.RATIO}:
        return ratio
    if len(kinds) == 1 and _Kind.DATA not in kinds:
        return values[0]
    if _Kind.COUNT in kinds and kinds <= {_Kind.CONSTANT, _Kind.COUNT}:
        return _Value(_Kind.COUNT)
    result = _combined(values)
    return (
        dataclasses.replace(result, dims=NO_DIMS.union(*(value.dims for value in values))) if kinds <= _DATA else result
    )


def _below(predicate: _Value, value: _Value) -> _Value:
    """Returns a value that was computed in a branch or a loop that depends on `predicate`."""
    if predicate.kind in _CONSTANTS or value.kind in (_Kind.DATA, _Kind.COUNT, _Kind.RATIO):
        return value
    return _combined([predicate, value])


# The result is proportional to the first operand.
_KEEPS_FIRST = primitive_names(
    """
    broadcast_in_dim convert_element_type copy copy_p cumsum dynamic_slice expand_dims gather name neg reduce_precision
    reduce_sum reduce_window_sum reshape rev slice split squeeze stop_gradient transpose unstack
    """
)
_BILINEAR = primitive_names("mul dot_general conv_general_dilated")
_SUMS = primitive_names("add sub add_any")
_BOUNDS = _SUMS | primitive_names("max min clamp select_n")  # of counts and constants
_UPDATES = primitive_names("pad dynamic_update_slice")  # the first two operands are values
