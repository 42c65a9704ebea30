"""What is known of a value before the program runs: whether every replica has the same.

The proof is an abstract interpretation of the traced replica function. For each value it keeps, a mesh axis each, why
the value may differ between the replicas along that axis; a value with no reason to differ along any is *mirrored*.

* Inputs start as what their placement says, constants as mirrored, and an equation's results join its operands.
* A collective that hands every replica the same value (`psum`, `pmax`, `pmin`, `all_gather`) takes its axes away.
* Any other equation that names an axis (`axis_index`, `ppermute`, `psum_scatter`, `all_to_all`, and whatever JAX adds)
  puts that axis in, and so does an effect that is not known to be harmless.
* `scan` and `while` are followed to a fixed point over their carry, `cond` joins its branches, and a predicate that
  differs reaches everything that it decides. Calls are followed. A primitive that is not known joins.

So it never calls a value mirrored that can differ, given that the devices compute alike, that a `pure_callback` is pure,
and that the memory of `jnp.empty` is written before it is read.
A collective below a predicate that differs along the collective's own axis would wait for ever: it is refused.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.errors import DivergentCollectiveError, RepeatedSumWarning
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.jaxpr import calls

SUM_MARK = "jdist.all_reduce_sum"  # names what the user asked to be summed, before it is packed with others

_AGREEING = frozenset(("psum", "pmax", "pmin", "all_gather", "all_gather_invariant"))
_LOCAL = frozenset(("axis_index",))  # name an axis, and wait for nobody
_OWN = frozenset(("rng_uniform", "infeed"))  # every device has its own generator and its own feed


class Input(NamedTuple):
    """An input of a replica function.

    Attributes:
        name: What its author calls it: `batch['image']`.
        axes: The mesh axes along which it may differ; none for a mirrored input.
    """

    name: str
    axes: tuple[str, ...]


class Cause(NamedTuple):
    """Why a value may differ between replicas: where that came from, through the shortest chain.

    Attributes:
        site: The input of the program, or the equation, that made the difference or passed it on.
        parent: The cause of the operand that it came through; None where the difference begins.
        depth: How many causes come before this one.
    """

    site: "Input | Equation"
    parent: "Cause | None" = None
    depth: int = 0

    def chain(self) -> list["Cause"]:
        """From where the difference begins to this cause."""
        links, link = [], self
        while link is not None:
            links.append(link)
            link = link.parent
        return links[::-1]


Variation: TypeAlias = dict[str, Cause]  # mesh axis -> why the value may differ along it; empty: mirrored
REPLICATED: Variation = {}


def prove(program: Jaxpr, inputs: Sequence["Input"], axes: Sequence[str]) -> list[Variation]:
    """What is known of each output of `program`, the body of a `shard_map`.

    Args:
        program: The traced replica function.
        inputs: For each input, its name and the axes along which it may differ.
        axes: The mesh axes that replicas lie along.

    Returns:
        For each output, the axes along which it may differ and why; `{}` is proved mirrored.

    Raises:
        DivergentCollectiveError: Some replicas may reach a collective that others do not.

    Warns:
        RepeatedSumWarning: `all_reduce("sum", x)` of an `x` that is mirrored already.

    Source:
        P. Cousot and R. Cousot, "Abstract interpretation: a unified lattice model for static analysis of programs",
        POPL 1977. The lattice here has one bit an axis.
    """
    flow = _Flow(frozenset(axes))
    outputs = flow.follow(program, [{axis: Cause(one) for axis in one.axes} for one in inputs], REPLICATED)
    flow.warn()
    return outputs


def find_reductions(program: Jaxpr, inputs: Sequence["Input"], axes: Sequence[str]) -> dict[int, tuple[Equation, bool]]:
    """Returns the sums over `axes` in `program`, each with whether an operand may differ, by the identity of the equation.

    Raises:
        DivergentCollectiveError: Some replicas may reach a collective that others do not.
    """
    flow = _Flow(frozenset(axes))
    flow.follow(program, [{axis: Cause(one) for axis in one.axes} for one in inputs], REPLICATED)
    return flow.reductions


def explain_cause(cause: Cause) -> str:
    """The chain of causes in words, a line for each place in the user's code."""
    start, *links = [link.site for link in cause.chain()]
    if not isinstance(start, Input):
        links.insert(0, start)
    places = [
        (place, equation.primitive.name)
        for equation in links
        if isinstance(equation, Equation) and (place := source_lines.equation_frame(equation))
    ]
    lines = [f"{start.name}, which holds one value a replica"] if isinstance(start, Input) else []
    for place, group in itertools.groupby(places, key=lambda pair: pair[0]):
        names = list(dict.fromkeys(name for _, name in group))
        steps = ", ".join(names if len(names) <= 3 else [names[0], "...", names[-1]])
        lines.append(f"{steps} at {place} in {place.function}")
    if len(lines) > 8:
        lines[5:-2] = [f"... {len(lines) - 7} places more ..."]
    return "\n    -> ".join(lines)


def fix_for(cause: Cause) -> str:
    """What to do about a value that differs for this reason and should not."""
    start = cause.chain()[0].site
    kind = "input" if isinstance(start, Input) else start.primitive.name
    return _WAYS_OUT.get(kind, _WAYS_OUT["input"])


_WAYS_OUT = {
    "input": "Reduce what is computed from it over the replicas before it is stored: gradients with "
    '`jdist.all_reduce("mean", grads)` ahead of the optimizer, statistics and metrics likewise.',
    "axis_index": "Each replica has its own number, and its own `replica_key`: use them within the step, and store "
    "what does not depend on them (the key that was folded, not the folded one), or all-reduce the result.",
    "io_callback": "Every replica calls back by itself and may get another answer: make the value on the host and "
    "pass it in.",
    "rng_uniform": "Every device has a generator of its own: draw from a key (`jax.random`).",
    "new_ref": "jdist does not follow what is written to a mutable reference (`jax.Ref`): return the value instead.",
}

_REPEATED_SUM = (
    "all_reduce(SUM) of a value that is the same on every replica multiplies it by the number of replicas. If it was "
    "reduced before, drop this sum; if the product is meant, multiply by `jdist.num_replicas()`."
)
_warned: dict[str | tuple[str, type[Warning], int], int] = {}  # once a line, where warnings are shown once


def warn_once(message: str, category: type[Warning], place: source_lines.Frame) -> None:
    """Warns on a line of the user's code; once per line, where warnings are shown once."""
    warnings.warn_explicit(message, category, place.file, place.line, registry=_warned)


class _Flow:
    """One walk over a program: knowledge flows from operands to results."""

    def __init__(self, axes: frozenset[str]):
        self._axes = axes
        # The last look at an equation is the one at the fixed point, so a later look replaces an earlier.
        self._sums: dict[int, tuple[Equation, bool]] = {}
        self._programs: dict[int, Jaxpr] = {}  # of a sum: the program that it is in
        # By identity: the sums, and whether an operand may differ.
        self.reductions: dict[int, tuple[Equation, bool]] = {}

    def follow(self, program: Jaxpr, inputs: Sequence[Variation], control: Variation) -> list[Variation]:
        """The knowledge of the program's outputs; `control` says why replicas may not all be running it."""
        known = {var: value for var, value in zip(program.invars, inputs, strict=True) if value}

        def look(atoms: Sequence[Any]) -> list[Variation]:
            return [REPLICATED if isinstance(atom, Literal) else known.get(atom, REPLICATED) for atom in atoms]

        for equation in program.eqns:
            if equation.primitive.name == "name":
                self._programs[id(equation)] = program
            rule = _RULES.get(equation.primitive.name, _Flow._other)
            results = rule(self, equation, look(equation.invars), control)
            for var, value in zip(equation.outvars, results, strict=True):
                if value:
                    known[var] = value
        return look(program.outvars)

    def warn(self) -> None:
        """Says which sums add up the same value again and again."""
        for equation, repeated in self._sums.values():
            place = self._place(equation) if repeated else None
            if place:
                warn_once(_REPEATED_SUM, RepeatedSumWarning, place)

    def _place(self, equation: Equation) -> source_lines.Frame | None:
        """The user's line of a sum. Of a sum that aggregates a write to the state: the line that computed what is written."""
        place = source_lines.equation_frame(equation)
        if place is None or not source_lines.is_in_jdist(place):
            return place
        (operand,), program = equation.invars, self._programs[id(equation)]
        maker = next((one for one in program.eqns if operand in one.outvars), None)
        written = source_lines.equation_frame(maker) if maker else None
        return source_lines.caller_frame() if written is None or source_lines.is_in_jdist(written) else written

    def _other(self, equation: Equation, operands: list[Variation], control: Variation) -> list[Variation]:
        result = _join(equation, operands)
        held = jax_compat.contents(equation)
        if held.names or held.programs or held.opaque or equation.effects or equation.primitive.name in _OWN:
            result = self._beyond_operands(equation, held, control) | result
            # How it calls the programs that it holds is not known, only that nothing differs there for another reason.
            for program in held.programs:
                self.follow(program, [result] * len(program.invars), control)
        return [result] * len(equation.outvars)

    def _beyond_operands(self, equation: Equation, held: jax_compat.Contents, control: Variation) -> Variation:
        """Along which axes results may differ for a reason that is no operand: something here, or in a program within."""
        parts = list(_with_all_inside(equation, held))
        waits = [inner.names for part, inner in parts if part.primitive.name not in _LOCAL]
        self._check_all_arrive(equation, self._axes & frozenset().union(*waits), control)
        own = any(part.primitive.name in _OWN or inner.opaque for part, inner in parts)
        if own or any(map(jax_compat.may_vary_between_replicas, equation.effects)):
            return dict.fromkeys(self._axes, Cause(equation))
        named = frozenset().union(*(inner.names for _, inner in parts))
        return dict.fromkeys(self._axes & named, Cause(equation))

    def _agree(self, equation: Equation, operands: list[Variation], control: Variation) -> list[Variation]:
        if equation.params.get("axis_index_groups") is not None:
            return self._other(equation, operands, control)
        named = self._axes & jax_compat.contents(equation).names
        self._check_all_arrive(equation, named, control)
        if named and equation.primitive.name == "psum":
            self.reductions[id(equation)] = equation, any(operands)
        return [_passed_on(equation, {a: c for a, c in value.items() if a not in named}) for value in operands]

    def _name(self, equation: Equation, operands: list[Variation], control: Variation) -> list[Variation]:
        if equation.params["name"] == SUM_MARK:
            constant = isinstance(equation.invars[0], Literal)
            self._sums[id(equation)] = equation, not any(operands) and not constant
        return operands

    def _each(self, equation: Equation, operands: list[Variation], control: Variation) -> list[Variation]:
        return [_passed_on(equation, value) for value in operands]

    def _call(self, equation: Equation, operands: list[Variation], control: Variation) -> list[Variation]:
        # Sound, because the results are those of this program, and no other program of the equation is run.
        call = calls.call_of(equation)
        if call is None:
            return self._other(equation, operands, control)
        return self.follow(call.program, call.operands(operands), control)

    def _cond(self, equation: Equation, operands: list[Variation], control: Variation) -> list[Variation]:
        predicate = _passed_on(equation, operands[0])
        branches = [jax_compat.open_jaxpr(branch) for branch in equation.params["branches"]]
        results = [self.follow(branch, operands[1:], predicate | control) for branch in branches]
        return [_nearest(predicate, *alternatives) for alternatives in zip(*results, strict=True)]

    def _while(self, equation: Equation, operands: list[Variation], control: Variation) -> list[Variation]:
        test, body = (jax_compat.open_jaxpr(equation.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
        first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        test_consts, body_consts = operands[:first], operands[first : first + second]

        def turn(carry: list[Variation]) -> list[Variation]:
            (predicate,) = self.follow(test, test_consts + carry, control)
            predicate = _passed_on(equation, predicate)
            if predicate:  # from the second turn on, not every replica asks
                self.follow(test, test_consts + carry, predicate | control)
            after = self.follow(body, body_consts + carry, predicate | control)
            return [_nearest(predicate, value) for value in after]

        return _fixed_point(turn, operands[first + second :])

    def _scan(self, equation: Equation, operands: list[Variation], control: Variation) -> list[Variation]:
        body = jax_compat.open_jaxpr(equation.params["jaxpr"])
        num_consts, num_carry = jax_compat.scan_counts(equation)
        consts, start, slices = (
            operands[:num_consts],
            operands[num_consts : num_consts + num_carry],
            operands[num_consts + num_carry :],
        )
        ys: list[Variation] = []

        def turn(carry: list[Variation]) -> list[Variation]:
            after = self.follow(body, consts + carry + slices, control)
            ys[:] = after[num_carry:]
            return after[:num_carry]

        return _fixed_point(turn, start) + ys

    def _check_all_arrive(self, equation: Equation, named: frozenset[str], control: Variation) -> None:
        divided = next((control[axis] for axis in named if axis in control), None)
        if divided is not None:
            place = source_lines.equation_frame(equation)
            raise DivergentCollectiveError(
                f"{equation.primitive.name} at {place} waits for every replica, and stands where some may not come: "
                "the predicate above it is not the same on all of them.\n"
                f"  It may differ because of\n    {explain_cause(divided)}\n"
                "  Make the predicate agree (`jdist.all_reduce` it), or move the collective out of the branch or loop."
            )


_Rule: TypeAlias = Callable[[_Flow, Equation, list[Variation], Variation], list[Variation]]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_AGREEING, _Flow._agree),
    **dict.fromkeys(calls.CALLS, _Flow._call),
    "name": _Flow._name,
    "optimization_barrier": _Flow._each,
    "cond": _Flow._cond,
    "while": _Flow._while,
    "scan": _Flow._scan,
}


def _fixed_point(turn: Callable[[list[Variation]], list[Variation]], carry: list[Variation]) -> list[Variation]:
    """The knowledge of a loop's carry after any number of turns; it only grows, so this ends."""
    while True:
        joined = [_nearest(old, new) for old, new in zip(carry, turn(carry), strict=True)]
        if all(old.keys() == new.keys() for old, new in zip(carry, joined, strict=True)):
            return joined
        carry = joined


def _with_all_inside(equation: Equation, held: jax_compat.Contents) -> Iterator[tuple[Equation, jax_compat.Contents]]:
    yield equation, held
    for program in held.programs:
        for inner in program.eqns:
            yield from _with_all_inside(inner, jax_compat.contents(inner))


def _nearest(*values: Variation) -> Variation:
    """All the axes of `values`, each with the cause that is nearest to where the difference began."""
    found: Variation = {}
    for value in values:
        for axis, cause in value.items():
            if axis not in found or cause.depth < found[axis].depth:
                found[axis] = cause
    return found


def _passed_on(equation: Equation, value: Variation) -> Variation:
    return {axis: Cause(equation, cause, cause.depth + 1) for axis, cause in value.items()} if value else REPLICATED


def _join(equation: Equation, operands: list[Variation]) -> Variation:
    return _passed_on(equation, _nearest(*operands)) if any(operands) else REPLICATED
