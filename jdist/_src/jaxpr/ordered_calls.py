"""Host functions that a replica function calls, and the position of each call in the order of the program.

XLA runs the callbacks of a program in any order, and the callbacks of several devices at the same time. The host sorts the
calls by their positions. Positions are equal on all replicas, also where the replicas take other branches or numbers of
iterations.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.jaxpr.interpreter import Evaluator, Function, ScanFunction, all_equations, nested_equations
from jdist._src.jaxpr.primitives import ANNOTATED_CALLS

Deliver = Callable[..., None]  # of the host function, the position of the call, and the operands


class HostFunction:
    """A host function that replicas call in the order of the program.

    Args:
        fn: A function of the replica index and further operands.
    """

    def __init__(self, fn: Callable[..., None]):
        self.fn = fn

    def call(self, replica_id: jax.Array, *operands: jax.Array) -> None:
        """Calls `fn` on the host when a replica computes the operands."""
        jax_compat.call_on_host(self, (replica_id, *operands))

    def __call__(self, *operands: jax.Array) -> None:
        """Calls `fn` in a program that was not rewritten, in which XLA decides the order of the calls."""
        self.fn(*operands)


def has_host_functions(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr, or a jaxpr inside it, calls a `HostFunction`."""
    return any(map(_is_host_call, all_equations(jaxpr)))


def with_positions(program: Any, axis_sizes: Sequence[tuple[str, int]], deliver: Deliver) -> Any:
    """Returns a closed jaxpr that calls `deliver` in place of its host functions, with the position of each call.

    A position is a vector of numbers, in the lexicographic order of the calls. The calls in the jaxpr are numbered. Of a call
    in loops, the position begins with the number of the first call in the loop and the iteration, for each loop.

    Args:
        program: The closed jaxpr.
        axis_sizes: The names and sizes of the mesh axes that it uses.
        deliver: Called with the host function, the position, and the operands of the call.
    """
    evaluator = _Positions(deliver)
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in program.jaxpr.invars]
    evaluate = lambda *arguments: evaluator.run(program.jaxpr, program.consts, arguments)
    with jax.disable_jit(False):  # it would evaluate the test of a loop once more
        return jax.make_jaxpr(evaluate, axis_env=list(axis_sizes))(*shapes)


class _Positions(Evaluator):
    """Evaluates jaxprs with the positions of calls. Mutable: it holds the position of the next call."""

    def __init__(self, deliver: Deliver):
        self._deliver = deliver
        # The number of the first call, and the iteration, of each loop around the equation.
        self._loops: tuple[Any, ...] = ()
        self._next = 0

    def enters(self, equation: Equation) -> bool:
        """See `Interpreter.enters`."""
        is_annotated = equation.primitive.name in ANNOTATED_CALLS - {"remat2"}
        return not is_annotated and _num_calls_of(equation) > 0

    def evaluate(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        """See `Interpreter.evaluate`."""
        first = self._next
        results = super().evaluate(jaxpr, equation, operands)
        self._next = first + _num_calls_of(equation)
        return results

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        """See `Interpreter.primitive`."""
        if not _is_host_call(equation):
            return super().primitive(jaxpr, equation, operands)
        function, deliver = jax_compat.callback_of(equation), self._deliver
        position = jnp.stack([jnp.asarray(number, jnp.int32) for number in (*self._loops, self._next)])
        with jax_compat.context_of(equation):
            jax_compat.call_on_host(lambda *values: deliver(function, *values), (position, *operands))
        return []

    def switch(
        self, equation: Equation, index: Any, branches: Sequence[Function[Any]], operands: Sequence[Any]
    ) -> list[Any]:
        """See `Interpreter.switch`."""
        counts = [_num_calls(program) for program in jax_compat.cond_branches(equation)]
        firsts = itertools.accumulate(counts, initial=self._next)
        numbered = [self._starting_at(first, branch) for first, branch in zip(firsts, branches, strict=False)]
        return super().switch(equation, index, numbered, operands)

    def while_loop(
        self, equation: Equation, test: Callable[[Sequence[Any]], Any], body: Function[Any], carry: Sequence[Any]
    ) -> list[Any]:
        """See `Interpreter.while_loop`. The number of the iteration is added to the carry."""
        first = self._next
        first_in_body = first + _num_calls(jax_compat.while_parts(equation)[0])

        def numbered_test(carry: Sequence[Any]) -> Any:
            with self._at(first, (first, carry[-1])):
                return test(carry[:-1])

        def numbered_body(carry: Sequence[Any]) -> list[Any]:
            with self._at(first_in_body, (first, carry[-1])):
                return [*body(carry[:-1]), carry[-1] + 1]

        return super().while_loop(equation, numbered_test, numbered_body, [*carry, np.int32(0)])[:-1]

    def scan(self, equation: Equation, body: ScanFunction[Any], carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        """See `Interpreter.scan`. The number of the iteration is added to the carry."""
        first = self._next

        def numbered(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            with self._at(first, (first, carry[-1])):
                new_carry, ys = body(carry[:-1], slices)
            return [*new_carry, carry[-1] + 1], ys

        results = super().scan(equation, numbered, [*carry, np.int32(0)], xs)
        return [*results[: len(carry)], *results[len(carry) + 1 :]]

    def _starting_at(self, first: int, function: Function[Any]) -> Function[Any]:
        def numbered(arguments: Sequence[Any]) -> list[Any]:
            with self._at(first):
                return function(arguments)

        return numbered

    @contextlib.contextmanager
    def _at(self, first: int, loop: tuple[Any, ...] = ()) -> Iterator[None]:
        """Numbers the calls inside from `first` on. JAX may trace the body of a loop several times."""
        before = self._next, self._loops
        self._next, self._loops = first, (*self._loops, *loop)
        try:
            yield
        finally:
            self._next, self._loops = before


def _is_host_call(equation: Equation) -> bool:
    return isinstance(jax_compat.callback_of(equation), HostFunction)


def _num_calls_of(equation: Equation) -> int:
    return sum(_is_host_call(inner) for inner, _ in nested_equations(equation))


def _num_calls(program: Any) -> int:
    return sum(map(_is_host_call, all_equations(jax_compat.open_jaxpr(program))))
