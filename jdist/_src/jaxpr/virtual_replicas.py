"""Virtual replicas: the program of one replica of V, run by N devices, with the same bits for every N.

The mathematics is that of V replicas; how many devices there are only decides how fast it is done. Each device runs its
virtual replicas one after the other, in a loop whose body is compiled alone, so that every kernel sees the shapes of one
replica. What all replicas share is computed once. Where they add up, the sum is taken along one fixed tree over all V:

    ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))

A device adds up the branches that lie wholly on it; then each device takes a part of the numbers, gets it of all others
(all-to-all), goes on up the tree, and hands the result to all (all-gather).

To be run so, a traced program is taken apart (`run_in_turn`): equations of values that differ between replicas are collected
until a collective wants to know them, and then run in one loop; all others run once.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.devices.mesh import Replicas
from jdist._src.jaxpr import calls, replication
from jdist._src.jaxpr.single_replica import Rule, rewriting
from jdist._src.jaxpr.virtual_values import (
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


def run_virtual_replicas(program: Any, arguments: Sequence[Value], replicas: Replicas) -> list[Value]:
    """What a program of one replica gives for these arguments, on this device and beside the others.

    Raises:
        ValueError: It talks to the other replicas in a way that has no fixed order yet.
    """
    return _Run(replicas).follow(jax_compat.open_jaxpr(program), program.consts, arguments)


class _Run:
    """One pass through a program, while it is traced anew for the devices."""

    def __init__(self, replicas: Replicas):
        self._replicas = replicas
        self._axes = frozenset(replicas.mesh.axis_names)

    def follow(self, program: Jaxpr, consts: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
        """The values of the outputs."""
        known: dict[Any, Value] = dict(zip(program.constvars, consts, strict=True))
        known.update(zip(program.invars, arguments, strict=True))
        waiting: list[Equation] = []
        made: dict[Any, None] = {}  # what they will make for each replica, in order

        def look(atom: Any) -> Value:
            return atom.val if isinstance(atom, Literal) else known[atom]

        def flush(left: Sequence[Equation]) -> None:
            if waiting:
                wanted = set(_variables(program.outvars)).union(*(_variables(one.invars) for one in left))
                self._loop(program, waiting, [v for v in made if v in wanted], known)
                waiting.clear()
                made.clear()

        for number, equation in enumerate(program.eqns):
            operands = _variables(equation.invars)
            if self._is_together(equation):
                if any(v in made for v in operands) or jax_compat.contents(equation).programs:
                    flush(program.eqns[number:])
                values = self._together(equation, [look(atom) for atom in equation.invars])
                known.update(zip(equation.outvars, values, strict=True))
            else:
                own = {v for v in operands if v in made or is_stacked(known[v])}
                differing = _differing(program, equation, own, self._axes)
                if differing:
                    waiting.append(equation)
                    made.update(dict.fromkeys(differing))
                if len(differing) < len(equation.outvars):
                    # What does not depend on them is the same for any value of those that differ.
                    shared = [v for v in equation.outvars if v not in differing]
                    values = [_any_of(v) if v in own else known[v] for v in operands]
                    results = _evaluated(program, [equation], dict(zip(operands, values, strict=True)), shared)
                    known.update(zip(shared, results, strict=True))
        flush([])
        return [look(atom) for atom in program.outvars]

    def _loop(self, program: Jaxpr, equations: list[Equation], results: list[Any], known: dict[Any, Value]) -> None:
        """Runs equations for each replica of this device in turn, and makes `results` known."""
        needs_number = any(self._axes & _names_within(one) for one in equations)
        inner = {v for one in equations for v in one.outvars}
        inputs = list(dict.fromkeys(v for one in equations for v in _variables(one.invars) if v not in inner))

        slots = {v: self._at_least_two(known[v].slots) for v in inputs if is_stacked(known[v])}

        def turn(slot: jax.Array, buffers: list[jax.Array]) -> list[jax.Array]:
            own = [lax.dynamic_index_in_dim(slots[v], slot, keepdims=False) if v in slots else known[v] for v in inputs]
            number = [replica_ids(self._replicas)[0] + slot] if needs_number else []
            # What is computed is not fused with its way from and to the slots, of which each device has another number.
            own, number = lax.optimization_barrier((own, number))
            as_number = lambda equation, _: number if equation.primitive.name == "axis_index" else None
            rule = rewriting(self._axes, as_number)
            made = _evaluated(program, equations, dict(zip(inputs, own, strict=True)), results, rule)
            return [write_slot(x, y, slot) for x, y in zip(buffers, lax.optimization_barrier(made), strict=True)]

        each = self._replicas.each
        empty = [zeros((max(each, _LEAST_SLOTS), *v.aval.shape), v.aval.dtype) for v in results]
        filled = lax.fori_loop(0, self._num_slots(), turn, empty)
        known.update((v, Stacked(x[:each])) for v, x in zip(results, filled, strict=True))

    def _at_least_two(self, slots: jax.Array) -> jax.Array:
        missing = _LEAST_SLOTS - self._replicas.each
        return jnp.concatenate([slots, zeros((missing, *slots.shape[1:]), slots.dtype)]) if missing > 0 else slots

    def _is_together(self, equation: Equation) -> bool:
        """Whether an equation names an axis, or holds one that does so to wait for other replicas: all but `axis_index`."""
        held = jax_compat.contents(equation)
        inner = (one for program in held.programs for one in program.eqns if one.primitive.name != "axis_index")
        return bool(self._axes & held.names) or any(map(self._is_together, inner))

    def _num_slots(self) -> jax.Array:
        """How many replicas this device runs; not known to the compiler, which would unroll a loop of one turn."""
        number = lax.axis_index(self._replicas.mesh.axis_names)
        return lax.optimization_barrier(
            jnp.clip(self._replicas.size - number * self._replicas.each, 0, self._replicas.each)
        )

    def _together(self, equation: Equation, values: list[Value]) -> list[Value]:
        """The results of an equation that names the axis, or has programs within that do."""
        rule = _RULES.get(equation.primitive.name)
        if rule is not None and not equation.params.get("axis_index_groups"):
            return rule(self, equation, values)
        call = calls.call_of(equation)
        if call is not None:
            return self.follow(call.program, call.consts, call.operands(values))
        raise ValueError(
            f"{equation.primitive.name} at {source_lines.equation_frame(equation)} is not there for virtual replicas, whose results "
            "are to be the same on any number of devices. `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast` and "
            "`sync.exact()` are, also in `cond`, `scan` and `while_loop`; for others leave `virtual_replicas` out."
        )

    def _sum(self, equation: Equation, values: list[Value]) -> list[Value]:
        return [tree_fold(operator.add, value, self._replicas) for value in values]

    def _max(self, equation: Equation, values: list[Value]) -> list[Value]:
        return [tree_fold(jnp.maximum, value, self._replicas) for value in values]

    def _min(self, equation: Equation, values: list[Value]) -> list[Value]:
        return [tree_fold(jnp.minimum, value, self._replicas) for value in values]

    def _index(self, equation: Equation, values: list[Value]) -> list[Value]:
        return [Stacked(replica_ids(self._replicas))]

    def _gather(self, equation: Equation, values: list[Value]) -> list[Value]:
        dim, tiled = equation.params["all_gather_dimension"], equation.params["tiled"]
        return [gather_slots(value, dim, tiled, self._replicas) for value in values]

    def _scatter(self, equation: Equation, values: list[Value]) -> list[Value]:
        dim, tiled = equation.params["scatter_dimension"], equation.params["tiled"]
        totals = [tree_fold(operator.add, value, self._replicas) for value in values]
        return [Stacked(scatter_slots(total, dim, tiled, self._replicas)) for total in totals]

    def _cond(self, equation: Equation, values: list[Value]) -> list[Value]:
        index, *operands = values
        branches = [
            functools.partial(self.follow, jax_compat.open_jaxpr(branch), getattr(branch, "consts", ()))
            for branch in equation.params["branches"]
        ]
        kinds = [jax.eval_shape(lambda *xs, branch=branch: branch(xs), *operands) for branch in branches]
        own = [any(is_stacked(value) for value in column) for column in zip(*kinds, strict=True)]
        alike = [lambda *xs, branch=branch: self._of_kinds(own, branch(xs)) for branch in branches]
        return lax.switch(index, alike, *operands)

    def _scan(self, equation: Equation, values: list[Value]) -> list[Value]:
        body = equation.params["jaxpr"]
        num_consts, num_carry = jax_compat.scan_counts(equation)
        consts, carry, xs = (
            values[:num_consts],
            values[num_consts : num_consts + num_carry],
            values[num_consts + num_carry :],
        )
        xs = [Stacked(x.slots.swapaxes(0, 1)) if is_stacked(x) else x for x in xs]

        def turn(carry: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            results = self.follow(jax_compat.open_jaxpr(body), getattr(body, "consts", ()), [*consts, *carry, *slices])
            return results[:num_carry], results[num_carry:]

        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
        own = self._kinds(carry, lambda carry: jax.eval_shape(turn, carry, first)[0])

        def alike(carry: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
            after, ys = turn(carry, slices)
            return self._of_kinds(own, after), ys

        options = {name: equation.params[name] for name in ("length", "reverse")}
        carry, ys = lax.scan(alike, self._of_kinds(own, carry), xs, **options)
        return [*carry, *(Stacked(y.slots.swapaxes(0, 1)) if is_stacked(y) else y for y in ys)]

    def _while(self, equation: Equation, values: list[Value]) -> list[Value]:
        programs = (equation.params[key] for key in ("cond_jaxpr", "body_jaxpr"))
        test, body = (
            functools.partial(self.follow, jax_compat.open_jaxpr(one), getattr(one, "consts", ())) for one in programs
        )
        first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        of_test, of_body, carry = values[:first], values[first : first + second], values[first + second :]
        # The proof has shown that all replicas that meet in a collective here have one predicate.
        own = self._kinds(carry, lambda carry: jax.eval_shape(body, [*of_body, *carry]))
        turn = lambda carry: self._of_kinds(own, body([*of_body, *carry]))
        return lax.while_loop(lambda carry: test([*of_test, *carry])[0], turn, self._of_kinds(own, carry))

    def _kinds(self, carry: list[Value], turn: Callable[[list[Value]], list[Value]]) -> list[bool]:
        """For each part of a loop's carry, whether it differs between replicas after any number of turns."""
        own = [is_stacked(value) for value in carry]
        while True:
            after = turn(self._of_kinds(own, carry))
            grown = [was or is_stacked(now) for was, now in zip(own, after, strict=True)]
            if grown == own:
                return own
            own = grown

    def _of_kinds(self, own: Sequence[bool], values: Sequence[Value]) -> list[Value]:
        return [Stacked(slots_of(x, self._replicas)) if rows else x for rows, x in zip(own, values, strict=True)]


# Every read of the only slot of a device gives the same value in every iteration. XLA, and LLVM after it, would move the
# body out of the loop, and compile other kernels for it, which round differently. An unused second slot prevents it.
_LEAST_SLOTS = 2

_Rule: TypeAlias = Callable[[_Run, Equation, list[Value]], list[Value]]
_RULES: dict[str, _Rule] = {
    "psum": _Run._sum,
    "pmax": _Run._max,
    "pmin": _Run._min,
    "axis_index": _Run._index,
    "all_gather": _Run._gather,
    "reduce_scatter": _Run._scatter,
    "cond": _Run._cond,
    "scan": _Run._scan,
    "while": _Run._while,
}


def _evaluated(
    program: Jaxpr,
    equations: Sequence[Equation],
    known: dict[Any, jax.Array],
    results: Sequence[Any],
    rule: Rule = lambda equation, operands: None,
) -> list[jax.Array]:
    """The values of `results`, variables that `equations` of `program`, or `rule` for them, make of what is known.

    XLA may take a transposition, or a reshape, through a sum, which changes the order of its additions; and it does so in one
    way for one device, and in another for several. So what is summed is fixed first.
    """
    known = dict(known)

    def look(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in equations:
        values = [look(atom) for atom in equation.invars]
        # A program that is computed again for its gradients stays a call: its results would be found to be there already.
        call = calls.call_of(equation) if equation.primitive.name not in calls.ANNOTATED_CALLS else None
        if call is not None:
            inner = dict(zip(call.program.constvars, call.consts, strict=True))
            inner.update(zip(call.program.invars, call.operands(values), strict=True))
            made = _evaluated(call.program, call.program.eqns, inner, call.program.outvars, rule)
        else:
            values = lax.optimization_barrier(values) if equation.primitive.name in _SUMS else values
            made = rule(equation, values)
            made = jax_compat.evaluate_one(program, equation)(*values) if made is None else made
        known.update(zip(equation.outvars, made, strict=True))
    return [look(atom) for atom in results]


_SUMS = frozenset(("reduce_sum", "reduce_prod", "dot_general", "cumsum"))


def _differing(program: Jaxpr, equation: Equation, own: set[Any], axes: frozenset[str]) -> list[Any]:
    """The results of an equation that differ between replicas where the operands in `own` do."""
    # Of several results, some may depend on none of them: those of an `optimization_barrier`, or of a program within.
    is_mixed = len(equation.outvars) > 1 or jax_compat.contents(equation).programs
    if not is_mixed or not (own or axes & _names_within(equation)):
        return list(equation.outvars) if own else []
    inputs = _variables(equation.invars)
    known = replication.prove(
        jax_compat.sub_jaxpr(program, [equation], inputs, equation.outvars),
        [replication.Input("", tuple(axes) if v in own else ()) for v in inputs],
        tuple(axes),
    )
    return [v for v, knowledge in zip(equation.outvars, known, strict=True) if knowledge]


def _any_of(variable: Any) -> jax.Array:
    return zeros(variable.aval.shape, variable.aval.dtype)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def _names_within(equation: Equation) -> frozenset[str]:
    """The strings in the parameters of an equation and of all programs within: the axes that it names are among them."""
    held = jax_compat.contents(equation)
    return held.names.union(*(_names_within(inner) for program in held.programs for inner in program.eqns))
