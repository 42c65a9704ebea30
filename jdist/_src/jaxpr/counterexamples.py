"""Random inputs for which the results of a function on N replicas differ from those on one device: evidence for `equivalence`.

The analysis proves that results are equal. Results without a proof may be equal too: `x - x` is always 0. So both programs are
evaluated in float64 for a few random inputs, if they are small. A difference shows that they are not equivalent.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdist._src.core import jax_compat
from jdist._src.jaxpr.equivalence_verdict import LOCAL_NORMALIZATION, ResultKind, Verdict
from jdist._src.jaxpr.interpreter import Evaluator, all_equations
from jdist._src.jaxpr.numpy_evaluation import TooLargeError, evaluate
from jdist._src.jaxpr.relations import AnyRelation, Lost, Relation, Split

_MAX_OPERATIONS = 5e7  # about a second
# The scale of the inputs of each sample, and whether all are positive. Some pass a threshold, or the domain of a function.
_SAMPLES = ((1.0, False), (1.0, True), (10.0, False), (0.1, True), (0.01, False), (100.0, True))
_TOLERANCE = 1e-5  # constants of both programs are rounded to float32


class ResultForm(NamedTuple):
    """How the values of the replicas form one value of an output.

    Attributes:
        kind: See `verdict_of`.
        splits: The dims of kind `"split"`; by default the first one over all axes.
    """

    kind: ResultKind
    splits: tuple[Split, ...] = ()


def with_counterexamples(
    verdicts: Sequence[Verdict],
    local: Any,
    single: Any,
    inputs: Sequence[AnyRelation],
    forms: Sequence[ResultForm],
    axis_sizes: Mapping[str, int],
) -> list[Verdict]:
    """Returns the verdicts; each one that is not `"equivalent"` takes the evidence of random inputs into account.

    Args:
        verdicts: The verdict of the analysis on each output.
        local: The closed jaxpr of one replica of several.
        single: The closed jaxpr of the function as the only replica.
        inputs: The relation of each input.
        forms: The form of each output.
        axis_sizes: The mesh axes of the replicas, from the outermost, and their sizes.
    """
    undecided = [verdict.name != "equivalent" and not verdict.by_design for verdict in verdicts]
    if not any(undecided):
        return list(verdicts)
    try:
        evidence = _Evidence(local, single, inputs, forms, axis_sizes)
        with jax.ensure_compile_time_eval():  # a step is traced here
            differences = evidence.differences(undecided)
    except Exception:  # too large, or a primitive that numpy and JAX do not evaluate here
        return list(verdicts)
    return [_with_evidence(verdict, differs) for verdict, differs in zip(verdicts, differences, strict=True)]


def _with_evidence(verdict: Verdict, differs: bool | None) -> Verdict:
    if verdict.name == "not equivalent" and differs is False and not verdict.by_design:
        reason = f"{verdict.reason}, but random inputs show no difference"
        return dataclasses.replace(verdict, name="unknown", reason=reason)
    if verdict.name == "unknown" and differs and verdict.may_be_refuted:
        reason = LOCAL_NORMALIZATION if verdict.fix else f"random inputs show a difference, and {verdict.reason}"
        return dataclasses.replace(verdict, name="not equivalent", reason=reason)
    return verdict


class _Evidence:
    """Evaluates a function on the replicas and on one device for the same random inputs."""

    def __init__(
        self,
        local: Any,
        single: Any,
        inputs: Sequence[AnyRelation],
        forms: Sequence[ResultForm],
        axis_sizes: Mapping[str, int],
    ):
        programs = [jax_compat.open_jaxpr(program) for program in (local, single)]
        if any(jax_compat.calls_host(equation) for program in programs for equation in all_equations(program)):
            raise ValueError("a program that calls functions of the host is not evaluated")
        if any(isinstance(value, Lost) for value in inputs):
            raise ValueError("an input without a value on one device")
        variables = [*programs[0].invars, *programs[0].constvars]
        if (
            math.prod(axis_sizes.values()) * sum(math.prod(jax_compat.shape_of(var)) for var in variables)
            > _MAX_OPERATIONS
        ):
            raise TooLargeError("its inputs do not fit the limit")
        self._single, self._forms = programs[1], forms
        self._inputs: Any = inputs
        self._sizes = dict(axis_sizes)
        self._on_replicas = _batched(local, self._sizes)
        self._on_one = _batched(single, dict.fromkeys(self._sizes, 1))

    def differences(self, undecided: Sequence[bool]) -> list[bool | None]:
        """Returns for each output whether it differs for a random input; None for one value per replica.

        Args:
            undecided: The outputs that matter.
        """
        differs: list[bool | None] = [None] * len(self._forms)
        for sample, (scale, is_positive) in enumerate(_SAMPLES):
            rng = np.random.default_rng(sample)
            pairs = [
                self._values(value, var.aval, scale, is_positive or not value.splits, rng)
                for value, var in zip(self._inputs, self._single.invars, strict=True)
            ]
            on_replicas = _evaluated(self._on_replicas, [values for values, _ in pairs])
            on_one = _evaluated(self._on_one, [one[(None,) * len(self._sizes)] for _, one in pairs])
            for i, row in enumerate(zip(on_replicas, on_one, self._forms, strict=True)):
                differs[i] = differs[i] or self._differs(*row)
            if all(one for one, matters in zip(differs, undecided, strict=True) if matters):
                break
        return differs

    def _values(
        self, value: Relation, aval: Any, scale: float, is_positive: bool, rng: np.random.Generator
    ) -> tuple[Any, Any]:
        """Returns random values of an input: for all replicas, `[*axes, ...]`, and for one device."""
        grid = tuple(self._sizes.values())
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30)), impl=aval.dtype._impl.name), aval.shape)
            return jnp.broadcast_to(keys, (*grid, *aval.shape)), keys
        shape = (*grid, *aval.shape) if value.partial else aval.shape
        drawn = _random(shape, aval.dtype, is_positive, rng)
        if drawn.dtype.kind in "fc":
            drawn *= scale
        if not value.partial:
            return self._blocks(drawn, value.splits), drawn
        if value.splits or value.partial != set(self._sizes):
            raise ValueError("an input that is a partial sum over a part of the axes")
        total = drawn.sum(tuple(range(len(grid)))) * value.factor
        return drawn, total.astype(drawn.dtype)

    def _blocks(self, value: np.ndarray, splits: Sequence[Split]) -> np.ndarray:
        """Returns the part of each replica, `[*axes, ...]`, of a value that is split so."""
        names, grid = list(self._sizes), tuple(self._sizes.values())
        blocks = []
        for position in np.ndindex(grid):
            block = value
            for split in splits:
                sizes = [self._sizes[axis] for axis in split.axes]
                indices = tuple(position[names.index(axis)] for axis in split.axes)
                block = np.split(block, math.prod(sizes), split.dim)[int(np.ravel_multi_index(indices, sizes))]
            blocks.append(block)
        return np.reshape(np.stack(blocks), (*grid, *blocks[0].shape))

    def _differs(self, values: np.ndarray, one: np.ndarray, form: ResultForm) -> bool | None:
        rank = len(self._sizes)
        one = one.reshape(one.shape[rank:])
        if form.kind == "per replica":
            return None
        if form.kind in ("sum", "mean"):
            values = (np.sum if form.kind == "sum" else np.mean)(values, tuple(range(rank)), dtype=np.float64)
        else:
            splits = (form.splits or (Split(tuple(self._sizes), 0),)) if form.kind == "split" else ()
            factors = [math.prod(self._sizes[axis] for axis in split.axes) for split in splits]
            if any(split.dim >= one.ndim or one.shape[split.dim] % n for split, n in zip(splits, factors, strict=True)):
                return True
            one = self._blocks(one, splits)
        if values.shape != one.shape:
            return True
        first, second = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (values, one))
        if not (np.isfinite(first).all() and np.isfinite(second).all()):
            return False
        scale = max(np.abs(first).max(initial=0), np.abs(second).max(initial=0), 0.1)
        return bool(np.abs(first - second).max(initial=0) > _TOLERANCE * scale)


def _random(shape: Sequence[int], dtype: Any, is_positive: bool, rng: np.random.Generator) -> np.ndarray:
    """Returns random numbers; positive ones for a state, because second moments must not be negative."""
    if jnp.issubdtype(dtype, jnp.floating):
        return rng.uniform(0.1, 1.1, shape) if is_positive else rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    return rng.integers(0, 2 if dtype == jnp.bool_ else 3, shape).astype(dtype)


def _batched(program: Any, axis_sizes: Mapping[str, int]) -> Any:
    """Returns a closed jaxpr for all positions along mesh axes: its inputs and outputs are `[*axes, ...]`."""
    jaxpr, grid = jax_compat.open_jaxpr(program), tuple(axis_sizes.values())
    run: Callable[..., Any] = jax_compat.jaxpr_function(program)
    if any(equation.primitive.name in _OF_VARYING_TYPES for equation in all_equations(jaxpr)):
        run = lambda *arguments: _WithoutVaryingTypes().run(jaxpr, program.consts, arguments)
    for axis, size in reversed(list(axis_sizes.items())):
        run = jax.vmap(run, axis_name=axis, axis_size=size)
    shape = lambda var: jax.ShapeDtypeStruct((*grid, *jax_compat.shape_of(var)), jax_compat.dtype_of(var))
    return jax.make_jaxpr(run)(*map(shape, jaxpr.invars))


def _evaluated(program: Any, arguments: Sequence[Any]) -> list[np.ndarray]:
    outputs = evaluate(program, arguments, _MAX_OPERATIONS)
    return [np.asarray(jax.random.key_data(x)) if _is_key(x) else np.asarray(x) for x in outputs]


_OF_VARYING_TYPES = ("psum_invariant", "all_gather_invariant", "pvary")


class _WithoutVaryingTypes(Evaluator):
    """Traces a jaxpr anew without the types of `check_vma=True`, which `jax.vmap` does not support."""

    def primitive(self, jaxpr: Any, equation: Any, operands: list[Any]) -> list[Any]:
        name = equation.primitive.name
        if name == "psum_invariant":
            return list(lax.psum(tuple(operands), equation.params["axes"]))
        if name == "all_gather_invariant":
            dim, tiled = jax_compat.gather_dimension(equation)
            return [lax.all_gather(x, equation.params["axis_name"], axis=dim, tiled=tiled) for x in operands]
        return operands if name in ("pvary", "pbroadcast") else super().primitive(jaxpr, equation, operands)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
