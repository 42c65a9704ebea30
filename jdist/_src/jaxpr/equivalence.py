"""The equivalence analysis: does a function compute the same results on N replicas and on one device?

The function is traced twice: as one replica of N, with its part of the batch, and as the only replica, with the global batch,
where collectives return their operands. Both jaxprs have the same equations; shapes and numbers that were computed from shapes
differ. An abstract interpretation (`interpreter`) follows both together, and computes for each value its `Relation`: how the
value of the one device is computed from the values of the replicas.

* A reduction over the examples of a value that is split over them is a partial sum. Linear equations keep partial sums, `psum`
  ends them, and other equations lose them.
* A number that differs between the jaxprs, such as the 1/4 and 1/16 of two means, is a factor. So "4 times too large" is exact.
* Gradients are equations, so they need no rule.

A value that is called equal is equal for all inputs of these shapes, up to rounding and up to the order of the examples in
the batch: where each replica divides its examples into micro-batches, a micro-batch of the one device joins the micro-batches
of all replicas.

Source:
    The placements "replicate", "shard" and "partial" come from Y. Xu et al., "GSPMD", arXiv:2105.04663, and from DTensor. Here
    they are a relation between two programs, computed by abstract interpretation (P. Cousot and R. Cousot, POPL 1977).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax import core

from jdist._src.core import jax_compat
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.jaxpr.causes import Cause
from jdist._src.jaxpr.interpreter import Function, Interpreter, ScanFunction, fixed_point
from jdist._src.jaxpr.marks import call_name
from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair
from jdist._src.jaxpr.relation_rules.loops import accumulated, with_first_dim, without_first_dim
from jdist._src.jaxpr.relation_rules.marked_calls import has_usual_operands, marked_call
from jdist._src.jaxpr.relation_rules.table import ELEMENTWISE, RULES
from jdist._src.jaxpr.relations import REPLICATED, ZERO, AnyRelation, Lost, Relation, Site, Split


def relate(local: Any, single: Any, inputs: Sequence[AnyRelation], axis_sizes: Mapping[str, int]) -> list[AnyRelation]:
    """Returns the relation of each output of a function on the replicas to its output on one device.

    Args:
        local: The closed jaxpr of one replica of several.
        single: The closed jaxpr of the same function as the only replica, with the global batch.
        inputs: The relation of each input.
        axis_sizes: The mesh axes of the replicas, from the outermost, and their sizes.
    """
    return _Analysis(dict(axis_sizes), inputs).relate(local, single, inputs)


class _Const:
    """A constant of a closed jaxpr, whose relation depends on the same constant of the other jaxpr."""


_CONST: Any = _Const()


class _Analysis(Interpreter[AnyRelation]):
    """Computes the relation of each value. The equations of the jaxpr of one device have the same positions."""

    def __init__(self, axis_sizes: dict[str, int], inputs: Sequence[AnyRelation]):
        self.axis_sizes, self._num_replicas = axis_sizes, math.prod(axis_sizes.values())
        groups = {split.axes for value in inputs if isinstance(value, Relation) for split in value.splits}
        self.groups = sorted(groups or {tuple(axis_sizes)})
        self._single_programs: dict[int, Any] = {}  # by the `id` of a jaxpr: the program of one device
        self._pairs: dict[int, Equation] = {}  # of the current jaxpr, by the `id` of an equation
        self._consts: dict[int, Sequence[Any]] = {}

    def relate(self, local: Any, single: Any, inputs: Sequence[AnyRelation]) -> list[AnyRelation]:
        jaxpr = jax_compat.open_jaxpr(local)
        self._enter(local, single)
        return self.run(jaxpr, [_CONST] * len(jaxpr.constvars), inputs)

    def constant(self, value: Any) -> AnyRelation:
        return _CONST

    def run(self, jaxpr: Jaxpr, consts: Sequence[AnyRelation], arguments: Sequence[AnyRelation]) -> list[AnyRelation]:
        single_program = self._single_programs.get(id(jaxpr))
        single = jax_compat.open_jaxpr(single_program) if single_program is not None else None
        if single is None or len(single.invars) != len(jaxpr.invars) or len(single.constvars) != len(jaxpr.constvars):
            return [Lost("other program")] * len(jaxpr.outvars)
        single_consts = getattr(single_program, "consts", ())
        local_consts = self._consts.get(id(jaxpr), ())
        if len(local_consts) == len(single_consts) == len(consts):
            consts = [self._constant(a, b) for a, b in zip(local_consts, single_consts, strict=True)]
        elif consts:
            consts = [Lost("other program")] * len(consts)
        names = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*single.constvars, *single.invars], strict=True))
        outer, self._pairs = self._pairs, {}
        for one, other in _corresponding_equations(jaxpr.eqns, single.eqns, names):
            self._pairs[id(one)] = other
        try:
            results = super().run(jaxpr, consts, arguments)
            pairs = zip(results, jaxpr.outvars, single.outvars, strict=True)
            return [self._output(result, one, other, names) for result, one, other in pairs]
        finally:
            self._pairs = outer

    def _output(self, result: AnyRelation, one: Any, other: Any, names: Mapping[Any, Any]) -> AnyRelation:
        if isinstance(one, Literal):
            return self._literal(one, other)
        return result if result.is_lost or names.get(one) is other else Lost("other program")

    def evaluate(self, jaxpr: Jaxpr, equation: Equation, operands: list[AnyRelation]) -> list[AnyRelation]:
        single = self._pairs.get(id(equation))
        if single is None:
            site = self.site(equation)
            return [Lost("other program", Cause(site), site)] * len(equation.outvars)
        operands = [
            self._literal(one, other) if isinstance(one, Literal) else value
            for one, other, value in zip(equation.invars, single.invars, operands, strict=True)
        ]
        primitive = equation.primitive.name
        if primitive in ELEMENTWISE and all(map(_is_clean, operands)) and self._num_replicas not in _numbers(equation):
            return [REPLICATED]  # as in most equations of an optimizer
        if primitive in RULES:
            return self.primitive(jaxpr, equation, operands)
        for local_program, single_program in zip(
            jax_compat.programs(equation), jax_compat.programs(single), strict=True
        ):
            self._enter(local_program, single_program)
        name = call_name(equation)
        pair = EquationPair(self, equation, single, operands)
        # A derivative of a call can have further operands and results: it is entered.
        if name and call_name(single) == name and has_usual_operands(pair, name[0]):
            return [pair.checked(result, number) for number, result in enumerate(marked_call(pair, *name))]
        return super().evaluate(jaxpr, equation, operands)

    def _enter(self, local: Any, single: Any) -> None:
        key = id(jax_compat.open_jaxpr(local))
        self._single_programs[key] = single
        self._consts[key] = getattr(local, "consts", ())

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[AnyRelation]) -> list[AnyRelation]:
        pair = EquationPair(self, equation, self._pairs[id(equation)], operands)
        lost = pair.lost_operand()
        name = equation.primitive.name
        if lost is not None and name not in ("mul", "select_n"):
            return [lost] * len(equation.outvars)
        results = RULES.get(name, EquationPair.without_rule)(pair)
        return [pair.checked(result, number) for number, result in enumerate(results)]

    def switch(
        self,
        equation: Equation,
        index: AnyRelation,
        branches: Sequence[Function[AnyRelation]],
        operands: Sequence[AnyRelation],
    ) -> list[AnyRelation]:
        pair = EquationPair(self, equation, self._pairs[id(equation)], [index, *operands])
        predicate = pair.predicate(index)
        if predicate.is_lost:
            return [predicate] * len(equation.outvars)
        with self.inside(equation):
            results = [branch(operands) for branch in branches]
        return [pair.checked(pair.joined(values), i) for i, values in enumerate(zip(*results, strict=True))]

    def while_loop(
        self,
        equation: Equation,
        test: Callable[[Sequence[AnyRelation]], AnyRelation],
        body: Function[AnyRelation],
        carry: Sequence[AnyRelation],
    ) -> list[AnyRelation]:
        pair = EquationPair(self, equation, self._pairs[id(equation)], list(carry))

        def iterate(carry: Sequence[AnyRelation]) -> list[AnyRelation]:
            with self.inside(equation):
                predicate = pair.predicate(test(carry))
                if predicate.is_lost:
                    return [predicate] * len(carry)
                return body(carry)

        return fixed_point(iterate, carry, lambda old, new: pair.joined([old, new]))

    def scan(
        self,
        equation: Equation,
        body: ScanFunction[AnyRelation],
        carry: Sequence[AnyRelation],
        xs: Sequence[AnyRelation],
    ) -> list[AnyRelation]:
        single = self._pairs[id(equation)]
        pair = EquationPair(self, equation, single, [*carry, *xs])
        parts, single_parts = jax_compat.scan_parts(equation), jax_compat.scan_parts(single)
        scans_examples = parts.options["length"] != single_parts.options["length"]
        if parts.options["reverse"] != single_parts.options["reverse"]:
            return [pair.lost("no rule")] * len(equation.outvars)
        slices = [without_first_dim(pair, x, scans_examples) for x in xs]
        ys: list[AnyRelation] = []
        if scans_examples:
            if not _only_adds(jax_compat.open_jaxpr(parts.body), parts):
                return [pair.lost("no rule")] * len(equation.outvars)
            with self.inside(equation):
                added, ys = body([ZERO] * len(carry), slices)
            last = [accumulated(pair, start, value) for start, value in zip(carry, added, strict=True)]
            results = [*last, *(with_first_dim(pair, y, True) for y in ys)]
            return [pair.checked(result, number) for number, result in enumerate(results)]

        def iterate(carry: Sequence[AnyRelation]) -> list[AnyRelation]:
            with self.inside(equation):
                new_carry, ys[:] = body(carry, slices)
            return new_carry

        last = fixed_point(iterate, carry, lambda old, new: pair.joined([old, new]))
        results = [*last, *(with_first_dim(pair, y, scans_examples) for y in ys)]
        return [pair.checked(result, number) for number, result in enumerate(results)]

    def site(self, equation: Equation) -> Site:
        return Site(equation, tuple(self.calls))

    def _literal(self, one: Any, other: Any) -> AnyRelation:
        if not isinstance(other, Literal):
            return Lost("other program")
        return self._constant(one.val, other.val)

    def _constant(self, one: Any, other: Any) -> AnyRelation:
        """Returns the relation of two constants."""
        if one is other:
            return self._same_constant(one)
        if isinstance(one, core.Tracer) or isinstance(other, core.Tracer) or not _is_numeric(one, other):
            return Lost("other program")
        first, second = np.asarray(one), np.asarray(other)
        if first.dtype != second.dtype or first.ndim != second.ndim:
            return Lost("other program")
        if first.shape != second.shape:
            return self._split_constant(first, second)
        if np.array_equal(first, second, equal_nan=first.dtype.kind in "fc"):
            return self._same_constant(first)
        if first.dtype.kind == "b":
            return Lost("constant")
        a, b = first.astype(np.float64), second.astype(np.float64)
        with np.errstate(all="ignore"):
            ratios = (b / a).ravel()
        if not np.all(np.isfinite(ratios)) or not np.all(ratios > 0) or not np.allclose(ratios, ratios[0], rtol=1e-6):
            return Lost("constant")
        return Relation(factor=self._exact(float(ratios[0]), first.dtype), is_nonnegative=bool(np.all(a >= 0)))

    def _same_constant(self, value: Any) -> AnyRelation:
        if isinstance(value, core.Tracer) or np.ndim(value) or not _is_numeric(value):
            return REPLICATED
        number = np.asarray(value)
        if number == 0:
            return ZERO
        return Relation(is_nonnegative=number.dtype.kind != "c" and bool(number > 0))

    def _split_constant(self, first: np.ndarray, second: np.ndarray) -> AnyRelation:
        """Returns the relation of constants of different shapes, such as weights of 1 for each example."""
        dims = [dim for dim in range(first.ndim) if first.shape[dim] != second.shape[dim]]
        for axes in self.groups:
            number = self.group_size(axes)
            is_larger = len(dims) == 1 and second.shape[dims[0]] == number * first.shape[dims[0]]
            if is_larger and np.array_equal(np.concatenate([first] * number, dims[0]), second):
                return Relation(splits=(Split(axes, dims[0]),))
        return Lost("other program")

    def _exact(self, ratio: float, dtype: np.dtype) -> float:
        """Returns the power of the number of replicas that a ratio of two rounded numbers is, or the ratio."""
        tolerance = 1e-6 if dtype.itemsize >= 4 or dtype.kind in "iu" else 2e-2 if "bfloat" in dtype.name else 2e-3
        for base in {self._num_replicas, *self.axis_sizes.values()}:
            for power in (-3, -2, -1, -0.5, 0.5, 1, 2, 3):
                if math.isclose(ratio, base**power, rel_tol=tolerance):
                    return float(base**power)
        return ratio

    def group_size(self, axes: Sequence[str]) -> int:
        return math.prod(self.axis_sizes[axis] for axis in axes)


def _is_clean(value: AnyRelation) -> bool:
    """Whether a value is equal, and has no other property."""
    return not value.is_lost and value.is_clean  # type: ignore[union-attr]


def _numbers(equation: Equation) -> list[Any]:
    """Returns the constants among the operands of an equation."""
    return [atom.val for atom in equation.invars if isinstance(atom, Literal) and not np.ndim(atom.val)]


def _only_adds(body: Jaxpr, parts: jax_compat.ScanParts) -> bool:
    """Whether each iteration of a `scan` only adds a value to each element of its carry."""
    carried = body.invars[parts.num_consts : parts.num_consts + parts.num_carry]
    uses = [atom for equation in body.eqns for atom in equation.invars]
    makers = {var: equation for equation in body.eqns for var in equation.outvars}
    for before, after in zip(carried, body.outvars, strict=False):
        count = sum(atom is before for atom in uses) + sum(atom is before for atom in body.outvars)
        maker = None if isinstance(after, Literal) else makers.get(after)
        is_added = (
            maker is not None
            and maker.primitive.name in ("add", "add_any")
            and any(atom is before for atom in maker.invars)
        )
        is_read_elsewhere = any(atom is after for atom in uses) or sum(atom is after for atom in body.outvars) > 1
        if count != 1 or not is_added or is_read_elsewhere:
            return False
    return True


def _is_numeric(*values: Any) -> bool:
    return all(
        getattr(np.result_type(value) if np.isscalar(value) else value, "dtype", np.dtype(float)).kind in "biufcV"
        for value in values
    )


def _corresponding_equations(
    local: Sequence[Equation], single: Sequence[Equation], names: dict[Any, Any]
) -> Iterator[tuple[Equation, Equation]]:
    """Yields the equations that two jaxprs have in common, in order, and adds their results to `names`.

    A size that is 1 in one of the programs can leave out equations, or add some. These are skipped.

    Args:
        local: The equations of one replica.
        single: The equations of one device.
        names: From the variables of one replica to the variables of one device.
    """
    known = set(map(id, names.values()))
    i = j = 0
    while i < len(local) and j < len(single):
        following = lambda skip, i=i, j=j: (
            local[i + skip[0] : i + skip[0] + _NUM_MATCHES],
            single[j + skip[1] : j + skip[1] + _NUM_MATCHES],
        )
        skip = next((skip for skip in _SKIPS if _match(*following(skip), names, known, skip)), None)
        if skip is None:
            return
        i, j = i + skip[0], j + skip[1]
        one, other = local[i], single[j]
        names.update(zip(one.outvars, other.outvars, strict=True))
        known.update(map(id, other.outvars))
        yield one, other
        i, j = i + 1, j + 1


_SKIPS = sorted(((i, j) for i in range(12) for j in range(12)), key=sum)  # numbers of equations, the smallest first
_NUM_MATCHES = 3  # equations in a row, by which two programs are found to continue alike


def _match(
    local: Sequence[Equation], single: Sequence[Equation], names: dict[Any, Any], known: set[int], skip: tuple[int, int]
) -> bool:
    """Whether the next equations are the same; after a skip, several of them."""
    number = _NUM_MATCHES if any(skip) else 1
    if not local or not single:
        return False
    names, known = (dict(names), set(known)) if number > 1 else (names, known)
    for one, other in zip(local[:number], single[:number], strict=False):
        if not _same_form(one, other, names, known):
            return False
        if number > 1:
            names.update(zip(one.outvars, other.outvars, strict=True))
            known.update(map(id, other.outvars))
    return True


def _same_form(one: Equation, other: Equation, names: Mapping[Any, Any], known: set[int]) -> bool:
    """Whether two equations have the same primitive and corresponding operands, or operands of skipped equations."""
    if (
        one.primitive is not other.primitive
        or len(one.invars) != len(other.invars)
        or len(one.outvars) != len(other.outvars)
        or one.primitive.name not in RULES
        and len(jax_compat.programs(one)) != len(jax_compat.programs(other))
    ):
        return False
    for a, b in zip(one.invars, other.invars, strict=True):
        if isinstance(a, Literal) or isinstance(b, Literal):
            if not (isinstance(a, Literal) and isinstance(b, Literal)):
                return False
        elif names.get(a) is not b and (a in names or id(b) in known):
            return False
    return True
