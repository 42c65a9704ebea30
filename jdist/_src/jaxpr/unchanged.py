"""Which outputs of a jaxpr are inputs of it, returned unchanged."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.jaxpr.interpreter import Function, Interpreter, ScanFunction, fixed_point, scan_to_fixed_point
from jdist._src.jaxpr.primitives import IDENTITIES


class _Stacked(NamedTuple):
    """An array `[iteration, ...]` of copies of one value."""

    value: Any


def unchanged_outputs(jaxpr: Jaxpr) -> list[int | None]:
    """Returns for each output of `jaxpr` the number of the input that it equals, or that it stacks copies of; else None.

    Inputs are followed through calls, branches and loops, to which a function of a library may pass the variables of a model. A
    loop over micro-batches returns one copy per micro-batch.
    """
    analysis = _Unchanged()
    sources = analysis.run(jaxpr, [None] * len(jaxpr.constvars), list(range(len(jaxpr.invars))))
    values = [source.value if isinstance(source, _Stacked) else source for source in sources]
    return [value if isinstance(value, int) else None for value in values]


class _Unchanged(Interpreter[Any]):
    """The value of the domain is the source of a value: the number of an input, copies or a slice of a source, or None."""

    def constant(self, value: Any) -> Any:
        return None

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        return operands if equation.primitive.name in IDENTITIES else [None] * len(equation.outvars)

    def call(self, equation: Equation, body: Function[Any], operands: list[Any]) -> list[Any]:
        if equation.primitive.name == "shard_map":  # its results may be other parts of an array than its operands
            return [None] * len(equation.outvars)
        return body(operands)

    def switch(
        self, equation: Equation, index: Any, branches: Sequence[Function[Any]], operands: Sequence[Any]
    ) -> list[Any]:
        results = [branch(operands) for branch in branches]
        return [one if all(one == other for other in others) else None for one, *others in zip(*results, strict=True)]

    def while_loop(
        self, equation: Equation, test: Callable[[Sequence[Any]], Any], body: Function[Any], carry: Sequence[Any]
    ) -> list[Any]:
        return fixed_point(body, carry, _join)

    def scan(self, equation: Equation, body: ScanFunction[Any], carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        slices = [object() for _ in xs]  # of this loop: a slice of an outer loop is one value in all iterations
        arrays = dict(zip(slices, xs, strict=True))
        last, ys = scan_to_fixed_point(body, carry, slices, _join)
        return last + [arrays[y] if y in arrays else None if y is None else _Stacked(y) for y in ys]


def _join(source: Any, other: Any) -> Any:
    return source if source == other else None
