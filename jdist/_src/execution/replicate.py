"""`replicate`: turns a function of one replica into a program over the mesh.

`replicate` runs while `jax.jit` traces the program around it, in four steps:

1. Remove the wrappers from the arguments.
2. Trace the function once, as the program of one replica. Gradients are local until they are reduced.
3. Prove which results are replicated, and refuse a state that is not.
4. Run the jaxpr on all devices, as the strategy's backend does, and put each result into its wrapper.

The result is the program that one would write by hand, so a call costs the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core import jax_compat
from jdist._src.core.errors import NotMirroredError
from jdist._src.core.jax_compat import Jaxpr
from jdist._src.core.tree import PyTree, named_leaves
from jdist._src.execution.backend import ProgramSpec, ReplicaFunction
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Proof, ReplicaFn, ReplicaResults, Traced, UserCall, item_names
from jdist._src.jaxpr import clip_check, replication
from jdist._src.jaxpr.batch_check import warn_of_replicated_batch
from jdist._src.jaxpr.count_check import warn_of_local_counts
from jdist._src.jaxpr.example_check import check_examples
from jdist._src.jaxpr.replication import Variation
from jdist._src.jaxpr.trace_errors import check_no_captured_ref, explain_trace_errors, note_arguments
from jdist._src.replica.context import enter_context
from jdist._src.values.array_checks import check_value
from jdist._src.values.base import is_distributed, named_values
from jdist._src.values.device_put import check_not_nested, check_uniform_shape, check_wrapper
from jdist._src.values.per_replica import PerReplica


class TracedReplica(NamedTuple):
    """The traced program of one replica, before it is analyzed.

    Attributes:
        function: The function of one replica and its arguments.
        names: The name of each item of the arguments.
        program: The closed jaxpr of one replica.
        results: The results, without their wrapper classes.
    """

    function: ReplicaFunction
    names: list[str]
    program: Any
    results: ReplicaResults


def replicate(
    call: UserCall,
    spec: ProgramSpec,
    stages: Sequence[Stage],
) -> Traced:
    """Traces a call for one replica, proves its results, and runs it for all replicas.

    Args:
        call: The call of the user's function.
        spec: The program.
        stages: The stages that wrap the function.

    Returns:
        `(state, outputs)`, the proof and the traced jaxpr. An output that is not proved to be replicated is a `PerReplica`.

    Raises:
        NotMirroredError: A leaf of the state is not proved to be replicated.
        ValueError: A wrapper among the arguments does not fit the replicas.
    """
    function, names, program, results = trace_replica(call, spec, stages)
    jaxpr = jax_compat.open_jaxpr(program)
    check_no_captured_ref(jaxpr)
    inputs = analysis_inputs(function.items, names, spec.varying_axes)
    results = _with_wrappers(results, replication.prove(jaxpr, inputs, spec.varying_axes))
    if spec.varying_axes:
        _check_for_replicas(jaxpr, inputs, call, spec)
    run = program
    for stage in stages:
        run = stage.wrap_program(run)
    pair = results.as_pair(spec.backend.run(function, run, results))
    return Traced(pair, _proof(results), program, results, retracer(stages))


def retracer(stages: Sequence[Stage]) -> Callable[[UserCall, ProgramSpec], Any]:
    """Returns what traces a call for one replica and returns the closed jaxpr."""
    return lambda call, spec: trace_replica(call, spec, stages).program


def _check_for_replicas(jaxpr: Jaxpr, inputs: Sequence[replication.Input], call: UserCall, spec: ProgramSpec) -> None:
    """Warns where several replicas compute something else than one, or all compute the same."""
    axes, replicas = spec.varying_axes, spec.backend.replicas
    clip_check.warn_of_clipped_gradients(jaxpr)
    num_state_leaves = len(jax.tree.leaves(call.args[0])) if spec.has_state else 0
    check_examples(jaxpr, inputs, num_state_leaves, axes, spec.context.num_replicas_in_sync)
    warn_of_local_counts(jaxpr, inputs, num_state_leaves, axes, spec.context.num_replicas_in_sync)
    if spec.has_state:
        # One replica that spans devices splits its batch too.
        workers = "devices" if replicas.batch_axes else "replicas"
        warn_of_replicated_batch(jaxpr, inputs, num_state_leaves, axes, replicas.num_parts, workers)


def trace_replica(call: UserCall, spec: ProgramSpec, stages: Sequence[Stage]) -> TracedReplica:
    """Traces a call for one replica. See `replicate`."""
    fn: ReplicaFn = lambda *args, **kwargs: spec.as_pair(call.fn(*args, **kwargs))
    for stage in stages:
        fn = stage.wrap_function(fn, call)
    backend, context = spec.backend, spec.context
    items, treedef = jax.tree.flatten((tuple(call.args), dict(call.kwargs)), is_leaf=is_distributed)
    names = call.item_names()
    for item, name in zip(items, names, strict=True):
        check_wrapper(name, item, backend.replicas)
        check_uniform_shape(name, item)
    if spec.has_state:
        context = context.of_state(call.args[0])
    traced_results: list[ReplicaResults] = []

    @jax.jit
    def one_replica(*given: PyTree) -> list[PyTree]:  # `explain_trace_errors` finds the name `given` in JAX's messages
        args, kwargs = treedef.unflatten(given)
        with enter_context(context), note_arguments(call.with_arguments(args, kwargs), context.num_replicas_in_sync):
            state, outputs = fn(*args, **kwargs)
            results, values = _flatten_results((_rewrapped(call.args[0], state) if spec.has_state else state, outputs))
        traced_results[:] = [results]
        return values

    def enter_and_run(*blocks: PyTree) -> list[PyTree]:
        pairs = zip(items, blocks, strict=True)
        return one_replica(*(item._from_block(block) if is_distributed(item) else block for item, block in pairs))

    num_state = len(jax.tree.leaves(call.args[0], is_leaf=is_distributed)) if spec.has_state else 0
    function = ReplicaFunction(enter_and_run, items, num_state)
    with explain_trace_errors(names, backend.replicas.mesh, context.axes):
        program = backend.trace(function)
    return TracedReplica(function, names, program, traced_results[0])


def _rewrapped(wrapped_state: PyTree, state: PyTree) -> PyTree:
    """Returns `state`, a state without wrappers, in the wrappers of `wrapped_state`."""
    items, treedef = jax.tree.flatten(wrapped_state, is_leaf=is_distributed)
    pairs = zip(items, treedef.flatten_up_to(state), strict=True)
    return treedef.unflatten([item._with_tree(part) if is_distributed(item) else part for item, part in pairs])


def _flatten_results(pair: tuple[PyTree, PyTree]) -> tuple[ReplicaResults, list[PyTree]]:
    """Returns a description of the results of one replica, and their values without wrappers, after checking each leaf."""
    items, treedef = jax.tree.flatten(pair, is_leaf=is_distributed)
    state, output = pair
    names = [*item_names("state", state), *item_names("output", output)]
    for item, name in zip(items, names, strict=True):
        check_not_nested(name, item)
        for leaf_name, leaf in named_values(name, item):
            check_value(leaf_name, leaf)
    num_state = len(jax.tree.leaves(state, is_leaf=is_distributed))
    results = ReplicaResults([item if is_distributed(item) else None for item in items], names, num_state, treedef)
    return results, [item.tree if is_distributed(item) else item for item in items]


def _with_wrappers(results: ReplicaResults, variations: Sequence[Variation]) -> ReplicaResults:
    """Returns `results` with the wrapper class of each: its own, `PerReplica` if it varies, or None if it is replicated.

    Raises:
        NotMirroredError: A result that has to be replicated varies.
    """
    remaining = iter(variations)
    wrappers: list[Any] = []
    varying: list[tuple[str, Variation]] = []
    for number, (item, name) in enumerate(zip(results.items, results.names, strict=True)):
        leaf_variations = [next(remaining) for _ in jax.tree.leaves(0 if item is None else item.tree)]
        variation = next(filter(None, leaf_variations), None)
        wrappers.append(type(item) if item is not None else PerReplica if variation else None)
        if variation and (item._is_replicated if item is not None else number < results.num_state):
            varying.append((name, variation))
    if varying:
        raise NotMirroredError(_not_replicated(varying, results.num_state))
    return dataclasses.replace(results, wrappers=wrappers)


def _proof(results: ReplicaResults) -> Proof:
    pairs = list(zip(results.names, results.wrappers, strict=True))
    return Proof(
        replicated=tuple(name for name, wrapper in pairs if wrapper is None or wrapper._is_replicated),
        per_replica=tuple(name for name, wrapper in pairs if wrapper and not wrapper._is_replicated),
    )


def _not_replicated(varying: Sequence[tuple[str, Variation]], num_state: int) -> str:
    (name, variation), *others = varying
    cause = min(variation.values(), key=lambda cause: cause.depth)
    more = ", ".join(other for other, _ in others[:3]) + (", ..." if len(others) > 3 else "")
    also = f" (nor are {len(others)} more of {num_state}: {more})" if others else ""
    return (
        f"{name} is not proved to be replicated{also}.\n"
        f"  It may differ because of\n    {replication.explain_cause(cause)}\n"
        f"  {replication.fix_for(cause, list(variation))}\n"
        f"  {WRAPPER_ADVICE}"
    )


WRAPPER_ADVICE = (
    "If each replica should have its own value, wrap the value where the state is made: `jdist.PerReplica(x)`. To "
    "aggregate the values that the replicas write, use `jdist.Mirrored(x, aggregation)`. `strategy.init` wraps the "
    "state of a `jdist.sync` policy, if the state is made in it."
)


def analysis_inputs(items: Sequence[Any], names: Sequence[str], axes: tuple[str, ...]) -> list[replication.Input]:
    """Returns the name of each leaf of the arguments, and the axes along which it varies."""
    inputs: list[replication.Input] = []
    for item, name in zip(items, names, strict=True):
        if is_distributed(item):
            varying_axes = () if item._is_replicated else axes
            inputs += [replication.Input(leaf_name, varying_axes) for leaf_name, _ in named_leaves(name, item.tree)]
        else:
            inputs.append(replication.Input(name, ()))
    return inputs
