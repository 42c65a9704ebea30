"""`check`: a linter for functions that a program maps over devices without jdist, by `jax.pmap`, `jax.shard_map` or `jax.jit`.

Two analyses read each function. The replication analysis proves that a result is the same on every device where the program
relies on it. The equivalence analysis compares the function of one device with the same function of a single device with
the global shapes (`jaxpr/mapped_functions.py`).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdist._src.core import jax_compat
from jdist._src.core.arguments import check_callable
from jdist._src.core.errors import DivergentCollectiveError
from jdist._src.core.source_lines import Frame
from jdist._src.debug.check_report import CheckReport, CheckVerdict, FunctionCheck, ResultCheck
from jdist._src.execution.program import Program
from jdist._src.jaxpr import replication
from jdist._src.jaxpr.counterexamples import ResultForm, with_counterexamples
from jdist._src.jaxpr.equivalence import relate
from jdist._src.jaxpr.equivalence_verdict import ResultKind, verdict_of
from jdist._src.jaxpr.mapped_functions import MappedFunction, Result, error_line, record_mapped_functions
from jdist._src.jaxpr.origins import find_origins
from jdist._src.jaxpr.relations import Relation
from jdist._src.strategies.description import listed
from jdist._src.strategies.late_bound_step import Step

_GLOBAL_VIEW = (
    "global view: the function is one program, which XLA partitions, so the devices compute the same values as one "
    "device"
)


def check(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckReport:
    """Returns verdicts on the functions that `fn` maps over devices with `jax.pmap` or `jax.shard_map`, without running them.

    For each result: whether it is replicated where the program relies on it (a result of `shard_map` over each mesh axis that
    its `out_specs` omit, and the new state of a `pmap`), and whether the devices together compute the same value as one
    device. `fn` is traced for arguments of these shapes; nothing is compiled, run or donated.

    Args:
        fn: A function, which may be the result of `jax.jit`, `jax.pmap` or `jax.shard_map`, or call such functions.
        args: The arguments of `fn`: arrays, or their shapes (`jax.ShapeDtypeStruct`). Other values are passed as they are.
        kwargs: The keyword arguments of `fn`.

    Returns:
        A `jdist.CheckReport`, which prints as tables. `report.num_findings` is the number of mistakes.

    Raises:
        TypeError: `fn` is not a function, or a step of jdist.
        Exception: `fn` raises it for these arguments.

    Example:
        >>> def step(w, x):
        ...     gradient = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
        ...     return w - 0.1 * gradient  # the mean over the devices is missing
        >>> mesh = jax.make_mesh(
        ...     (2,),
        ...     ("data",),
        ...     axis_types=(jax.sharding.AxisType.Auto,),
        ...     devices=jax.devices()[:2],
        ... )
        >>> specs = dict(in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(), check_vma=False)
        >>> report = jdist.check(
        ...     jax.shard_map(step, mesh=mesh, **specs), jnp.ones(3), jnp.ones((8, 3))
        ... )
        >>> report.functions[0].results[0].replication.text, report.num_findings
        ('not proved', 1)
    """
    check_callable(fn)
    if isinstance(fn, (Program, Step)):
        raise TypeError(
            "`jdist.check` reads functions under `jax.pmap` and `jax.shard_map`. A step of jdist has its own proof: "
            "`print(step.proof)` after a call, or `print(jdist.debug.explain(step, state, *batch))`."
        )
    with record_mapped_functions() as functions:
        trace(fn, args, kwargs)
    is_split = any(_num_devices(leaf) > 1 for leaf in jax.tree.leaves((args, kwargs)))
    if not functions and is_split:  # `make_jaxpr` does not pass the shardings of arguments on to `jax.jit`
        code = getattr(fn, "__code__", None) or getattr(getattr(fn, "__wrapped__", None), "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
        functions.append(MappedFunction("jit", getattr(fn, "__name__", type(fn).__name__), place, None))
    return report_on(functions)


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Traces `fn`. Arguments that are neither arrays nor shapes are passed as they are, as static arguments have to be."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    numbers = [number for number, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(arrays: Sequence[Any]) -> Any:
        values = dict(zip(numbers, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [values.get(number, leaf) for number, leaf in enumerate(leaves)])
        fn(*args, **kwargs)

    jax.make_jaxpr(call)([leaves[number] for number in numbers])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _num_devices(leaf: Any) -> int:
    return getattr(getattr(leaf, "sharding", None), "num_devices", 1)


def report_on(functions: Sequence[MappedFunction]) -> CheckReport:
    """Returns the verdicts on recorded functions. An exception in an analysis is the reason of an unknown verdict."""
    return CheckReport(tuple(map(_check_function, functions)))


def _check_function(function: MappedFunction) -> FunctionCheck:
    note = problem = ""
    results: tuple[ResultCheck, ...] = ()
    if function.kind == "jit":
        note = _GLOBAL_VIEW
    elif function.local is None:
        note = f"unknown: {function.reason}"
    else:
        try:
            replications = _replication(function)
        except DivergentCollectiveError as error:
            problem = str(error)
            replications = [CheckVerdict("unknown")] * len(function.results)
        except Exception as error:
            replications = [_unknown(error)] * len(function.results)
        try:
            equivalences = _equivalence(function, replications)
        except Exception as error:
            equivalences = [_unknown(error)] * len(function.results)
        rows = zip(function.results, replications, equivalences, strict=True)
        results = tuple(ResultCheck(one.name, _placement(one), *verdicts) for one, *verdicts in rows)
    name = _PMAP_AXIS if "_internal_pmap_axis_name" in function.axes else None
    axes = {name or axis: size for axis, size in function.axes.items()}
    line = str(function.line) if function.line else ""
    return FunctionCheck(function.kind, function.name, _definition(function), line, axes, results, note, problem)


def _definition(function: MappedFunction) -> str:
    file, _, line = function.definition.rpartition(":")
    return str(Frame(file, int(line), function.name)) if line.isdecimal() else function.definition


_PMAP_AXIS = "devices"  # of a `pmap` without a name for its axis


def _unknown(error: Exception) -> CheckVerdict:
    return CheckVerdict("unknown", (error_line(error),))


def _placement(result: Result) -> str:
    if result.splits:
        return ", ".join(f"split over {'+'.join(axes)}" for axes in result.splits.values())
    return "replicated" if result.replicated_over else "one per device"


# Replication.


def _replication(function: MappedFunction) -> list[CheckVerdict]:
    inputs = [replication.Input(operand.name, operand.axes) for operand in function.operands]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variations = replication.prove(jax_compat.open_jaxpr(function.local), inputs, tuple(function.axes))
    return [_replication_verdict(function, *pair) for pair in zip(function.results, variations, strict=True)]


def _replication_verdict(function: MappedFunction, result: Result, variation: replication.Variation) -> CheckVerdict:
    if not result.replicated_over:
        return CheckVerdict("not claimed")
    axes = [axis for axis in result.replicated_over if axis in variation]
    if not axes:
        return CheckVerdict("proved")
    if function.checked_by_jax:
        return CheckVerdict("checked by JAX")
    cause = min((variation[axis] for axis in axes), key=lambda cause: cause.depth)
    names = repr(axes[0] if len(axes) == 1 else tuple(axes)).replace("'", '"')
    if axes == ["_internal_pmap_axis_name"]:
        fix = 'Name the axis, `jax.pmap(..., axis_name="batch")`, and reduce the values over it: `jax.lax.pmean(x, "batch")`.'
    else:
        fix = f"Reduce the values that it is computed from over the devices: `jax.lax.pmean(x, {names})`."
    if function.kind == "shard_map":
        fix += " If it is meant to differ, name the axes in its `out_specs`."
    return CheckVerdict("not proved", tuple(replication.explain_cause(cause).split("\n    -> ")), fix)


# Equivalence.


def _equivalence(function: MappedFunction, replications: Sequence[CheckVerdict]) -> list[CheckVerdict]:
    if function.single is None:
        return [CheckVerdict("unknown", (function.reason,))] * len(function.results)
    sizes = {axis: size for axis, size in function.axes.items() if size > 1}
    if not sizes:
        return [CheckVerdict("equivalent", ("there is one device",))] * len(function.results)
    # The relation of an operand per device does not matter: verdicts on results that depend on it are replaced below.
    inputs = [_relation(operand.splits, sizes) for operand in function.operands]
    relations = relate(function.local, function.single, inputs, sizes)
    kinds: list[ResultKind] = [_kind(function, result) for result in function.results]
    verdicts = [
        verdict_of(relation, kind, sizes, kind == "replicated", _relation(result.splits, sizes).splits)
        for relation, kind, result in zip(relations, kinds, function.results, strict=True)
    ]
    dependencies = _per_device_operands(function)
    if not any(dependencies):
        forms = [
            ResultForm(kind, _relation(result.splits, sizes).splits)
            for kind, result in zip(kinds, function.results, strict=True)
        ]
        verdicts = with_counterexamples(verdicts, function.local, function.single, inputs, forms, sizes)
    return [
        CheckVerdict("unknown", (f"computed from {listed(names, 3)}, of which each device has a value of its own",))
        if names
        else CheckVerdict("unknown", ("it is not proved to be replicated",))
        if replicated.text == "not proved"
        else CheckVerdict(verdict.name, tuple(filter(None, (verdict.reason, *verdict.lines))), verdict.fix)
        for verdict, names, replicated in zip(verdicts, dependencies, replications, strict=True)
    ]


def _relation(splits: Mapping[int, tuple[str, ...]], sizes: Mapping[str, int]) -> Relation:
    axes = {dim: tuple(axis for axis in names if axis in sizes) for dim, names in splits.items()}
    return Relation.split({dim: names for dim, names in axes.items() if names})


def _kind(function: MappedFunction, result: Result) -> ResultKind:
    if result.splits:
        return "split"
    if function.kind == "pmap" and not result.replicated_over:
        return "per replica"
    return "replicated"


def _per_device_operands(function: MappedFunction) -> list[list[str]]:
    """Returns for each result the names of the operands per device that it is computed from."""
    origins, equations = find_origins(jax_compat.open_jaxpr(function.local), tuple(function.axes))
    names = []
    for numbers in origins:
        reached, new = set(), set(numbers)
        while new:
            reached |= new
            new = {origin for number in new & equations.keys() for origin in equations[number].origins} - reached
        operands = enumerate(function.operands)
        names.append([operand.name for number, operand in operands if operand.per_device and number in reached])
    return names
