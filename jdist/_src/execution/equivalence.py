"""The equivalence of a step: whether N replicas compute the results that one device computes from the global batch.

The step is traced once more, as the only replica, with the global batch. `jaxpr.equivalence` compares both traces. This takes
about as long as the first trace, so it is not a part of it: it is done when JAX compiles the program, which takes longer and
is not done for shapes only, or when the verdicts are read.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import core
from jax.sharding import AbstractMesh

from jdist._src.core import jax_compat, source_lines
from jdist._src.core.errors import NotEquivalentError, NotEquivalentWarning
from jdist._src.core.trace_key import outside_mesh
from jdist._src.core.tree import PyTree, one_line
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.backend import ProgramSpec
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, Traced, TraceFn, UserCall
from jdist._src.jaxpr.counterexamples import ResultForm, with_counterexamples
from jdist._src.jaxpr.equivalence import relate
from jdist._src.jaxpr.equivalence_verdict import EQUIVALENT, LOCAL_NORMALIZATION, ResultKind, Verdict, verdict_of
from jdist._src.jaxpr.relations import REPLICATED, AnyRelation, Lost, Relation, Split
from jdist._src.jaxpr.replication import warn_once
from jdist._src.values.aggregation import VariableAggregation
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.sharded import Sharded
from jdist._src.values.sync_on_read import SyncOnRead

_COMPILATION = "/jax/core/compile/backend_compile_duration"  # the event after a compilation, before the first call
_MAX_WAITING = 32  # programs that were traced and may still be compiled


class EquivalenceCheck(Stage):
    """Compares each trace of a step with the step on one device.

    Mutable: it warns once, although a step is traced for several shapes, as of a padded batch.

    Args:
        spec: The program.
    """

    def __init__(self, spec: ProgramSpec):
        self._spec = spec
        self._has_warned = False

    def wrap_trace(self, trace: TraceFn) -> TraceFn:
        """See `Stage`. With `equivalence="error"` it compares during the trace, before the program is compiled."""

        def trace_to_compare(args: Arguments) -> Traced:
            spec, traced = self._spec, trace(args)
            call = spec.user_call(args)
            if not compares(call, spec):
                return traced
            comparison = Comparison(traced, call, spec, self._report)
            # A constant that is a tracer is known only during the trace of the user's `jax.jit`.
            if spec.equivalence == "error" or any(isinstance(const, core.Tracer) for const in traced.jaxpr.consts):
                comparison()
            else:
                _compare_when_compiled(comparison)
            return traced._replace(proof=dataclasses.replace(traced.proof, _comparison=comparison))

        return trace_to_compare

    def _report(self, verdicts: Sequence[tuple[str, Verdict]], fn: Callable[..., Any]) -> None:
        """Warns of the leaves of the state that are not equivalent, or raises an error, as `equivalence=` requires.

        Args:
            verdicts: The name of each leaf of the state, and the verdict on it.
            fn: The function of the step.

        Raises:
            NotEquivalentError: `equivalence="error"`, and a leaf is not equivalent.

        Warns:
            NotEquivalentWarning: `equivalence="warn"`, and a leaf is not equivalent, other than by design.
        """
        wrong = [(name, verdict) for name, verdict in verdicts if verdict.name == "not equivalent"]
        if self._spec.equivalence == "error" and wrong:
            raise NotEquivalentError(_message(wrong, len(verdicts), self._spec, fn))
        wrong = [(name, verdict) for name, verdict in wrong if not verdict.by_design]
        if wrong and not self._has_warned:
            self._has_warned = True
            place = min(wrong, key=lambda pair: pair[1].depth)[1].place
            if place is None or not source_lines.is_user_frame(place):
                place = source_lines.caller_frame() or place or source_lines.Frame("<unknown>", 0, self._spec.name)
            warn_once(_message(wrong, len(verdicts), self._spec, fn), NotEquivalentWarning, place)


class Comparison:
    """The comparison of a traced step with the step on one device. It is made once, when it is called for the first time.

    Mutable: it holds the jaxpr until then, and the verdicts after it.

    Args:
        traced: The trace.
        call: The call of the user's function.
        spec: The program.
        report: Is called with the name of each leaf of the state and the verdict on it, and the user's function.
    """

    def __init__(
        self,
        traced: Traced,
        call: UserCall,
        spec: ProgramSpec,
        report: Callable[[Sequence[tuple[str, Verdict]], Callable[..., Any]], None],
    ):
        # No value of the trace is held: `jax.checking_leaks` would report it.
        results, local, retrace = traced.results, traced.jaxpr, traced.retrace
        rows = zip(results.names, results.items, results.wrappers, results.trees, strict=True)
        kinds: list[tuple[str, list[ResultKind]]] = [
            (name, [kind_of(item, wrapper)] * len(jax.tree.leaves(tree))) for name, item, wrapper, tree in rows
        ]
        call, num_state = call.with_arguments(*_shapes(call)), results.num_state

        def compare() -> None:
            with contextlib.nullcontext() if jax_compat.is_tracing() else outside_mesh():
                single = trace_single_replica(call, spec, retrace)
                items = jax.tree.leaves((call.args, call.kwargs), is_leaf=is_distributed)
                self._verdicts = _verdicts(local, single, items, kinds, spec)
            report(list(self._verdicts.items())[:num_state], call.fn)

        self._compare: Callable[[], None] | None = compare
        self._verdicts: dict[str, Verdict] = {}

    def __call__(self) -> Mapping[str, Verdict]:
        """Returns the verdict on each result by name.

        Raises:
            NotEquivalentError: `equivalence="error"`, and a leaf of the state is not equivalent.

        Warns:
            NotEquivalentWarning: In the first call, with `equivalence="warn"`, a leaf is not equivalent, other than by design.
        """
        if self._compare is not None:
            compare, self._compare = self._compare, None
            compare()
        return self._verdicts


_waiting: collections.deque[Comparison] = collections.deque(maxlen=_MAX_WAITING)


def _compare_when_compiled(comparison: Comparison) -> None:
    """Makes a comparison after the next compilation: JAX compiles the program, or the `jax.jit` around it."""
    _listen()
    _waiting.append(comparison)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def _note_compilation(event: str, duration_secs: float, **metadata: str | int) -> None:
    if event != _COMPILATION or not _waiting or jax_compat.is_tracing():  # a constant is compiled during a trace
        return
    comparisons = list(_waiting)
    _waiting.clear()
    for comparison in comparisons:
        comparison()


class SingleReplicaTrace(NamedTuple):
    """The trace of a step as the only replica.

    Attributes:
        program: The closed jaxpr, or None if the step cannot be traced so.
        reason: Why not.
    """

    program: Any
    reason: str = ""


def compares(call: UserCall, spec: ProgramSpec) -> bool:
    """Whether a call is compared with one replica: of a step of several replicas that run together, with values that differ."""
    is_synchronous = spec.context.num_replicas_in_sync > 1 and not spec.context.is_asynchronous
    if not is_synchronous or spec.is_global:
        return False
    items = jax.tree.leaves((tuple(call.args), dict(call.kwargs)), is_leaf=is_distributed)
    return any(is_distributed(item) and not item._is_replicated for item in items)


def trace_single_replica(
    call: UserCall, spec: ProgramSpec, trace: Callable[[UserCall, ProgramSpec], Any]
) -> SingleReplicaTrace:
    """Traces a call as the only replica, with the global batch.

    Args:
        call: The call of the user's function, on tracers or shapes.
        spec: The program.
        trace: Traces a call for one replica, and returns the closed jaxpr.
    """
    number = spec.context.num_replicas_in_sync
    backend = copy.copy(spec.backend)
    backend.replicas = _only_replica(spec.backend.replicas)
    context = dataclasses.replace(spec.context, num_replicas_in_sync=1)
    single_spec = dataclasses.replace(spec, backend=backend, context=context)

    def trace_shapes(args: PyTree, kwargs: PyTree) -> PyTree:
        programs.append(trace(call.with_arguments(args, kwargs), single_spec))
        return 0

    programs: list[Any] = []
    shapes = jax.tree.map(lambda item: _global_shapes(item, number), _shapes(call), is_leaf=is_distributed)
    try:
        jax.eval_shape(trace_shapes, *shapes)
    except Exception as error:  # the user's function, which may have a fixed size of a batch
        reason = f"it cannot be traced with the global batch: {type(error).__name__}: {one_line(str(error))}"
        return SingleReplicaTrace(None, reason)
    return SingleReplicaTrace(programs[0])


def _only_replica(replicas: Replicas) -> Replicas:
    """Returns one replica, along axes of the same names."""
    mesh = replicas.mesh
    sizes = [1 if axis in replicas.mesh_axes else size for axis, size in mesh.shape.items()]
    abstract = AbstractMesh(tuple(sizes), mesh.axis_names, axis_types=mesh.axis_types)
    return dataclasses.replace(replicas, mesh=abstract, size=1)


def _shapes(call: UserCall) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Returns the arguments of a call as shapes in their wrappers."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        aval = jax.typeof(leaf)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    return jax.tree.map(shape, (tuple(call.args), dict(call.kwargs)))


def _global_shapes(item: Any, number: int) -> Any:
    """Returns the shapes of an argument for one device: a batch `[replica, batch, ...]` becomes `[1, replica * batch, ...]`."""

    def shape(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dims = leaf.shape
        if isinstance(item, PerReplica):
            dims = (1, number * dims[1], *dims[2:]) if len(dims) > 1 else (1,)
        elif isinstance(item, SyncOnRead):
            dims = (1, *dims[1:])
        return jax.ShapeDtypeStruct(dims, leaf.dtype, weak_type=leaf.weak_type)

    return jax.tree.map(shape, item)


def _relations_of_inputs(items: Sequence[Any], axes: tuple[str, ...], number: int) -> list[AnyRelation]:
    """Returns the relation of the block of each leaf of the arguments."""
    return [_relation(item, leaf, axes, number) for item in items for leaf in jax.tree.leaves(item)]


def _relation(item: Any, leaf: Any, axes: tuple[str, ...], number: int) -> AnyRelation:
    if not is_distributed(item) or item._is_replicated:
        return REPLICATED
    if isinstance(item, Sharded):
        return Relation(splits=(Split(axes, 0),))
    if isinstance(item, SyncOnRead):
        if item.trainable:
            return Lost("design")
        if item.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            factor = 1.0 if item.aggregation is VariableAggregation.SUM else 1 / number
            return Relation(factor, partial=frozenset(axes))
        return Lost("input")
    is_batch = isinstance(item, PerReplica) and item.spec is None and len(leaf.shape) > 1
    return Relation(splits=(Split(axes, 1),)) if is_batch else Lost("input")


def _verdicts(
    local: Any,
    single: SingleReplicaTrace,
    items: Sequence[Any],
    kinds: Sequence[tuple[str, list[ResultKind]]],
    spec: ProgramSpec,
) -> dict[str, Verdict]:
    """Returns the verdict on each result by name: the verdict on its first leaf that is not equivalent. See `leaf_verdicts`.

    Args:
        local: The closed jaxpr of one replica of several.
        single: The trace as the only replica.
        items: The arguments.
        kinds: The name of each result, and how each of its leaves is read.
        spec: The program.
    """
    remaining = iter(leaf_verdicts(local, single, items, [kind for _, leaves in kinds for kind in leaves], spec))
    worst = lambda verdicts: max(verdicts, key=lambda one: _RANK[one.name], default=EQUIVALENT)
    return {name: worst([next(remaining) for _ in leaves]) for name, leaves in kinds}


def leaf_verdicts(
    local: Any, single: SingleReplicaTrace, items: Sequence[Any], kinds: Sequence[ResultKind], spec: ProgramSpec
) -> list[Verdict]:
    """Returns the verdict on each leaf of the results, from the traces of a step on several replicas and on one.

    Args:
        local: The closed jaxpr of one replica of several.
        single: The trace as the only replica.
        items: The arguments.
        kinds: How each leaf is read.
        spec: The program.
    """
    if single.program is None:
        return [Verdict("unknown", single.reason)] * len(kinds)
    names = spec.context.axes
    sizes = {axis: size for axis, size in spec.backend.replicas.axis_sizes if axis in names and size > 1}
    inputs = _relations_of_inputs(items, tuple(sizes), spec.context.num_replicas_in_sync)
    try:
        relations = relate(local, single.program, inputs, sizes)
        leaves = [
            verdict_of(relation, kind, sizes, kind == "replicated")
            for relation, kind in zip(relations, kinds, strict=True)
        ]
        return with_counterexamples(leaves, local, single.program, inputs, list(map(ResultForm, kinds)), sizes)
    except Exception as error:  # an equation in a form that the rules do not know must not stop a step
        return [Verdict("unknown", f"the analysis failed: {type(error).__name__}: {one_line(str(error))}")] * len(kinds)


_RANK = {"equivalent": 0, "unknown": 1, "not equivalent": 2}
_READ_AS: dict[VariableAggregation, ResultKind] = {VariableAggregation.SUM: "sum", VariableAggregation.MEAN: "mean"}


def kind_of(item: Any, wrapper: Any) -> ResultKind:
    """Returns how the leaves of a result are read, from its own wrapper or None, and from the class that it is placed in."""
    if wrapper is None or wrapper._is_replicated:
        return "replicated"
    if wrapper is Sharded:
        return "split"
    if isinstance(item, SyncOnRead):
        return _READ_AS.get(item.aggregation, "per replica")
    return "per replica"


def _message(wrong: Sequence[tuple[str, Verdict]], num_state: int, spec: ProgramSpec, fn: Callable[..., Any]) -> str:
    (name, verdict), *others = sorted(wrong, key=lambda pair: pair[1].depth)  # the nearest one to the cause
    more = ", ".join(other for other, _ in others[:3]) + (", ..." if len(others) > 3 else "")
    also = f" (nor {'is' if len(others) == 1 else 'are'} {len(others)} more of {num_state}: {more})" if others else ""
    number, reason = spec.context.num_replicas_in_sync, verdict.reason
    chain = "\n    -> ".join(verdict.lines)
    because = f"\n  Because of\n    {chain}" if chain else ""
    is_of_jdist = (getattr(fn, "__module__", None) or "").startswith("jdist.")  # of a `Trainer` or `jdist.train_step`
    if reason == LOCAL_NORMALIZATION:  # one layer is the cause, whatever depends on it
        where = f", at {verdict.place}" if verdict.place and source_lines.is_user_frame(verdict.place) else ""
        averaged = ". The running statistics are averaged over the replicas" * (is_of_jdist and ".model_state" in name)
        reason, also, because = f"{reason}{where}{averaged}", "", ""
    fix = f"\n  {verdict.fix}" if verdict.fix else ""
    ignore = 'strategy.step(fn, equivalence="ignore")'
    if is_of_jdist:
        ignore = 'warnings.simplefilter("ignore", jdist.NotEquivalentWarning)'
    return (
        f"{name} of `{spec.name}` on {number} replicas is not what one device computes from the global batch{also}: "
        f"{reason}.{because}{fix}\n  If this is intended: `{ignore}`."
    )
