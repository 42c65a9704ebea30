"""The update in a step: what is left to do of it once the replicas have said all that they have to say to each other.

A step computes gradients, each replica its own, reduces them, and updates the state. The update is the same on every replica,
so it need not be done by each, nor where they are: it can be done once, where the state lies. No line of the step says where
the update begins. It is found in the traced program, from its end: an equation belongs to it if every replica would get the
same from it, if what it gives goes nowhere but to other equations of the update and to results, and if it needs some of the
values that are kept apart.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.jaxpr import calls, replication
from jdist._src.jaxpr.replication import Input

# What gives each element from the same element of its operands, or from numbers.
_ELEMENTWISE = frozenset(
    """
    abs add add_any and ceil clamp convert_element_type copy copy_p cos div eq erf exp exp2 expm1 floor ge gt integer_pow
    is_finite le log log1p logistic lt max min mul name ne neg nextafter not or pow reduce_precision rem round rsqrt
    select_n sign sin sqrt square stop_gradient sub tanh xor
    """.split()  # noqa: SIM905
)


class JaxprPart(NamedTuple):
    """Some equations of a program.

    Attributes:
        needs: The variables that they need.
        gives: Those of what they make that are needed after them.
        program: From the ones to the others.
    """

    needs: list[Any]
    gives: list[Any]
    program: Jaxpr

    def pieces(self) -> list["JaxprPart"]:
        """An elementwise update in pieces that have no array in common: one a parameter."""
        leader: dict[Any, Any] = {}  # of each array, another one of the same piece, or itself

        def lead(var: Any) -> Any:
            while (other := leader.setdefault(var, var)) is not var:
                leader[var] = var = leader[other]
            return var

        for equation in self.program.eqns:
            first, *others = map(lead, _arrays([*equation.invars, *equation.outvars]))
            leader.update(dict.fromkeys(others, first))
        pieces: dict[Any, list[Equation]] = {}
        for equation in self.program.eqns:
            pieces.setdefault(lead(_arrays(equation.outvars)[0]), []).append(equation)
        return [_part(self.program, piece, self.gives) for piece in pieces.values()]

    def run(self, known: dict[Any, Any]) -> dict[Any, Any]:
        """What they make of what is known of the variables."""
        values = jax_compat.jaxpr_function(jax_compat.close_jaxpr(self.program))(*(known[var] for var in self.needs))
        return dict(zip(self.gives, values, strict=True))


def inline_calls(program: Any, axis_sizes: Sequence[tuple[str, int]]) -> Any:
    """The closed program without calls, the equations of what was called in their place."""

    def called(equation: Equation, operands: list[Any]) -> list[Any] | None:
        call = calls.call_of(equation) if equation.primitive.name not in calls.ANNOTATED_CALLS else None
        return jax_compat.follow(call.program, call.consts, call.operands(operands), called) if call else None

    run = lambda *given: jax_compat.follow(program.jaxpr, program.consts, given, called)
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in program.jaxpr.invars]
    return jax.make_jaxpr(run, axis_env=list(axis_sizes))(*shapes)


def split_update(
    program: Jaxpr,
    inputs: Sequence[Input],
    axes: Sequence[str],
    apart: Collection[Any],
    own: Collection[Any],
    num_state: int,
) -> tuple[JaxprPart, JaxprPart, JaxprPart, dict[Any, Any]]:
    """Takes the update out of a flat program.

    Args:
        program: The program of one replica, with constants as inputs.
        inputs: For each of its inputs, where it may differ between the replicas.
        axes: The axes of the replicas.
        apart: Those of its input variables that are kept apart.
        own: Those of its results of which each replica keeps its own, even if all are the same.
        num_state: How many of its results are the new state.

    Returns:
        What comes before the update; of the update, what makes each element of the same elements only; the rest of it;
        and the values of variables that stand for numbers in it.
    """
    users: dict[Any, list[int]] = {}
    for number, equation in enumerate(program.eqns):
        for var in _variables(equation.invars):
            users.setdefault(var, []).append(number)
    last = _last(program, inputs, axes, frozenset(_variables(own)), users)
    late = _late(program, last, frozenset(apart), frozenset(_variables(program.outvars[:num_state])), users)
    _add_what_is_less_to_send(program, late, last, users)
    parts: tuple[list[Equation], ...] = [], [], []
    mixed: set[Any] = set()  # what is made by the rest of the update
    numbers: dict[Any, Any] = {}
    for equation, is_late in zip(program.eqns, late, strict=True):
        if is_late and equation.primitive.name == "broadcast_in_dim":
            # A number in the program would be spread out in the memory of a device, and not in that of the host.
            equation = jax_compat.with_variables(equation, numbers)
        by_element = is_late and _is_elementwise(equation) and mixed.isdisjoint(_variables(equation.invars))
        parts[1 if by_element else 2 if is_late else 0].append(equation)
        if is_late and not by_element:
            mixed.update(equation.outvars)
    wanted = [_variables(atom for equation in part for atom in equation.invars) for part in parts]
    results = _variables(program.outvars)
    return (
        _part(program, parts[0], [*results, *wanted[1], *wanted[2]]),
        _part(program, parts[1], [*results, *wanted[2]]),
        _part(program, parts[2], results),
        numbers,
    )


def _part(program: Jaxpr, equations: Sequence[Equation], wanted: Sequence[Any]) -> JaxprPart:
    made = {var for equation in equations for var in equation.outvars}
    read = _variables(atom for equation in equations for atom in equation.invars)
    needs = [var for var in dict.fromkeys(read) if var not in made]
    gives = [var for var in dict.fromkeys(wanted) if var in made]
    return JaxprPart(needs, gives, jax_compat.sub_jaxpr(program, equations, needs, gives))


def _last(
    program: Jaxpr, inputs: Sequence[Input], axes: Sequence[str], own: frozenset[Any], users: Mapping[Any, list[int]]
) -> list[bool]:
    """For each equation, whether after it nothing comes that differs between the replicas, and nothing that they say."""
    everything = jax_compat.sub_jaxpr(
        program, program.eqns, program.invars, [v for one in program.eqns for v in one.outvars]
    )
    known = iter(replication.prove(everything, inputs, axes))
    agrees = [not any([next(known) for _ in equation.outvars]) for equation in program.eqns]
    last = [False] * len(program.eqns)
    for number in reversed(range(len(program.eqns))):
        equation = program.eqns[number]
        silent = not equation.effects and not jax_compat.uses_axes(equation, frozenset(axes))
        ends = own.isdisjoint(equation.outvars) and all(last[user] for user in _users(equation, users))
        last[number] = agrees[number] and silent and ends
    return last


def _late(
    program: Jaxpr, last: Sequence[bool], apart: frozenset[Any], state: frozenset[Any], users: Mapping[Any, list[int]]
) -> list[bool]:
    """For each equation, whether it belongs to the update: from what is apart it leads to the state, or follows what does."""
    leads = [False] * len(program.eqns)
    for number in reversed(range(len(program.eqns))):
        equation = program.eqns[number]
        leads[number] = not state.isdisjoint(equation.outvars) or any(leads[user] for user in _users(equation, users))
    late: list[bool] = []
    depends, follows = set(apart), set[Any]()
    for number, equation in enumerate(program.eqns):
        operands = _variables(equation.invars)
        leads_there = leads[number] and not depends.isdisjoint(operands)
        late.append(last[number] and (leads_there or not follows.isdisjoint(operands)))
        if last[number] and not depends.isdisjoint(operands):  # not by way of what the replicas say
            depends.update(equation.outvars)
        if late[number]:
            follows.update(equation.outvars)
    return late


def _add_what_is_less_to_send(
    program: Jaxpr, late: list[bool], last: Sequence[bool], users: Mapping[Any, list[int]]
) -> None:
    """Adds to the update what leads up to it, where that is less to send: a gradient, and not its square beside it."""
    sent = {
        var for equation, is_late in zip(program.eqns, late, strict=True) if is_late for var in _arrays(equation.invars)
    }
    results = frozenset(_variables(program.outvars))
    for number in reversed(range(len(program.eqns))):
        equation = program.eqns[number]
        only = results.isdisjoint(equation.outvars) and all(late[user] for user in _users(equation, users))
        wanted = last[number] and not sent.isdisjoint(equation.outvars) and _is_elementwise(equation)
        if not late[number] and only and wanted and len(set(_arrays(equation.invars)) - sent) <= 1:
            late[number] = True
            sent.update(_arrays(equation.invars))


def _users(equation: Equation, users: Mapping[Any, list[int]]) -> list[int]:
    return [user for var in equation.outvars for user in users.get(var, ())]


def _arrays(atoms: Any) -> list[Any]:
    return [var for var in _variables(atoms) if jax_compat.shape_of(var)]


def _is_elementwise(equation: Equation) -> bool:
    if equation.primitive.name == "broadcast_in_dim":
        return not jax_compat.shape_of(equation.invars[0])
    shapes = set(map(jax_compat.shape_of, equation.invars)) - {()}
    return equation.primitive.name in _ELEMENTWISE and len(shapes) == 1


def _variables(atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
