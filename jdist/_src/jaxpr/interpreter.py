"""Interprets jaxprs: the rules of calls, `cond`, `while` and `scan`, once for every analysis and rewrite.

An `Interpreter` runs a jaxpr equation by equation over the values of a domain. It unpacks the control-flow equations and
passes their jaxprs as functions, in the form of `jax.lax`: a subclass defines `switch`, `while_loop` and `scan` for its
domain, and `primitive` for all other equations. There are three kinds of domains:

* Facts about values, such as the causes of variation between replicas (`replication`) or the relation of two programs
  (`equivalence`): a loop is followed to a fixed point, a branch joins all branches.
* Arrays, while the jaxpr is traced anew (`Evaluator`): collectives over a size-one axis are removed (`single_replica`), calls
  are inlined (`update_partition`), equations run once per virtual replica (`virtual_replicas`).
* Numbers: the jaxpr is evaluated (`numpy_evaluation`).

`nested_equations`, `all_equations`, `contains_outside_loops` and `uses_axes` search a jaxpr without values.
"""

import abc
import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Contents, Equation, Jaxpr, Literal
from jdist._src.jaxpr.primitives import CALLS

V = TypeVar("V")
Function: TypeAlias = Callable[[Sequence[V]], list[V]]
ScanFunction: TypeAlias = Callable[[Sequence[V], Sequence[V]], tuple[list[V], list[V]]]


class Interpreter(abc.ABC, Generic[V]):
    """Runs jaxprs over the values of a domain."""

    @functools.cached_property  # subclasses have constructors that do not call one of this class
    def calls(self) -> list[Equation]:
        """The calls that contain the current equation, from the outermost."""
        return []

    @contextlib.contextmanager
    def inside(self, equation: Equation) -> Iterator[None]:
        """Adds an equation to `calls` while its jaxpr is run."""
        self.calls.append(equation)
        try:
            yield
        finally:
            self.calls.pop()

    def run(self, jaxpr: Jaxpr, consts: Sequence[V], arguments: Sequence[V]) -> list[V]:
        """Returns the values of the outputs of `jaxpr`."""
        values: dict[Any, V] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def read(atom: Any) -> V:
            return self.constant(atom.val) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = self.evaluate(jaxpr, equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def evaluate(self, jaxpr: Jaxpr, equation: Equation, operands: list[V]) -> list[V]:
        """Returns the results of an equation of `jaxpr`."""
        rule = _CONTROL_FLOW.get(equation.primitive.name)
        results = rule(self, equation, operands) if rule is not None and self.enters(equation) else None
        return self.primitive(jaxpr, equation, operands) if results is None else results

    def enters(self, equation: Equation) -> bool:
        """Whether to unpack a call or control-flow equation; otherwise `primitive` evaluates it."""
        return True

    @abc.abstractmethod
    def constant(self, value: Any) -> V:
        """Returns the domain's value of a literal, or of a constant of a closed jaxpr."""

    @abc.abstractmethod
    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[V]) -> list[V]:
        """Returns the results of an equation of `jaxpr` without control flow, or that `enters` excludes."""

    def call(self, equation: Equation, body: Function[V], operands: list[V]) -> list[V]:
        """Returns the results of an equation that runs `body` once."""
        with self.inside(equation):
            return body(operands)

    @abc.abstractmethod
    def switch(self, equation: Equation, index: V, branches: Sequence[Function[V]], operands: Sequence[V]) -> list[V]:
        """Returns the results of a `cond` equation, which runs one of `branches`."""

    @abc.abstractmethod
    def while_loop(
        self, equation: Equation, test: Callable[[Sequence[V]], V], body: Function[V], carry: Sequence[V]
    ) -> list[V]:
        """Returns the results of a `while` equation; `test` and `body` are functions of the carry."""

    @abc.abstractmethod
    def scan(self, equation: Equation, body: ScanFunction[V], carry: Sequence[V], xs: Sequence[V]) -> list[V]:
        """Returns the results of a `scan` equation; `body` maps a carry and slices of `xs` to a new carry and slices."""

    def _function(self, program: Any) -> Function[V]:
        consts = [self.constant(value) for value in getattr(program, "consts", ())]
        return lambda arguments: self.run(jax_compat.open_jaxpr(program), consts, arguments)

    def _call(self, equation: Equation, operands: list[V]) -> list[V] | None:
        call = jax_compat.called_jaxpr(equation)
        return call and self.call(equation, self._function(call.program), call.operands(operands))

    def _cond(self, equation: Equation, operands: list[V]) -> list[V]:
        index, *others = operands
        return self.switch(equation, index, list(map(self._function, jax_compat.cond_branches(equation))), others)

    def _while(self, equation: Equation, operands: list[V]) -> list[V]:
        test_program, body_program, num_test_consts, num_body_consts = jax_compat.while_parts(equation)
        test, body = self._function(test_program), self._function(body_program)
        test_consts, operands = operands[:num_test_consts], operands[num_test_consts:]
        body_consts, carry = operands[:num_body_consts], operands[num_body_consts:]
        return self.while_loop(
            equation,
            lambda carry: test([*test_consts, *carry])[0],
            lambda carry: body([*body_consts, *carry]),
            carry,
        )

    def _scan(self, equation: Equation, operands: list[V]) -> list[V]:
        parts = jax_compat.scan_parts(equation)
        function = self._function(parts.body)
        consts, operands = operands[: parts.num_consts], operands[parts.num_consts :]

        def body(carry: Sequence[V], slices: Sequence[V]) -> tuple[list[V], list[V]]:
            results = function([*consts, *carry, *slices])
            return results[: parts.num_carry], results[parts.num_carry :]

        return self.scan(equation, body, operands[: parts.num_carry], operands[parts.num_carry :])


_CONTROL_FLOW: dict[str, Callable[[Any, Equation, list[Any]], list[Any] | None]] = {
    **dict.fromkeys(CALLS, Interpreter._call),
    "cond": Interpreter._cond,
    "while": Interpreter._while,
    "scan": Interpreter._scan,
}


def fixed_point(
    body: Function[V],
    carry: Sequence[V],
    join: Callable[[V, V], V],
    are_equal: Callable[[V, V], bool] = operator.eq,
) -> list[V]:
    """Returns the join of a loop's carry over any number of iterations; `join` may only grow, finitely often."""
    while True:
        joined = [join(old, new) for old, new in zip(carry, body(carry), strict=True)]
        if all(are_equal(old, new) for old, new in zip(carry, joined, strict=True)):
            return joined
        carry = joined


def scan_to_fixed_point(
    body: ScanFunction[V],
    carry: Sequence[V],
    slices: Sequence[V],
    join: Callable[[V, V], V],
    are_equal: Callable[[V, V], bool] = operator.eq,
) -> tuple[list[V], list[V]]:
    """Returns the `fixed_point` of the carry of a scan, and the values of the results of an iteration there."""
    ys: list[V] = []

    def step(carry: Sequence[V]) -> list[V]:
        new_carry, ys[:] = body(carry, slices)
        return new_carry

    return fixed_point(step, carry, join, are_equal), ys


class Evaluator(Interpreter[Any]):
    """Evaluates jaxprs on arrays or tracers. Subclasses replace equations."""

    def constant(self, value: Any) -> Any:
        """See `Interpreter.constant`."""
        return value

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        """See `Interpreter.primitive`."""
        return jax_compat.evaluate_equation(jaxpr, equation, operands)

    def call(self, equation: Equation, body: Function[Any], operands: list[Any]) -> list[Any]:
        """See `Interpreter.call`. Inlines the call, except a `remat2`: it has to stay one call to be computed again."""
        if equation.primitive.name != "remat2":
            return body(operands)
        traced = jax.make_jaxpr(lambda *operands: body(operands))(*operands)
        return jax_compat.bind_with_jaxpr(equation, traced, operands)

    def switch(
        self, equation: Equation, index: Any, branches: Sequence[Function[Any]], operands: Sequence[Any]
    ) -> list[Any]:
        """See `Interpreter.switch`."""
        functions = [lambda *operands, branch=branch: branch(operands) for branch in branches]
        return lax.switch(jnp.asarray(index, jnp.int32), functions, *operands)

    def while_loop(
        self, equation: Equation, test: Callable[[Sequence[Any]], Any], body: Function[Any], carry: Sequence[Any]
    ) -> list[Any]:
        """See `Interpreter.while_loop`."""
        start = jax.tree.map(jnp.asarray, list(carry))
        return lax.while_loop(test, lambda carry: _with_dtypes_of(carry, body(carry)), start)

    def scan(self, equation: Equation, body: ScanFunction[Any], carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        """See `Interpreter.scan`."""

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            new_carry, ys = body(carry, slices)
            return _with_dtypes_of(carry, new_carry), ys

        start = jax.tree.map(jnp.asarray, list(carry))
        last, ys = lax.scan(step, start, list(xs), **jax_compat.scan_parts(equation).options)
        return [*last, *ys]


def _with_dtypes_of(carry: list[Any], new_carry: list[Any]) -> list[Any]:
    """Returns `new_carry` in the dtypes of `carry`, which may have been weakly typed."""
    return jax.tree.map(
        lambda old, new: lax.convert_element_type(new, old.dtype) if old.dtype != new.dtype else new, carry, new_carry
    )


def nested_equations(equation: Equation) -> Iterator[tuple[Equation, Contents]]:
    """Yields an equation and all equations of the jaxprs inside it, each with its contents."""
    contents = jax_compat.contents(equation)
    yield equation, contents
    for jaxpr in contents.jaxprs:
        for inner in jaxpr.eqns:
            yield from nested_equations(inner)


def all_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the equations of `jaxpr` and of all jaxprs inside it."""
    return (inner for equation in jaxpr.eqns for inner, _ in nested_equations(equation))


def contains_outside_loops(jaxpr: Jaxpr, primitive: str) -> bool:
    """Whether `jaxpr`, or a jaxpr inside it but not inside a loop of it, has an equation of this primitive."""
    return any(
        equation.primitive.name == primitive
        or equation.primitive.name not in ("while", "scan")
        and any(contains_outside_loops(inner, primitive) for inner in jax_compat.contents(equation).jaxprs)
        for equation in jaxpr.eqns
    )


def uses_axes(equation: Equation, axes: frozenset[str]) -> bool:
    """Whether an equation, or one inside it, names one of `axes`, or has Python code that may do so."""
    return any(axes & contents.names or contents.opaque for _, contents in nested_equations(equation))
