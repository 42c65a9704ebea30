"""Finds tables whose rows a worker looks up, and evaluates its part of the step on these rows.

A table qualifies if the worker reads it by `jdist.lookup` only, and sends its gradient: a scatter-add of rows to zeros, behind
operations that keep zeros, such as a product with a number. Then each variable with the shape of the table, `[row, ...]`, has a
counterpart with the rows that the batch looks up, `[looked-up row, ...]`. Sums over the table are sums over these rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.jaxpr.interpreter import Evaluator
from jdist._src.jaxpr.marks import LOOKUP_MARK, mark_of
from jdist._src.jaxpr.primitives import primitive_names
from jdist._src.jaxpr.server_partition import ServerPartition, UpdateGroup, part_for
from jdist._src.jaxpr.update_partition import variables

# Primitives whose result is zero where their operand is.
_KEEPS_ZERO = primitive_names(
    "abs convert_element_type copy copy_p integer_pow name neg psum reduce_precision sign sqrt square"
)


class Table(NamedTuple):
    """A table whose rows the worker looks up.

    Attributes:
        leaf: The number of the leaf of the state.
        var: The variable of the table.
        indices: The variables of the rows that the worker looks up, `[..., 1]`.
        gradient: The variable of the gradient that the worker sends.
        values: The variables with the shape of the table that are evaluated on rows.
    """

    leaf: int
    var: Any
    indices: tuple[Any, ...]
    gradient: Any
    values: frozenset[Any]


def find_tables(partition: ServerPartition, state: Sequence[Any]) -> list[Table]:
    """Returns the tables of a step, each of which is the only leaf of a group."""
    tables = [_table_of(partition, group, state) for group in partition.groups if group.is_elementwise]
    return [table for table in tables if table is not None]


def _table_of(partition: ServerPartition, group: UpdateGroup, state: Sequence[Any]) -> Table | None:
    program = partition.worker.program
    read = [number for number in group.leaves if state[number] in program.invars]
    sent = [var for var in group.part.inputs if var in set(partition.sent) and jax_compat.shape_of(var)]
    if len(read) != 1 or len(sent) != 1 or not jax_compat.shape_of(state[read[0]]):
        return None
    table, gradient = state[read[0]], sent[0]
    indices: list[Any] = []
    marked: set[Any] = set()  # the table as `jdist.lookup` marks it
    sparse: set[Any] = set()  # arrays that are zero in all rows that are not looked up
    true: set[Any] = set()  # arrays that are true in all rows that are not looked up
    filled: dict[Any, Any] = {}  # arrays of equal elements, and the element
    sources: dict[Any, Any] = {}  # of a filled array that was computed from another one
    accepted: set[int] = set()  # the equations that can be evaluated on rows
    for equation in program.eqns:
        name, operands = equation.primitive.name, equation.invars
        used = variables(operands)
        if mark_of(equation) == LOOKUP_MARK and operands[0] is table:
            marked.update(equation.outvars)
            accepted.add(id(equation))
        elif table in used:
            return None
        elif not marked.isdisjoint(used):
            if name != "gather" or operands[0] not in marked or operands[1] in marked:
                return None
            indices.append(operands[1])
            accepted.add(id(equation))
        elif name == "broadcast_in_dim" and not jax_compat.shape_of(operands[0]):
            filled[equation.outvars[0]] = operands[0]
        elif _keeps_zero(equation) and _is_filled_zero(operands[0], filled):
            filled[equation.outvars[0]] = filled[operands[0]]
            sources[equation.outvars[0]] = operands[0]
            accepted.add(id(equation))
        elif name == "scatter-add" and jax_compat.shape_of(equation.outvars[0]) == jax_compat.shape_of(table):
            start = filled.get(operands[0]) if not isinstance(operands[0], Literal) else None
            if not _is_zero(start) or not sparse.isdisjoint(variables(operands[1:])):
                return None
            indices.append(operands[1])
            sparse.update(equation.outvars)
            sparse.add(operands[0])
            accepted.add(id(equation))
        elif not (sparse | true).isdisjoint(used):
            kind = _kind(equation, sparse, true, filled)
            if kind is None:
                return None
            {"sparse": sparse, "true": true, "scalar": set()}[kind].update(equation.outvars)
            for var in used:
                while var is not None and var in filled:
                    sparse.add(var)
                    var = sources.get(var)
            accepted.add(id(equation))
    if gradient not in sparse or not indices or any(var in marked | sparse | true for var in indices):
        return None
    if not set(state).isdisjoint(part_for(program, indices).inputs):
        return None  # the rows are looked up before the state is read
    values = frozenset({table} | marked | sparse | true)
    if any(
        id(equation) not in accepted and not values.isdisjoint(variables(equation.invars)) for equation in program.eqns
    ):
        return None
    return Table(read[0], table, tuple(dict.fromkeys(indices)), gradient, values)


def _keeps_zero(equation: Equation) -> bool:
    name = equation.primitive.name
    return name in _KEEPS_ZERO and (name != "integer_pow" or equation.params["y"] > 0)


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and atom.val == 0


def _kind(equation: Equation, sparse: set[Any], true: set[Any], filled: Mapping[Any, Any]) -> str | None:
    """Returns `"sparse"` or `"true"` (see `_table_of`), `"scalar"` for a result without rows, or None for another result."""
    name, operands = equation.primitive.name, equation.invars
    is_number = [not jax_compat.shape_of(atom) or _is_in(atom, filled) for atom in operands]
    is_sparse = [_is_in(atom, sparse) for atom in operands]
    is_zero = [_is_filled_zero(atom, filled) for atom in operands]
    is_flat = len(jax_compat.shape_of(equation.outvars[0])) == 1
    if name == "concatenate" and is_flat or name == "reshape" and is_flat and is_sparse[0]:
        return "sparse"  # some elements are omitted, which are zero
    if _keeps_zero(equation) and is_sparse[0]:
        return "sparse"
    if name in ("add", "add_any", "sub") and all(a or b for a, b in zip(is_sparse, is_zero, strict=True)):
        return "sparse"
    if name == "mul" and any(is_sparse) and all(a or b for a, b in zip(is_sparse, is_number, strict=True)):
        return "sparse"
    if name == "div" and is_sparse[0] and is_number[1]:
        return "sparse"
    if name == "select_n" and is_number[0] and all(a or b for a, b in zip(is_sparse[1:], is_zero[1:], strict=True)):
        return "sparse"
    if name == "is_finite" and is_sparse[0] or name == "and" and all(_is_in(atom, true) for atom in operands):
        return "true"
    is_sum = name == "reduce_sum" and is_sparse[0] or name == "reduce_and" and _is_in(operands[0], true)
    return "scalar" if is_sum and not jax_compat.shape_of(equation.outvars[0]) else None


def _is_filled_zero(atom: Any, filled: Mapping[Any, Any]) -> bool:
    return _is_in(atom, filled) and _is_zero(filled[atom])


def _is_in(atom: Any, group: Any) -> bool:
    return not isinstance(atom, Literal) and atom in group


class RowEvaluator(Evaluator):
    """Evaluates the part of a worker on the rows of tables that it looks up.

    Args:
        tables: The tables.
        looked_up: The rows of each table.
    """

    def __init__(self, tables: Sequence[Table], looked_up: Sequence["LookedUpRows"]):
        pairs = list(zip(tables, looked_up, strict=True))
        self._counts = {var: len(rows.numbers) for table, rows in pairs for var in table.values}
        self._places = {
            (table.leaf, var): places
            for table, rows in pairs
            for var, places in zip(table.indices, rows.places, strict=True)
        }
        self._leaves = {var: table.leaf for table in tables for var in table.values}

    def enters(self, equation: Equation) -> bool:
        """See `Interpreter.enters`."""
        return False

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        """See `Interpreter.primitive`."""
        name = equation.primitive.name
        if name in ("gather", "scatter-add") and _is_in(equation.invars[0], self._leaves):
            places = self._places[self._leaves[equation.invars[0]], equation.invars[1]]
            operands[1] = places.reshape(jax_compat.shape_of(equation.invars[1]))
        elif name == "reshape" and _is_in(equation.outvars[0], self._counts):
            return [jnp.ravel(operands[0])]
        elif name == "broadcast_in_dim" and _is_in(result := equation.outvars[0], self._counts):
            return [jnp.broadcast_to(operands[0], (self._counts[result], *jax_compat.shape_of(result)[1:]))]
        return super().primitive(jaxpr, equation, operands)


class LookedUpRows(NamedTuple):
    """The rows of a table that a batch looks up.

    Attributes:
        ids: The ids, in ascending order, with repetitions, `[id]`.
        numbers: The same, with the number of rows of the table in place of each repetition, `[id]`.
        places: For each array of indices, the place of the first equal id in `ids`, flat.
    """

    ids: jax.Array
    numbers: jax.Array
    places: list[jax.Array]


def looked_up_rows(indices: Sequence[jax.Array], num_rows: int) -> LookedUpRows:
    """Returns the rows that `indices` name. Without `jnp.unique`, which takes twice as long on the CPU."""
    flat = jnp.concatenate([jnp.clip(x.reshape(-1), 0, num_rows - 1) for x in indices])
    ids, order = _sorted(flat, num_rows)
    is_first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    first_places = lax.cummax(jnp.where(is_first, jnp.arange(len(ids)), 0))
    places = jnp.zeros_like(first_places).at[order].set(first_places)
    stops = np.cumsum([x.size for x in indices])[:-1]
    return LookedUpRows(ids, jnp.where(is_first, ids, num_rows), jnp.split(places, stops))


def _sorted(ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns ids in ascending order, and their places before, in ascending order for equal ids."""
    count = len(ids)
    if num_rows * count > np.iinfo(np.int32).max:
        order = jnp.argsort(ids)
        return ids[order], order
    # One sort of numbers that contain both. On CPU, `jnp.argsort` takes two to six times as long.
    both = lax.sort(ids.astype(jnp.int32) * count + jnp.arange(count, dtype=jnp.int32), is_stable=False)
    return lax.div(both, np.int32(count)), lax.rem(both, np.int32(count))
