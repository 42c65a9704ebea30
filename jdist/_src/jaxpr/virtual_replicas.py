"""Runs the program of one replica for V virtual replicas on N devices, with bitwise equal results for every N.

The result is defined by V; the number of devices only decides the speed. Each device runs its virtual replicas
sequentially, in a loop whose body is compiled separately, so that every kernel has the shapes of one replica. Values that all
replicas share are computed once. Sums over the replicas are taken along one fixed tree over all V:

    ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))

A device adds the subtrees of its replicas; then each device receives one part of the elements from all devices
(all-to-all), continues up the tree, and sends the total to all devices (all-gather).

`run_virtual_replicas` schedules the equations of the jaxpr: those with varying results are collected until a collective uses
the results, and then run in one loop over the slots; all others run once.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.jaxpr import replication
from jdist._src.jaxpr.interpreter import Evaluator, Function, ScanFunction, fixed_point, nested_equations, uses_axes
from jdist._src.jaxpr.primitives import ANNOTATED_CALLS, CALLS, NOT_WAITING, ORDERED_REDUCTIONS
from jdist._src.jaxpr.virtual_values import (
    Slots,
    Stacked,
    Value,
    gather_slots,
    is_stacked,
    replica_ids,
    scatter_slots,
    slots_of,
    tree_fold,
    write_slot,
    zeros,
)


def run_virtual_replicas(
    program: Any, arguments: Sequence[Value], slots: Slots, unrolled: frozenset[str] = frozenset()
) -> list[Value]:
    """Returns the results of a closed jaxpr of one replica, for all virtual replicas of this device.

    Args:
        program: The jaxpr.
        arguments: The values of its inputs.
        slots: The assignment of the replicas to the devices.
        unrolled: The primitives that run outside the loops over the slots, once for each slot.

    Raises:
        ValueError: The jaxpr has a collective that is not implemented for virtual replicas.
    """
    return _VirtualReplicas(slots, unrolled).run(jax_compat.open_jaxpr(program), program.consts, arguments)


class _VirtualReplicas(Evaluator):
    """Evaluates jaxprs on `Value`s, while they are traced anew for the devices."""

    def __init__(self, slots: Slots, unrolled: frozenset[str]):
        self._slots = slots
        self._unrolled = unrolled
        self._axes = frozenset(slots.axes)

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
        """See `Interpreter.run`. Delays the equations that vary between replicas, to run many of them in one loop."""
        values: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
        delayed: list[Equation] = []
        delayed_results: dict[Any, None] = {}  # a set in order

        def read(atom: Any) -> Value:
            return atom.val if isinstance(atom, Literal) else values[atom]

        def run_delayed(remaining: Sequence[Equation]) -> None:
            if delayed:
                used = set(_variables(jaxpr.outvars)).union(*(_variables(one.invars) for one in remaining))
                outputs = [var for var in delayed_results if var in used]
                values.update(self._run_per_slot(jaxpr, delayed, outputs, values))
                delayed.clear()
                delayed_results.clear()

        for number, equation in enumerate(jaxpr.eqns):
            operands = _variables(equation.invars)
            if self._has_collective(equation) or self._is_unrolled(equation):
                if any(var in delayed_results for var in operands) or jax_compat.contents(equation).jaxprs:
                    run_delayed(jaxpr.eqns[number:])
                results = self.evaluate(jaxpr, equation, [read(atom) for atom in equation.invars])
                values.update(zip(equation.outvars, results, strict=True))
                continue
            varying_operands = {var for var in operands if var in delayed_results or is_stacked(values[var])}
            varying_results = self._varying_results(jaxpr, equation, varying_operands)
            if jax_compat.has_debug_effect(equation) and (varying_operands or uses_axes(equation, self._axes)):
                # A callback runs once per replica, also in an equation without results, or with replicated ones.
                delayed.append(equation)
                delayed_results.update(dict.fromkeys(equation.outvars))
                run_delayed(jaxpr.eqns[number + 1 :])
                replicated = [var for var in equation.outvars if var in values and var not in varying_results]
                values.update((var, values[var].array[0]) for var in replicated)
                continue
            if varying_results:
                delayed.append(equation)
                delayed_results.update(dict.fromkeys(varying_results))
            if len(varying_results) < len(equation.outvars) or jax_compat.has_debug_effect(equation):
                # The other results do not depend on the varying operands: any value of these gives the same.
                one_value = lambda atom, varying=varying_operands: (
                    zeros(atom.aval.shape, atom.aval.dtype)
                    if not isinstance(atom, Literal) and atom in varying
                    else read(atom)
                )
                results = _SlotEvaluator().evaluate(jaxpr, equation, list(map(one_value, equation.invars)))
                pairs = zip(equation.outvars, results, strict=True)
                values.update((var, value) for var, value in pairs if var not in varying_results)
        run_delayed([])
        return [read(atom) for atom in jaxpr.outvars]

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Value]) -> list[Value]:
        """See `Interpreter.primitive`. Returns the results of a collective, or of a primitive that is unrolled."""
        if equation.primitive.name in self._unrolled:
            return self._run_unrolled(jaxpr, equation, operands)
        rule = _COLLECTIVES.get(equation.primitive.name)
        if rule is None or jax_compat.has_axis_index_groups(equation):
            raise ValueError(
                f"{equation.primitive.name} at {source_lines.equation_frame(equation)} is not supported with virtual replicas, "
                "whose results are the same on any number of devices. `all_reduce`, `all_gather`, `reduce_scatter`, "
                "`broadcast` and `sync.exact()` are, also in `cond`, `scan` and `while_loop`; for other collectives, remove "
                "`virtual_replicas`."
            )
        return rule(self._slots, equation, operands)

    def call(self, equation: Equation, body: Function[Value], operands: list[Value]) -> list[Value]:
        """See `Interpreter.call`. Inlines every call: its operands may be `Stacked`."""
        return body(operands)

    def switch(
        self, equation: Equation, index: Value, branches: Sequence[Function[Value]], operands: Sequence[Value]
    ) -> list[Value]:
        """See `Interpreter.switch`. A result is `Stacked` if it is in any branch."""
        results = [jax.eval_shape(branch, list(operands)) for branch in branches]
        kinds = [any(map(is_stacked, column)) for column in zip(*results, strict=True)]
        converted = [lambda operands, branch=branch: self._as_kinds(kinds, branch(operands)) for branch in branches]
        return super().switch(equation, index, converted, operands)

    def while_loop(
        self,
        equation: Equation,
        test: Callable[[Sequence[Value]], Value],
        body: Function[Value],
        carry: Sequence[Value],
    ) -> list[Value]:
        """See `Interpreter.while_loop`. The test is not `Stacked`: it is proved replicated if the loop has a collective."""
        kinds = self._kinds_of_carry(body, carry)
        converted = lambda carry: self._as_kinds(kinds, body(carry))
        return super().while_loop(equation, test, converted, self._as_kinds(kinds, carry))

    def scan(
        self, equation: Equation, body: ScanFunction[Value], carry: Sequence[Value], xs: Sequence[Value]
    ) -> list[Value]:
        """See `Interpreter.scan`. The scanned dimension of a `Stacked` value comes before the dimension of the slots."""
        xs = list(map(_swap_slots, xs))
        slices = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
        kinds = self._kinds_of_carry(lambda carry, slices: body(carry, slices)[0], carry, slices)

        def converted(carry: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            new_carry, ys = body(carry, slices)
            return self._as_kinds(kinds, new_carry), ys

        results = super().scan(equation, converted, self._as_kinds(kinds, carry), xs)
        return [*results[: len(carry)], *map(_swap_slots, results[len(carry) :])]

    def _kinds_of_carry(self, body: Callable[..., list[Value]], carry: Sequence[Value], *others: Any) -> list[bool]:
        """Returns, for each value of a loop's carry, whether it is `Stacked` after some number of iterations."""

        def step(kinds: Sequence[bool]) -> list[bool]:
            return list(map(is_stacked, jax.eval_shape(body, self._as_kinds(kinds, carry), *others)))

        return fixed_point(step, list(map(is_stacked, carry)), operator.or_)

    def _as_kinds(self, kinds: Sequence[bool], values: Sequence[Value]) -> list[Value]:
        return [
            Stacked(slots_of(value, self._slots)) if stacked else value
            for stacked, value in zip(kinds, values, strict=True)
        ]

    def _run_per_slot(
        self, jaxpr: Jaxpr, equations: Sequence[Equation], outputs: list[Any], values: dict[Any, Value]
    ) -> dict[Any, Stacked]:
        """Returns the values of the variables `outputs` of `equations`, run sequentially for each replica of this device."""
        uses_index = any(uses_axes(equation, self._axes) for equation in equations)
        defined = {var for equation in equations for var in equation.outvars}
        inputs = list(dict.fromkeys(v for one in equations for v in _variables(one.invars) if v not in defined))
        part = jax_compat.sub_jaxpr(jaxpr, equations, inputs, outputs)
        stacked = {var: self._at_least_two(values[var].array) for var in inputs if is_stacked(values[var])}

        def run_slot(slot: jax.Array, buffers: list[jax.Array]) -> list[jax.Array]:
            operands = [
                lax.dynamic_index_in_dim(stacked[var], slot, keepdims=False) if var in stacked else values[var]
                for var in inputs
            ]
            index = replica_ids(self._slots)[0] + slot if uses_index else None
            # The computation is not fused with reads and writes of the slots, whose number depends on the devices.
            operands, index = lax.optimization_barrier((operands, index))
            results = lax.optimization_barrier(_SlotEvaluator(self._axes, index).run(part, (), operands))
            return [write_slot(buffer, x, slot) for buffer, x in zip(buffers, results, strict=True)]

        per_device = self._slots.per_device
        empty = [zeros((max(per_device, _LEAST_SLOTS), *var.aval.shape), var.aval.dtype) for var in outputs]
        buffers = lax.fori_loop(0, self._num_replicas_here(), run_slot, empty)
        return {var: Stacked(x[:per_device]) for var, x in zip(outputs, buffers, strict=True)}

    def _run_unrolled(self, jaxpr: Jaxpr, equation: Equation, operands: list[Value]) -> list[Value]:
        """Returns the results of an equation, run once for each slot outside any loop."""

        def run_slot(slot: int) -> list[jax.Array]:
            values = [lax.index_in_dim(x.array, slot, keepdims=False) if is_stacked(x) else x for x in operands]
            values = lax.optimization_barrier(values)  # see `_run_per_slot`
            return lax.optimization_barrier(_SlotEvaluator().primitive(jaxpr, equation, values))

        if not any(map(is_stacked, operands)):
            return run_slot(0)
        results = map(run_slot, range(self._slots.per_device))
        return [Stacked(jnp.stack(column)) for column in zip(*results, strict=True)]

    def _at_least_two(self, array: jax.Array) -> jax.Array:
        missing = _LEAST_SLOTS - self._slots.per_device
        return jnp.concatenate([array, zeros((missing, *array.shape[1:]), array.dtype)]) if missing > 0 else array

    def _num_replicas_here(self) -> jax.Array:
        """Returns the number of replicas of this device, not as a constant: XLA would unroll a loop of one iteration."""
        per_device = self._slots.per_device
        before = lax.axis_index(self._slots.axes) * per_device
        return lax.optimization_barrier(jnp.clip(self._slots.num_replicas - before, 0, per_device))

    def _has_collective(self, equation: Equation) -> bool:
        """Whether an equation names an axis itself, or waits for other replicas inside it."""
        return any(
            self._axes & contents.names and (inner is equation or inner.primitive.name not in NOT_WAITING)
            for inner, contents in nested_equations(equation)
        )

    def _is_unrolled(self, equation: Equation) -> bool:
        """Whether an equation is unrolled, or is a call that is inlined and has such an equation."""
        name = equation.primitive.name
        return name in self._unrolled or (
            name in CALLS - ANNOTATED_CALLS
            and any(self._is_unrolled(inner) for jaxpr in jax_compat.contents(equation).jaxprs for inner in jaxpr.eqns)
        )

    def _varying_results(self, jaxpr: Jaxpr, equation: Equation, varying_operands: set[Any]) -> list[Any]:
        """Returns the results of an equation that vary between replicas if these operands do."""
        # Some of several results may not depend on the operands, as of an `optimization_barrier` or of a call.
        may_be_mixed = len(equation.outvars) > 1 or jax_compat.contents(equation).jaxprs
        if not may_be_mixed or not (varying_operands or uses_axes(equation, self._axes)):
            return list(equation.outvars) if varying_operands else []
        inputs = _variables(equation.invars)
        variations = replication.prove(
            jax_compat.sub_jaxpr(jaxpr, [equation], inputs, equation.outvars),
            [replication.Input("", tuple(self._axes) if var in varying_operands else ()) for var in inputs],
            tuple(self._axes),
        )
        return [var for var, variation in zip(equation.outvars, variations, strict=True) if variation]


# Every read of the only slot of a device would give the same value in every iteration. XLA, and LLVM after it, would move the
# body out of the loop and compile other kernels for it, which round differently. An unused second slot prevents this.
_LEAST_SLOTS = 2


class _SlotEvaluator(Evaluator):
    """Evaluates equations without collectives for one replica.

    XLA may move a transposition or a reshape through a sum, which changes the order of the additions, and it decides this
    differently for different numbers of devices. So the operands of sums are fixed by a barrier, also in calls.

    Args:
        axes: The axes of the replicas.
        index: The replica index; None if the equations do not use it.
    """

    def __init__(self, axes: frozenset[str] = frozenset(), index: jax.Array | None = None):
        self._axes = axes
        self._index = index

    def enters(self, equation: Equation) -> bool:
        # A `remat2` stays a call: if it were inlined, XLA would merge the second computation with the first.
        is_plain_call = equation.primitive.name in CALLS - ANNOTATED_CALLS
        return is_plain_call or (equation.primitive.name != "shard_map" and uses_axes(equation, self._axes))

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        if equation.primitive.name == "axis_index" and self._index is not None and uses_axes(equation, self._axes):
            return [self._index]
        if equation.primitive.name in ORDERED_REDUCTIONS:
            operands = lax.optimization_barrier(operands)
        return super().primitive(jaxpr, equation, operands)


_Rule: TypeAlias = Callable[[Slots, Equation, list[Value]], list[Value]]


def _reduction(combine: Callable[[Any, Any], Any]) -> _Rule:
    return lambda slots, equation, operands: [tree_fold(combine, value, slots) for value in operands]


def _axis_index(slots: Slots, equation: Equation, operands: list[Value]) -> list[Value]:
    return [Stacked(replica_ids(slots))]


def _all_gather(slots: Slots, equation: Equation, operands: list[Value]) -> list[Value]:
    dim, tiled = jax_compat.gather_dimension(equation)
    return [gather_slots(value, dim, tiled, slots) for value in operands]


def _reduce_scatter(slots: Slots, equation: Equation, operands: list[Value]) -> list[Value]:
    dim, tiled = jax_compat.scatter_dimension(equation)
    return [scatter_slots(tree_fold(operator.add, value, slots), dim, tiled, slots) for value in operands]


_COLLECTIVES: dict[str, _Rule] = {
    "psum": _reduction(operator.add),
    "pmax": _reduction(jnp.maximum),
    "pmin": _reduction(jnp.minimum),
    "axis_index": _axis_index,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def _swap_slots(value: Value) -> Value:
    """Swaps the first two dimensions of a `Stacked` value: slots, and the dimension that a scan iterates over."""
    return Stacked(value.array.swapaxes(0, 1)) if is_stacked(value) else value


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))
