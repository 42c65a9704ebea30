"""The replication analysis: proves which values of a replica function are the same on every replica.

It is an abstract interpretation of the traced function (`interpreter`). For each value it computes the `Variation`: for each
mesh axis along which the value may differ between replicas, the cause. A value without any is *replicated*.

* Inputs vary along the axes of their placement, constants are replicated, and the results of an equation vary as its operands.
* A collective with the same result on every replica (`psum`, `pmax`, `pmin`, `all_gather`) removes its axes.
* Any other equation that names an axis (`axis_index`, `ppermute`, `psum_scatter`, `all_to_all`, and primitives that JAX adds)
  adds that axis, and so does an effect that is not known to be harmless.
* The carry of `scan` and `while` is followed to a fixed point, `cond` joins its branches, and the variation of a predicate is
  added to everything that it decides. Calls are followed. For an unknown primitive the operands are joined.

The analysis is sound: it never calls a value replicated that can differ, provided that the devices compute alike, that a
`pure_callback` is pure, and that the memory of `jnp.empty` is written before it is read.
A collective below a predicate that varies along the collective's own axis would wait forever: it is an error. So is a
`ppermute` below a predicate that varies along any axis, because it waits for all devices of the mesh on CPU.

In the body of a `shard_map` in the replica function, the axes of this `shard_map` are followed too: a block of an operand that
is split along an axis varies along it. The results are one value per replica again, so the proof is about replicas only.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax import core

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.errors import DivergentCollectiveError, RepeatedSumWarning
from jdist._src.core.jax_compat import Equation, Jaxpr, Literal
from jdist._src.jaxpr.causes import Cause, lines_of_places, shortened
from jdist._src.jaxpr.interpreter import (
    Function,
    Interpreter,
    ScanFunction,
    fixed_point,
    nested_equations,
    scan_to_fixed_point,
)
from jdist._src.jaxpr.marks import SUM_MARK, mark_of
from jdist._src.jaxpr.primitives import (
    NOT_WAITING,
    PER_DEVICE,
    REPLICATING_COLLECTIVES,
    VARYING_CASTS,
    WAITING_FOR_GROUP,
)


class Input(NamedTuple):
    """An input of a replica function.

    Attributes:
        name: The user's name for it, such as `batch['image']`.
        axes: The mesh axes along which it may vary; none for a replicated input.
    """

    name: str
    axes: tuple[str, ...]


VariationCause: TypeAlias = Cause[Input | Equation]
Variation: TypeAlias = dict[str, VariationCause]  # mesh axis -> why the value may vary along it
REPLICATED: Variation = {}


def prove(program: Jaxpr, inputs: Sequence[Input], axes: Sequence[str]) -> list[Variation]:
    """Returns the variation of each output of `program`, the body of a `shard_map`.

    Args:
        program: The traced replica function.
        inputs: For each input, its name and the axes along which it may vary.
        axes: The mesh axes of the replicas.

    Returns:
        For each output, the axes along which it may vary, with the causes; `{}` if it is proved replicated.

    Raises:
        DivergentCollectiveError: Some replicas may reach a collective that others do not.

    Warns:
        RepeatedSumWarning: `all_reduce("sum", x)` of an `x` that is replicated already.

    Source:
        P. Cousot and R. Cousot, "Abstract interpretation: a unified lattice model for static analysis of programs",
        POPL 1977. The lattice here has one bit per axis.
    """
    analysis = _Analysis(frozenset(axes))
    outputs = analysis.run_inputs(program, inputs)
    for equation, jaxpr, is_replicated in analysis.marked_sums.values():
        is_of_user = is_replicated and not source_lines.is_from_jdist(equation, *_METRIC_SUMS)
        place = _line_of_sum(equation, jaxpr) if is_of_user else None
        if place:
            warn_once(_REPEATED_SUM, RepeatedSumWarning, place)
    return outputs


def find_sums(program: Jaxpr, inputs: Sequence[Input], axes: Sequence[str]) -> dict[int, tuple[Equation, bool]]:
    """Returns the sums over `axes` in `program`, by the `id` of the equation, each with whether an operand may vary.

    Raises:
        DivergentCollectiveError: Some replicas may reach a collective that others do not.
    """
    analysis = _Analysis(frozenset(axes))
    analysis.run_inputs(program, inputs)
    return analysis.sums


def may_vary(program: Any, inputs: Sequence[bool], axes: Sequence[str]) -> list[bool]:
    """Returns whether each output of a part of a replica function may vary, without the errors and warnings of `prove`.

    Args:
        program: The closed jaxpr of the part. Its constants may be values of the function, which may vary.
        inputs: Whether each input may vary.
        axes: The mesh axes of the replicas.
    """
    jaxpr = jax_compat.consts_as_inputs(program)
    varying = [*(isinstance(value, core.Tracer) for value in program.consts), *inputs]
    try:
        outputs = _Analysis(frozenset(axes)).run_inputs(
            jaxpr, [Input("", tuple(axes) if one else ()) for one in varying]
        )
    except DivergentCollectiveError:  # more inputs vary than in the function
        return [True] * len(jaxpr.outvars)
    return list(map(bool, outputs))


def explain_cause(cause: VariationCause) -> str:
    """Returns the chain of causes as text, with one line per place in the user's code."""
    start, *sites = cause.chain()
    if not isinstance(start, Input):
        sites.insert(0, start)
    places = [
        (place, equation.primitive.name)
        for equation in sites
        if isinstance(equation, Equation) and (place := source_lines.equation_frame(equation))
    ]
    lines = [f"{start.name}, which holds one value per replica"] if isinstance(start, Input) else []
    return "\n    -> ".join(shortened([*lines, *lines_of_places(places)], 8))


def fix_for(cause: VariationCause, axes: Sequence[str]) -> str:
    """Returns advice for a value that varies for this reason over these mesh axes, and should be replicated."""
    start, *others = cause.chain()
    sites = [site for site in others if isinstance(site, Equation)]
    if any(source_lines.is_from_jdist(site, *_ACCUMULATED) for site in sites):
        return _ACCUMULATED_FIX
    if sites and (fix := batch_norm_fix(sites[-1], axes)):
        return f"These are statistics of each replica's part of the batch. {fix}"
    kind = "input" if isinstance(start, Input) else start.primitive.name
    return _FIXES.get(kind, _FIXES["input"])


def batch_norm_fix(equation: Equation, axes: Sequence[str]) -> str:
    """Returns advice if a batch normalization of a library traced `equation`, else an empty string."""
    for library, (file, fix) in _BATCH_NORMS.items():
        names = source_lines.functions_in_file(equation, library, file)
        if any(name.rpartition(".")[2] in ("__call__", "call") for name in names):
            axis_names = ", ".join(f'"{axis}"' for axis in axes)
            return fix.format(names=axis_names, axes=axis_names if len(axes) == 1 else f"({axis_names})")
    return ""


_FIXES = {
    "input": "Reduce the values that are computed from it over the replicas before they are stored: gradients with "
    '`jdist.all_reduce("mean", grads)` before the optimizer, and statistics and metrics likewise.',
    "axis_index": "Each replica has its own index and its own `replica_key`: use them within the step and store a value that "
    "does not depend on them (the key that was folded, not the folded one), or all-reduce the result.",
    "io_callback": "Each replica runs the callback separately and may receive another value: compute the value on the host "
    "and pass it as an argument.",
    "rng_uniform": "Each device has its own generator: draw from a key (`jax.random`).",
    "new_ref": "jdist does not analyze writes to a mutable reference (`jax.Ref`): return the value instead.",
}

# By library: the file of its batch normalization, and the statistics of the global batch.
_BATCH_NORMS = {
    "flax": ("normalization", "Write `BatchNorm(..., axis_name={axes})`."),
    "haiku": ("batch_norm", "Write `BatchNorm(..., cross_replica_axis={axes})`."),
    "equinox": ("batch_norm", 'Write `BatchNorm(..., axis_name=("batch", {names}))`.'),
    "keras": (
        "batch_normalization",
        "Keras has no `synchronized=True` on JAX. Use `jdist.ShardedStrategy()`, whose one replica normalizes the global "
        "batch, or another layer, such as `GroupNormalization`.",
    ),
}

# The sums of `jdist.eval_step`, which itself warns of a replicated batch.
_METRIC_SUMS = "training/eval_step.py", "EvalStep.__init__.<locals>.batch_metrics"
_ACCUMULATED = "sync/accumulation.py", "every.<locals>.update.<locals>.apply"  # passes the gradients to the optimizer
_ACCUMULATED_FIX = (
    "`jdist.sync.every` accumulates the gradients of each replica and does not reduce them. Put the reduction into its "
    "optimizer: `jdist.sync.every(optax.chain(jdist.sync.mean(), optimizer), k)`."
)

_REPEATED_SUM = (
    "all_reduce(SUM) of a value that is the same on every replica multiplies it by the number of replicas. If the value is "
    "reduced already, remove this sum; if the product is intended, multiply by `jdist.num_replicas()`."
)
_warned: dict[str | tuple[str, type[Warning], int], int] = {}  # the registry of warnings that are shown once per line


def warn_once(message: str, category: type[Warning], place: source_lines.Frame) -> None:
    """Warns on a line of the user's code, at most once per line unless the user's filters show warnings more often."""
    warnings.warn_explicit(message, category, place.file, place.line, registry=_warned)


def _line_of_sum(equation: Equation, jaxpr: Jaxpr) -> source_lines.Frame | None:
    """Returns the user's line of a sum; for a sum that aggregates a write to the state, the line that computed the value."""
    place = source_lines.equation_frame(equation)
    if place is None or not source_lines.is_in_jdist(place):
        return place
    (operand,) = equation.invars
    producer = next((one for one in jaxpr.eqns if operand in one.outvars), None)
    value_place = source_lines.equation_frame(producer) if producer else None
    if value_place is None or source_lines.is_in_jdist(value_place):
        return source_lines.caller_frame()
    return value_place


class _Analysis(Interpreter[Variation]):
    """Computes the variation of each value.

    Equations in loops are interpreted several times. The last time is at the fixed point, so it replaces the ones before.

    Attributes:
        marked_sums: By the `id` of the equation, each sum that the user wrote: its mark, the jaxpr that contains the mark, and
            whether the operand is replicated.
        sums: By the `id` of the equation, each sum over the axes, and whether an operand may vary.
    """

    def __init__(self, axes: frozenset[str]):
        self._replica_axes = self._axes = axes
        self._control: Variation = REPLICATED  # why replicas may not all run the current equation
        self.marked_sums: dict[int, tuple[Equation, Jaxpr, bool]] = {}
        self.sums: dict[int, tuple[Equation, bool]] = {}

    def run_inputs(self, program: Jaxpr, inputs: Sequence[Input]) -> list[Variation]:
        """Returns the variation of each output of `program`."""
        variations: list[Variation] = [{axis: Cause(one) for axis in one.axes} for one in inputs]
        return self.run(program, [REPLICATED] * len(program.constvars), variations)

    def constant(self, value: Any) -> Variation:
        return REPLICATED

    def primitive(self, jaxpr: Jaxpr, equation: Equation, operands: list[Variation]) -> list[Variation]:
        name = equation.primitive.name
        if name == "name":
            return self._name(jaxpr, equation, operands)
        return _RULES.get(name, _Analysis._other)(self, equation, operands)

    def call(self, equation: Equation, body: Function[Variation], operands: list[Variation]) -> list[Variation]:
        new_axes = jax_compat.manual_axes(equation)
        if not new_axes:
            return body(operands)  # sound, because no other jaxpr of the equation is run
        outer_axes, self._axes = self._axes, self._axes | new_axes
        splits = zip(operands, jax_compat.split_axes(equation), strict=True)
        blocks = [value | dict.fromkeys(new_axes & axes, Cause(equation)) for value, axes in splits]
        try:
            results = body(blocks)
        finally:
            self._axes = outer_axes
        return [{axis: cause for axis, cause in value.items() if axis in outer_axes} for value in results]

    def switch(
        self,
        equation: Equation,
        index: Variation,
        branches: Sequence[Function[Variation]],
        operands: Sequence[Variation],
    ) -> list[Variation]:
        predicate = _propagate(equation, index)
        with self._below(predicate):
            results = [branch(operands) for branch in branches]
        return [_join(predicate, *alternatives) for alternatives in zip(*results, strict=True)]

    def while_loop(
        self,
        equation: Equation,
        test: Callable[[Sequence[Variation]], Variation],
        body: Function[Variation],
        carry: Sequence[Variation],
    ) -> list[Variation]:
        def step(carry: Sequence[Variation]) -> list[Variation]:
            predicate = _propagate(equation, test(carry))
            with self._below(predicate):
                if predicate:  # from the second iteration on, not every replica runs the test
                    test(carry)
                new_carry = body(carry)
            return [_join(predicate, value) for value in new_carry]

        return fixed_point(step, carry, _join, _vary_alike)

    def scan(
        self, equation: Equation, body: ScanFunction[Variation], carry: Sequence[Variation], xs: Sequence[Variation]
    ) -> list[Variation]:
        last, ys = scan_to_fixed_point(body, carry, xs, _join, _vary_alike)
        return last + ys

    @contextlib.contextmanager
    def _below(self, predicate: Variation) -> Iterator[None]:
        outer, self._control = self._control, predicate | self._control
        try:
            yield
        finally:
            self._control = outer

    def _name(self, jaxpr: Jaxpr, equation: Equation, operands: list[Variation]) -> list[Variation]:
        if mark_of(equation) == SUM_MARK:
            is_constant = isinstance(equation.invars[0], Literal)
            self.marked_sums[id(equation)] = equation, jaxpr, not any(operands) and not is_constant
        return operands

    def _barrier(self, equation: Equation, operands: list[Variation]) -> list[Variation]:
        return [_propagate(equation, value) for value in operands]

    def _replicating_collective(self, equation: Equation, operands: list[Variation]) -> list[Variation]:
        if jax_compat.has_axis_index_groups(equation):
            return self._other(equation, operands)
        named = self._axes & jax_compat.contents(equation).names
        self._check_all_arrive(equation, named)
        if named & self._replica_axes and equation.primitive.name == "psum":
            self.sums[id(equation)] = equation, any(operands)
        return [
            _propagate(equation, {axis: cause for axis, cause in value.items() if axis not in named})
            for value in operands
        ]

    def _other(self, equation: Equation, operands: list[Variation]) -> list[Variation]:
        result = _propagate(equation, _join(*operands)) if any(operands) else REPLICATED
        contents = jax_compat.contents(equation)
        is_per_device = equation.primitive.name in PER_DEVICE
        if contents.names or contents.jaxprs or contents.opaque or equation.effects or is_per_device:
            result = self._begun_by(equation) | result
            # How the primitive calls its jaxprs is not known; their inputs vary for no other reason than its results.
            for jaxpr in contents.jaxprs:
                self.run(jaxpr, [REPLICATED] * len(jaxpr.constvars), [result] * len(jaxpr.invars))
        return [result] * len(equation.outvars)

    def _begun_by(self, equation: Equation) -> Variation:
        """Returns the variation that begins at an equation or inside it, whatever its operands are."""
        inside = list(nested_equations(equation))
        for inner, contents in inside:
            named = self._axes & contents.names
            if named and inner.primitive.name not in NOT_WAITING:
                self._check_all_arrive(inner, named)
        is_opaque = any(inner.primitive.name in PER_DEVICE or contents.opaque for inner, contents in inside)
        if is_opaque or any(map(jax_compat.may_vary_between_replicas, equation.effects)):
            return dict.fromkeys(self._axes, Cause(equation))
        named = frozenset().union(*(contents.names for _, contents in inside))
        return dict.fromkeys(self._axes & named, Cause(equation))

    def _check_all_arrive(self, equation: Equation, named: frozenset[str]) -> None:
        """Raises if `equation`, which names the axes `named`, waits for replicas that may not reach it."""
        name = equation.primitive.name
        awaited = named if name in WAITING_FOR_GROUP else self._axes
        axis = min(
            (axis for axis in awaited if axis in self._control), key=lambda axis: axis not in named, default=None
        )
        if axis is None:
            return
        one, those, fix = "replica", "replicas", "`jdist.all_reduce` it"
        if axis not in self._replica_axes:
            one, those, fix = f"device along {axis!r}", f"devices along {axis!r}", f'`jax.lax.psum(x, "{axis}")`'
        reason = f"waits for every {one}"
        if axis not in named:
            reason = f"over {', '.join(sorted(named))} waits for every {one}, also along {axis} (XLA does on CPU)"
        raise DivergentCollectiveError(
            f"{name} at {source_lines.equation_frame(equation)} {reason}, but some {those} may not reach it: the "
            f"predicate above it may differ between {those}.\n"
            f"  It may differ because of\n    {explain_cause(self._control[axis])}\n"
            f"  Make the predicate the same on every {one} ({fix}), or move the collective out of the "
            "branch or loop."
        )


_RULES: dict[str, Callable[[_Analysis, Equation, list[Variation]], list[Variation]]] = {
    **dict.fromkeys(REPLICATING_COLLECTIVES, _Analysis._replicating_collective),
    **dict.fromkeys(VARYING_CASTS | {"optimization_barrier"}, _Analysis._barrier),
}


def _vary_alike(first: Variation, second: Variation) -> bool:
    return first.keys() == second.keys()


def _join(*values: Variation) -> Variation:
    """Returns the axes of all `values`, each with the cause that is nearest to where the variation begins."""
    joined: Variation = {}
    for value in values:
        for axis, cause in value.items():
            if axis not in joined or cause.depth < joined[axis].depth:
                joined[axis] = cause
    return joined


def _propagate(equation: Equation, value: Variation) -> Variation:
    """Returns the variation of a result of `equation` that depends on `value`."""
    return {axis: Cause(equation, cause, cause.depth + 1) for axis, cause in value.items()} if value else REPLICATED
