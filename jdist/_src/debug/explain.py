"""`explain`: the replication proof of a step, leaf by leaf."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.arguments import check_callable
from jdist._src.core.tree import PyTree
from jdist._src.debug.explanation import Explanation, LeafExplanation
from jdist._src.debug.flow_drawing import Flow, FlowNode
from jdist._src.execution.equivalence import kind_of, leaf_verdicts
from jdist._src.execution.program import Program
from jdist._src.execution.replicate import WRAPPER_ADVICE, TracedReplica, analysis_inputs
from jdist._src.jaxpr import replication
from jdist._src.jaxpr.collective_lines import collective_name
from jdist._src.jaxpr.equivalence_verdict import ResultKind, Verdict
from jdist._src.jaxpr.origins import Origin, Origins, find_origins
from jdist._src.jaxpr.replication import Variation
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.current import get_strategy
from jdist._src.strategies.description import grouped, listed
from jdist._src.strategies.late_bound_step import Step
from jdist._src.values.base import named_values
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.remote_array import RemoteArray

_MAX_BOXES = {"replicated": 4, "varying": 4, "not proved": 8}  # of the picture: of a state, and of outputs


def explain(step: Any, *args: PyTree, strategy: Strategy | None = None, **named: PyTree) -> Explanation:
    """Returns the proofs of a step, leaf by leaf: whether it is replicated or varies, whether one device computes it, and why.

    The step is traced for arguments of these shapes. Nothing is compiled, run or donated. It also explains a step that raises
    `NotMirroredError`.

    Args:
        step: The result of `strategy.step` or of `jdist.step`, or a function `(state, *inputs) -> (state, outputs)`.
        args: The arguments of the step: arrays, or their shapes (`jax.ShapeDtypeStruct`).
        strategy: The strategy; by default the one that made the step, or the current strategy.
        named: The inputs by name, and static values.

    Returns:
        A `jdist.debug.Explanation`, which prints as a table. `explanation.save("step.svg")` writes a picture.

    Raises:
        TypeError: `step` is not a step and not a function.
        ValueError: Another strategy made `step`.
        DivergentCollectiveError: Some replicas may reach a collective that others do not.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> @strategy.step
        ... def step(w, x):
        ...     return w - x.mean(), jdist.all_reduce("mean", x.sum())
        >>> state, output = jdist.debug.explain(step, 1.0, strategy.split(np.ones(8))).leaves
        >>> state.replicated, state.reasons[0], output.replicated
        (False, 'x, which holds one value per replica', True)
    """
    program, args = _program(step, args, named, strategy)
    args = jax.tree.map(_shape_if_remote, args, is_leaf=lambda leaf: isinstance(leaf, RemoteArray))
    traced, single = program._trace_replica(*args)
    axes = program._spec.varying_axes
    jaxpr = jax_compat.open_jaxpr(traced.program)
    inputs = analysis_inputs(traced.function.items, traced.names, axes)
    variations = replication.prove(jaxpr, inputs, axes)
    origins, equations = find_origins(jaxpr, axes)
    leaves = _leaves(traced, inputs, variations, origins, equations)
    if single is not None:
        kinds: list[ResultKind] = [kind_of(item, wrapper) for item, wrapper in _placements(traced, variations)]
        verdicts = leaf_verdicts(traced.program, single, traced.function.items, kinds, program._spec)
        unproved = Verdict("unknown", "it is not proved to be replicated")
        pairs = zip(leaves, verdicts, strict=True)
        leaves = [dataclasses.replace(leaf, equivalence=unproved if leaf.fix else verdict) for leaf, verdict in pairs]
    flow = _flow(inputs, leaves, origins, equations)
    return Explanation(program._name, program.backend.replicas.size, tuple(leaves), flow)


def _program(
    step: Any, args: tuple[PyTree, ...], named: dict[str, PyTree], strategy: Strategy | None
) -> tuple[Program, tuple[PyTree, ...]]:
    if isinstance(step, Step):
        step = step.on(strategy or step._current_strategy())
    if not isinstance(step, Program):
        check_callable(step)
        step = (strategy or get_strategy()).step(step)
    elif strategy is not None and step.backend is not strategy._backend:
        raise ValueError("Another strategy made the step. Pass its function, `step.__wrapped__`, or no `strategy`.")
    return step._forms.bind(args, named)


def _shape_if_remote(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, RemoteArray) else leaf


def _leaves(
    traced: TracedReplica,
    inputs: Sequence[replication.Input],
    variations: Sequence[Variation],
    origins: Sequence[Origins],
    equations: dict[int, Origin],
) -> list[LeafExplanation]:
    results, remaining = traced.results, iter(zip(variations, origins, strict=True))
    leaves: list[LeafExplanation] = []
    for number, (item, name) in enumerate(zip(results.items, results.names, strict=True)):
        must_be_replicated = item._is_replicated if item is not None else number < results.num_state
        for leaf_name, _ in named_values(name, 0 if item is None else item.tree):
            variation, sources = next(remaining)
            if not variation:
                leaves.append(LeafExplanation(leaf_name, True, _reasons(inputs, sources, equations)))
                continue
            cause = min(variation.values(), key=lambda cause: cause.depth)
            reasons = tuple(replication.explain_cause(cause).split("\n    -> "))
            fix = f"{replication.fix_for(cause, list(variation))} {WRAPPER_ADVICE}" if must_be_replicated else ""
            leaves.append(LeafExplanation(leaf_name, False, reasons, fix))
    return leaves


def _placements(traced: TracedReplica, variations: Sequence[Variation]) -> list[tuple[Any, Any]]:
    """Returns for each leaf the wrapper that the step returned, or None, and the class of the wrapper that it is placed in."""
    results, remaining = traced.results, iter(variations)
    placements = []
    for number, item in enumerate(results.items):
        for _ in jax.tree.leaves(0 if item is None else item.tree):
            varies = bool(next(remaining))
            is_per_replica = varies and number >= results.num_state
            wrapper = type(item) if item is not None else PerReplica if is_per_replica else None
            placements.append((item, wrapper))
    return placements


def _reasons(inputs: Sequence[replication.Input], sources: Origins, equations: dict[int, Origin]) -> tuple[str, ...]:
    """Returns why a leaf with these origins is replicated."""
    lines = [_line(equations[number].equation) for number in sorted(sources & equations.keys())]
    if lines:
        return (f"result of {listed(list(dict.fromkeys(lines)), 3)}",)
    names = [inputs[number].name for number in sorted(sources)]
    return (f"computed from replicated inputs: {listed(names, 3)}" if names else "a constant",)


def _line(equation: jax_compat.Equation) -> str:
    place = source_lines.equation_frame(equation)
    return collective_name(equation) + (f" at {place}" if place else "")


class _Group(NamedTuple):
    """Inputs, equations or results that share a box.

    Attributes:
        node: The box.
        members: Their numbers.
    """

    node: FlowNode
    members: Sequence[int]


def _flow(
    inputs: Sequence[replication.Input],
    leaves: Sequence[LeafExplanation],
    origins: Sequence[Origins],
    equations: dict[int, Origin],
) -> Flow:
    """Returns the boxes of the picture."""
    input_kinds = ["varying" if one.axes else "replicated" for one in inputs]
    used = frozenset().union(*origins, *(origin.origins for origin in equations.values()))
    numbers = [number for number in range(len(inputs)) if number in used]
    input_groups = [
        _Group(FlowNode((root, _count(members)), kind), members)
        for (root, kind), members in _by_key(numbers, lambda i: (_root(inputs[i].name), input_kinds[i])).items()
    ]
    collective_groups = [
        _Group(FlowNode(key[:2], key[2]), members)
        for key, members in _by_key(sorted(equations), lambda i: _collective_key(equations[i])).items()
    ]
    boxes = {i: box for box, group in enumerate([*input_groups, *collective_groups]) for i in group.members}
    collectives = [
        node._replace(sources=_boxes(boxes, (equations[i].origins for i in members)))
        for node, members in collective_groups
    ]
    results = []
    by_kind = _by_key(range(len(leaves)), lambda i: (_root(leaves[i].path), _kind(leaves[i])))
    for (_, kind), members in by_kind.items():
        positions = {id(leaves[i]): i for i in members}
        for path, group in grouped([leaves[i] for i in members], _MAX_BOXES[kind], separator="["):
            sources = _boxes(boxes, (origins[positions[id(leaf)]] for leaf in group))
            lines = (path, f"{_count(group)}, {group[0].verdict}" if len(group) > 1 else group[0].verdict)
            results.append(FlowNode(lines, kind, sources))
    return Flow(tuple(group.node for group in input_groups), tuple(collectives), tuple(results))


def _collective_key(origin: Origin) -> tuple[str, str, str]:
    place = source_lines.equation_frame(origin.equation)
    kind = "replicated" if origin.replicates else "varying"
    return collective_name(origin.equation), str(place) if place else "", kind


def _kind(leaf: LeafExplanation) -> str:
    return "varying" if leaf.verdict == "one per replica" else leaf.verdict


def _root(name: str) -> str:
    return name.partition("[")[0].partition(".")[0]


def _count(members: Sequence[Any]) -> str:
    return f"{len(members):,} {'leaf' if len(members) == 1 else 'leaves'}"


def _boxes(boxes: dict[int, int], origins: Iterable[Origins]) -> tuple[int, ...]:
    return tuple(sorted({boxes[number] for number in frozenset().union(*origins)}))


def _by_key(numbers: Iterable[int], key: Callable[[int], Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for number in numbers:
        groups.setdefault(key(number), []).append(number)
    return groups
