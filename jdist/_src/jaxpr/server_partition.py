"""Splits a step's jaxpr for parameter servers: a part that a worker computes, and updates of groups of state leaves.

A worker reads the state once and computes gradients, while other workers update the state. The new value of a leaf has to be
computed from its value at the time of the update, not from the value that the worker read: otherwise the updates in between
would be lost. So the servers run every equation on the path from a state leaf to the new state that is behind the last
collective, and the worker computes and sends the other operands of these equations. An equation that both need, such as
the split of a random key, is run by both.

State leaves whose updates share arrays, as a parameter and its momentum, form a group, which is stored in one place. Scalars,
such as the number of steps, are small and cheap to update: every server stores a copy.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr
from jdist._src.jaxpr import replication
from jdist._src.jaxpr.interpreter import uses_axes
from jdist._src.jaxpr.marks import READ_MARK, STALENESS_MARK, mark_of
from jdist._src.jaxpr.primitives import ELEMENTWISE, RESHAPES
from jdist._src.jaxpr.replication import Input
from jdist._src.jaxpr.update_partition import (
    DisjointSets,
    JaxprPart,
    extend_where_less_is_sent,
    find_users,
    is_elementwise,
    jaxpr_part,
    users_of,
    variables,
)


class UpdateGroup(NamedTuple):
    """State leaves that are updated together.

    Attributes:
        leaves: Their numbers.
        part: The equations of their update. Its inputs are variables of the state, constants, and variables that the worker
            sends.
        is_elementwise: Whether all leaves have one shape, and each element of their new values is computed from the same
            elements of arrays, so that the leaves can be divided over servers.
    """

    leaves: tuple[int, ...]
    part: JaxprPart
    is_elementwise: bool


class ServerPartition(NamedTuple):
    """The parts of a step under parameter servers.

    Attributes:
        worker: The part of the worker: its outputs are the variables that it sends, and the outputs of the step.
        sent: The variables that the worker sends to the servers.
        groups: The groups of state leaves that contain arrays, in the order of their first leaves. A leaf that the step
            does not change is a separate group.
        scalars: The scalar leaves that depend on no array of the state.
        overwritten: The numbers of the leaves whose new value the worker computes.
        dependent: The overwritten leaves whose new value depends on the value that the worker read.
    """

    worker: JaxprPart
    sent: list[Any]
    groups: list[UpdateGroup]
    scalars: UpdateGroup
    overwritten: tuple[int, ...]
    dependent: tuple[int, ...]


def split_for_servers(
    program: Jaxpr,
    inputs: Sequence[Input],
    axes: Sequence[str],
    state: Sequence[Any],
    constants: Collection[Any],
) -> ServerPartition:
    """Splits a jaxpr without inlinable calls.

    Args:
        program: The program of one replica, with constants as inputs. Its first results are the new values of the state.
        inputs: For each of its inputs, where it may vary between replicas.
        axes: The axes of the replicas.
        state: The input variables of the state.
        constants: The input variables that are constants.
    """
    users = find_users(program)
    is_varying = dict(zip(program.invars, (bool(one.axes) for one in inputs), strict=True))
    on_servers = _server_equations(program, inputs, axes, state, is_varying, users)
    new_values = program.outvars[: len(state)]
    server_equations = [equation for equation, is_on in zip(program.eqns, on_servers, strict=True) if is_on]
    defined = {var for equation in server_equations for var in equation.outvars}
    of_arrays = _depending_on_arrays(server_equations, state, new_values)
    groups = _groups(program, server_equations, of_arrays, state, new_values, is_varying)
    numbers = tuple(number for number, var in enumerate(state) if var not in of_arrays)
    scalar_equations = [equation for equation in server_equations if of_arrays.isdisjoint(equation.outvars)]
    scalars = UpdateGroup(numbers, _update_part(program, [], scalar_equations, new_values, numbers), False)
    server_variables = {*defined, *state}
    overwritten = tuple(n for n, atom in enumerate(new_values) if server_variables.isdisjoint(variables([atom])))
    local = {*state, *constants}
    needed = [var for group in (*groups, scalars) for var in group.part.inputs]
    needed += variables(new_values[number] for number in overwritten)
    sent = [var for var in dict.fromkeys(needed) if var not in local]
    outputs = variables(program.outvars[len(state) :])
    worker = part_for(program, list(dict.fromkeys([*sent, *outputs])), keeps_effects=True)
    dependent = tuple(n for n in overwritten if state[n] in part_for(program, variables([new_values[n]])).inputs)
    return ServerPartition(worker, sent, groups, scalars, overwritten, dependent)


def _server_equations(
    program: Jaxpr,
    inputs: Sequence[Input],
    axes: Sequence[str],
    state: Sequence[Any],
    is_varying: dict[Any, bool],
    users: dict[Any, list[int]],
) -> list[bool]:
    """For each equation, whether the servers run it: it leads from the state to the new state without a collective.

    A replicated equation may be of any kind. Before the last collective, where values vary between replicas, only elementwise
    operations on values that are stored per replica qualify, as the sum of a metric: otherwise the model itself would run on
    the servers.
    """
    results = [var for equation in program.eqns for var in equation.outvars]
    all_values = jax_compat.sub_jaxpr(program, program.eqns, program.invars, results)
    variations = iter(replication.prove(all_values, inputs, axes))
    is_replicated = [not any([next(variations) for _ in equation.outvars]) for equation in program.eqns]
    is_pure = [not equation.effects and not uses_axes(equation, frozenset(axes)) for equation in program.eqns]
    from_state, from_local_state = set(state), {var for var in state if is_varying[var]}
    is_candidate: list[bool] = []
    for number, equation in enumerate(program.eqns):
        operands = variables(equation.invars)
        if is_replicated[number]:
            qualifies = not from_state.isdisjoint(operands)
            qualifies = qualifies and mark_of(equation) != READ_MARK or mark_of(equation) == STALENESS_MARK
        else:
            is_local = equation.primitive.name in ELEMENTWISE | RESHAPES
            qualifies = is_local and not from_local_state.isdisjoint(operands)
        is_candidate.append(is_pure[number] and qualifies)
        if is_candidate[number]:
            from_state.update(equation.outvars)
            if not is_replicated[number]:
                from_local_state.update(equation.outvars)
    new_state = frozenset(variables(program.outvars[: len(state)]))
    on_servers = [False] * len(program.eqns)
    for number in reversed(range(len(program.eqns))):
        equation = program.eqns[number]
        leads = not new_state.isdisjoint(equation.outvars) or any(on_servers[i] for i in users_of(equation, users))
        on_servers[number] = is_candidate[number] and leads
    is_movable = [mark_of(equation) != READ_MARK for equation in program.eqns]
    is_final = list(map(all, zip(is_replicated, is_pure, is_movable, strict=True)))
    extend_where_less_is_sent(program, on_servers, is_final, users)
    return on_servers


def _depending_on_arrays(equations: Sequence[Equation], state: Sequence[Any], new_values: Sequence[Any]) -> set[Any]:
    """Returns the variables of the servers that are arrays, or depend on one of the state."""
    pairs = list(zip(state, new_values, strict=True))
    dependent = {var for var in state if jax_compat.shape_of(var)}
    while True:
        for equation in equations:
            atoms = [*equation.invars, *equation.outvars]
            if any(map(jax_compat.shape_of, atoms)) or not dependent.isdisjoint(variables(equation.invars)):
                dependent.update(equation.outvars)
        scalars = {var for var, atom in pairs if var not in dependent and not dependent.isdisjoint(variables([atom]))}
        if not scalars:
            return dependent
        dependent |= scalars


def _groups(
    program: Jaxpr,
    equations: Sequence[Equation],
    of_arrays: set[Any],
    state: Sequence[Any],
    new_values: Sequence[Any],
    is_varying: dict[Any, bool],
) -> list[UpdateGroup]:
    """Returns the groups of the leaves in `of_arrays`: those that are connected by variables in `of_arrays`."""
    sets = DisjointSets()
    for atoms in (
        *([*equation.invars, *equation.outvars] for equation in equations),
        *zip(state, new_values, strict=True),
    ):
        sets.merge(var for var in variables(atoms) if var in of_arrays)
    leaves: dict[Any, list[int]] = {}
    for number, var in enumerate(state):
        if var in of_arrays:
            leaves.setdefault(sets.root(var), []).append(number)
    own_equations: dict[Any, list[Equation]] = {one: [] for one in leaves}
    scalar_equations: list[Equation] = []
    for equation in equations:
        in_arrays = [var for var in equation.outvars if var in of_arrays]
        if in_arrays:
            own_equations[sets.root(in_arrays[0])].append(equation)
        else:
            scalar_equations.append(equation)
    groups: list[UpdateGroup] = []
    for one, numbers in leaves.items():
        shapes = {jax_compat.shape_of(state[number]) for number in numbers}
        is_plain = not any(is_varying[state[number]] for number in numbers)
        separable = is_plain and len(shapes) == 1 and all(map(is_elementwise, own_equations[one]))
        part = _update_part(program, own_equations[one], scalar_equations, new_values, numbers)
        groups.append(UpdateGroup(tuple(numbers), part, separable))
    return groups


def _update_part(
    program: Jaxpr,
    equations: Sequence[Equation],
    scalar_equations: Sequence[Equation],
    new_values: Sequence[Any],
    leaves: Sequence[int],
) -> JaxprPart:
    """Returns the update of some leaves: `equations`, and those of `scalar_equations` that they or the leaves need."""
    values = variables(new_values[number] for number in leaves)
    needed = {*values, *(var for equation in equations for var in variables(equation.invars))}
    chosen = {id(equation) for equation in equations}
    for equation in reversed(scalar_equations):
        if not needed.isdisjoint(equation.outvars):
            chosen.add(id(equation))
            needed.update(variables(equation.invars))
    return jaxpr_part(program, [equation for equation in program.eqns if id(equation) in chosen], values)


def part_for(program: Jaxpr, results: Sequence[Any], *, keeps_effects: bool = False) -> JaxprPart:
    """Returns the equations that `results` need, optionally with all that have effects, as a part with these outputs."""
    needed, chosen = set(results), list[Equation]()
    for equation in reversed(program.eqns):
        if (keeps_effects and equation.effects) or not needed.isdisjoint(equation.outvars):
            chosen.append(equation)
            needed.update(variables(equation.invars))
    inputs = [var for var in program.invars if var in needed]
    return JaxprPart(inputs, list(results), jax_compat.sub_jaxpr(program, chosen[::-1], inputs, results))
