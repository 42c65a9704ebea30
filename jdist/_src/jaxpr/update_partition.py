"""Splits a step's jaxpr into a compute part and an optimizer-update part.

A step computes a gradient per replica, reduces the gradients, and updates the state. The update is the same on every replica,
so it can be computed once, where the state is stored. No line of the step marks where the update begins, so the search starts
at the end of the jaxpr. An equation is part of the update if it and all that depend on it are replicated, without collectives
and without effects, and if it leads from the state that is stored elsewhere to the new state.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.jaxpr import replication
from jdist._src.jaxpr.interpreter import Evaluator, uses_axes
from jdist._src.jaxpr.primitives import ANNOTATED_CALLS, CALLS, ELEMENTWISE
from jdist._src.jaxpr.replication import Input


class DisjointSets:
    """Disjoint sets of variables, which are merged: a union-find forest. Each variable starts alone."""

    def __init__(self) -> None:
        self._parents: dict[Any, Any] = {}

    def root(self, var: Any) -> Any:
        """Returns the variable that represents the set of `var`."""
        while (parent := self._parents.setdefault(var, var)) is not var:
            self._parents[var] = var = self._parents[parent]
        return var

    def merge(self, variables: Iterable[Any]) -> None:
        """Merges the sets of these variables."""
        roots = list(map(self.root, variables))
        self._parents.update(dict.fromkeys(roots[1:], roots[0]) if roots else {})


class JaxprPart(NamedTuple):
    """Some equations of a jaxpr.

    Attributes:
        inputs: The variables that they use and do not define.
        outputs: The variables that they define and that are used after them.
        program: The jaxpr from `inputs` to `outputs`.
    """

    inputs: list[Any]
    outputs: list[Any]
    program: Jaxpr

    def split_by_array(self) -> list["JaxprPart"]:
        """Splits an elementwise update into parts that do not share an array: one per parameter."""
        sets = DisjointSets()
        for equation in self.program.eqns:
            sets.merge(_arrays([*equation.invars, *equation.outvars]))
        groups: dict[Any, list[Equation]] = {}
        for equation in self.program.eqns:
            groups.setdefault(sets.root(_arrays(equation.outvars)[0]), []).append(equation)
        return [jaxpr_part(self.program, group, self.outputs) for group in groups.values()]

    def run(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns the values of `outputs`, given the values of `inputs`."""
        evaluate = jax_compat.jaxpr_function(jax_compat.close_jaxpr(self.program))
        return dict(zip(self.outputs, evaluate(*(values[var] for var in self.inputs)), strict=True))


def inline_calls(program: Any, axis_sizes: Sequence[tuple[str, int]]) -> Any:
    """Returns a closed jaxpr with its calls inlined, except for those that carry an instruction for the compiler."""
    evaluator = _Inliner()
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in program.jaxpr.invars]
    evaluate = lambda *arguments: evaluator.run(program.jaxpr, program.consts, arguments)
    return jax.make_jaxpr(evaluate, axis_env=list(axis_sizes))(*shapes)


class _Inliner(Evaluator):
    def enters(self, equation: Equation) -> bool:
        return equation.primitive.name in CALLS - ANNOTATED_CALLS


class UpdatePartition(NamedTuple):
    """The parts of a step.

    Attributes:
        compute: The part before the update.
        elementwise: The part of the update that computes each element from the same elements of its operands.
        rest: The rest of the update, such as norms and the equations that depend on them.
        literals: The values of the variables that replace literals in the update.
    """

    compute: JaxprPart
    elementwise: JaxprPart
    rest: JaxprPart
    literals: dict[Any, Any]


def split_update(
    program: Jaxpr,
    inputs: Sequence[Input],
    axes: Sequence[str],
    remote: Collection[Any],
    per_replica: Collection[Any],
    num_state: int,
) -> UpdatePartition:
    """Splits a jaxpr without inlinable calls.

    Args:
        program: The program of one replica, with constants as inputs.
        inputs: For each of its inputs, where it may vary between the replicas.
        axes: The axes of the replicas.
        remote: The input variables that are stored elsewhere.
        per_replica: The results that are stored per replica, even if they are proved replicated.
        num_state: The number of results, from the first, that are the new state.
    """
    users = find_users(program)
    is_final = _is_final(program, inputs, axes, frozenset(variables(per_replica)), users)
    is_update = _is_update(
        program, is_final, frozenset(remote), frozenset(variables(program.outvars[:num_state])), users
    )
    extend_where_less_is_sent(program, is_update, is_final, users)
    compute, elementwise, rest = list[Equation](), list[Equation](), list[Equation]()
    rest_results: set[Any] = set()
    literals: dict[Any, Any] = {}
    for equation, in_update in zip(program.eqns, is_update, strict=True):
        if not in_update:
            compute.append(equation)
            continue
        if equation.primitive.name == "broadcast_in_dim":
            # XLA would broadcast a literal in device memory, and the update may be computed in host memory.
            equation = jax_compat.literals_to_variables(equation, literals)
        if is_elementwise(equation) and rest_results.isdisjoint(variables(equation.invars)):
            elementwise.append(equation)
        else:
            rest.append(equation)
            rest_results.update(equation.outvars)
    results = variables(program.outvars)
    rest_part = jaxpr_part(program, rest, results)
    elementwise_part = jaxpr_part(program, elementwise, [*results, *rest_part.inputs])
    return UpdatePartition(
        jaxpr_part(program, compute, [*results, *elementwise_part.inputs, *rest_part.inputs]),
        elementwise_part,
        rest_part,
        literals,
    )


def find_users(program: Jaxpr) -> dict[Any, list[int]]:
    """Returns the indices of the equations that use each variable."""
    users: dict[Any, list[int]] = {}
    for number, equation in enumerate(program.eqns):
        for var in variables(equation.invars):
            users.setdefault(var, []).append(number)
    return users


def jaxpr_part(program: Jaxpr, equations: Sequence[Equation], used: Sequence[Any]) -> JaxprPart:
    """Returns some equations of `program` as a part; its outputs are the variables of `used` that they define."""
    defined = {var for equation in equations for var in equation.outvars}
    operands = variables(atom for equation in equations for atom in equation.invars)
    inputs = [var for var in dict.fromkeys(operands) if var not in defined]
    outputs = [var for var in dict.fromkeys(used) if var in defined]
    return JaxprPart(inputs, outputs, jax_compat.sub_jaxpr(program, equations, inputs, outputs))


def _is_final(
    program: Jaxpr,
    inputs: Sequence[Input],
    axes: Sequence[str],
    per_replica: frozenset[Any],
    users: Mapping[Any, list[int]],
) -> list[bool]:
    """For each equation, whether it and all that depend on it are replicated, without collectives and without effects."""
    results = [var for equation in program.eqns for var in equation.outvars]
    variations = iter(
        replication.prove(jax_compat.sub_jaxpr(program, program.eqns, program.invars, results), inputs, axes)
    )
    is_replicated = [not any([next(variations) for _ in equation.outvars]) for equation in program.eqns]
    is_final = [False] * len(program.eqns)
    for number in reversed(range(len(program.eqns))):
        equation = program.eqns[number]
        is_pure = not equation.effects and not uses_axes(equation, frozenset(axes))
        is_followed = per_replica.isdisjoint(equation.outvars) and all(
            is_final[user] for user in users_of(equation, users)
        )
        is_final[number] = is_replicated[number] and is_pure and is_followed
    return is_final


def _is_update(
    program: Jaxpr,
    is_final: Sequence[bool],
    remote: frozenset[Any],
    state: frozenset[Any],
    users: Mapping[Any, list[int]],
) -> list[bool]:
    """For each equation, whether it leads from the remote state to the new state, or depends on one that does."""
    leads_to_state = [False] * len(program.eqns)
    for number in reversed(range(len(program.eqns))):
        equation = program.eqns[number]
        leads_to_state[number] = not state.isdisjoint(equation.outvars) or any(
            leads_to_state[user] for user in users_of(equation, users)
        )
    is_update: list[bool] = []
    from_remote, from_update = set(remote), set[Any]()
    for number, equation in enumerate(program.eqns):
        operands = variables(equation.invars)
        depends_on_remote = not from_remote.isdisjoint(operands)
        is_on_path = leads_to_state[number] and depends_on_remote
        is_update.append(is_final[number] and (is_on_path or not from_update.isdisjoint(operands)))
        if is_final[number] and depends_on_remote:  # not through a collective
            from_remote.update(equation.outvars)
        if is_update[number]:
            from_update.update(equation.outvars)
    return is_update


def extend_where_less_is_sent(
    program: Jaxpr, is_update: list[bool], is_final: Sequence[bool], users: Mapping[Any, list[int]]
) -> None:
    """Adds equations before the update if fewer arrays are sent then: a gradient, and not also its square."""
    sent = {
        var
        for equation, in_update in zip(program.eqns, is_update, strict=True)
        if in_update
        for var in _arrays(equation.invars)
    }
    results = frozenset(variables(program.outvars))
    for number in reversed(range(len(program.eqns))):
        equation = program.eqns[number]
        is_used_by_update_only = results.isdisjoint(equation.outvars) and all(
            is_update[user] for user in users_of(equation, users)
        )
        replaces_sent = is_final[number] and not sent.isdisjoint(equation.outvars) and is_elementwise(equation)
        adds_one_array_at_most = len(set(_arrays(equation.invars)) - sent) <= 1
        if not is_update[number] and is_used_by_update_only and replaces_sent and adds_one_array_at_most:
            is_update[number] = True
            sent.update(_arrays(equation.invars))


def users_of(equation: Equation, users: Mapping[Any, list[int]]) -> list[int]:
    """Returns the indices of the equations that use a result of `equation`."""
    return [user for var in equation.outvars for user in users.get(var, ())]


def _arrays(atoms: Any) -> list[Any]:
    return [var for var in variables(atoms) if jax_compat.shape_of(var)]


def is_elementwise(equation: Equation) -> bool:
    """Whether an equation computes each element from the same elements of its operands, or from scalars."""
    if equation.primitive.name == "broadcast_in_dim":
        return not jax_compat.shape_of(equation.invars[0])
    shapes = set(map(jax_compat.shape_of, equation.invars)) - {()}
    return equation.primitive.name in ELEMENTWISE and len(shapes) == 1


def variables(atoms: Any) -> list[Any]:
    """Returns the variables among `atoms`."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]
