"""Random inputs for which a function on N replicas computes something else than on one device: the evidence of `equivalence`.

The analysis proves that results are equal. What it does not prove may still be equal: `x - x` is 0 whatever `x` depends on. So
both programs are evaluated in float64 for a few random inputs, if they are small. A difference shows that they are not equivalent.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core import jax_compat
from jdist._src.jaxpr.equivalence_verdict import Kind, Verdict
from jdist._src.jaxpr.interpreter import all_equations
from jdist._src.jaxpr.numpy_evaluation import evaluate
from jdist._src.jaxpr.relations import AnyRelation, Lost, Relation

_MAX_OPERATIONS = 5e7  # about a second
# The scale of the inputs of each sample, and whether all are positive. Some pass a threshold, or the domain of a function.
_SAMPLES = ((1.0, False), (1.0, True), (10.0, False), (0.1, True), (0.01, False), (100.0, True))
_TOLERANCE = 1e-5  # constants of both programs are rounded to float32


def confirmed(
    verdicts: Sequence[Verdict],
    local: Any,
    whole: Any,
    inputs: Sequence[AnyRelation],
    kinds: Sequence[Kind],
    axis_sizes: Mapping[str, int],
) -> list[Verdict]:
    """Returns verdicts of which those that are not `"equivalent"` take the evidence of random inputs into account.

    Args:
        verdicts: The verdict of the analysis on each output.
        local: The closed jaxpr of one replica of several.
        whole: The closed jaxpr of the function as the only replica.
        inputs: The relation of each input.
        kinds: How each output is read.
        axis_sizes: The mesh axes of the replicas, from the outermost, and their sizes.
    """
    if all(verdict.name == "equivalent" or verdict.by_design for verdict in verdicts):
        return list(verdicts)
    try:
        undecided = [verdict.name != "equivalent" for verdict in verdicts]
        evidence = _differences(local, whole, inputs, kinds, axis_sizes, undecided)
    except Exception:  # too large, or a primitive that numpy and JAX do not evaluate here
        return list(verdicts)
    return [_with_evidence(verdict, differs) for verdict, differs in zip(verdicts, evidence, strict=True)]


def _with_evidence(verdict: Verdict, differs: bool | None) -> Verdict:
    if verdict.name == "not equivalent" and not differs and not verdict.by_design:
        return dataclasses.replace(verdict, name="unknown", reason=f"{verdict.reason}, but random inputs show no difference")
    if verdict.name == "unknown" and differs and verdict.may_be_refuted:
        return dataclasses.replace(verdict, name="not equivalent", reason=f"random inputs show a difference, and {verdict.reason}")
    return verdict


def _differences(
    local: Any,
    whole: Any,
    inputs: Sequence[AnyRelation],
    kinds: Sequence[Kind],
    axis_sizes: Mapping[str, int],
    undecided: Sequence[bool],
) -> list[bool | None]:
    """Returns for each output whether it differs for a random input; None if its values are not finite or not comparable."""
    programs = [jax_compat.open_jaxpr(program) for program in (local, whole)]
    if any(jax_compat.calls_host(equation) for program in programs for equation in all_equations(program)):
        raise ValueError("a program that calls functions of the host is not evaluated")
    if any(isinstance(value, Lost) for value in inputs):
        raise ValueError("an input without a value on one device")
    number = math.prod(axis_sizes.values())
    results: list[list[bool | None]] = []
    for sample, (scale, is_positive) in enumerate(_SAMPLES):
        rng = np.random.default_rng(sample)
        pairs = [
            _values(value, var.aval, number, scale, is_positive or not value.splits, rng)  # type: ignore[arg-type]
            for value, var in zip(inputs, jax_compat.open_jaxpr(whole).invars, strict=True)
        ]
        on_replicas = _evaluated(local, [own for own, _ in pairs], axis_sizes)
        on_one = _evaluated(whole, [one[None] for _, one in pairs], dict.fromkeys(axis_sizes, 1))
        results.append([_differs(*row) for row in zip(on_replicas, on_one, kinds, strict=True)])
        if all(True in column for column, matters in zip(zip(*results, strict=True), undecided, strict=True) if matters):
            break
    return [_any(column) for column in zip(*results, strict=True)]


def _any(column: Sequence[bool | None]) -> bool | None:
    return True if True in column else False if False in column else None


def _values(value: Relation, aval: Any, number: int, scale: float, is_positive: bool, rng: np.random.Generator) -> tuple[Any, Any]:
    """Returns random values of an input for all replicas, `[replica, ...]`, and for one device."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30)), impl=aval.dtype._impl.name), aval.shape)
        return jnp.broadcast_to(keys, (number, *aval.shape)), keys
    shape = (number, *aval.shape) if value.partial else aval.shape
    drawn = _random(shape, aval.dtype, is_positive, rng)
    if drawn.dtype.kind in "fc":
        drawn *= scale
    if value.partial:
        total = drawn.sum(0) * value.factor
        return drawn, total.astype(drawn.dtype)
    if value.splits:
        (split,) = value.splits
        return np.stack(np.split(drawn, number, split.dim)), drawn
    return np.broadcast_to(drawn, (number, *shape)), drawn


def _random(shape: Sequence[int], dtype: Any, is_positive: bool, rng: np.random.Generator) -> np.ndarray:
    """Returns random numbers. Those of a state are positive, as second moments have to be."""
    if jnp.issubdtype(dtype, jnp.floating):
        return rng.uniform(0.1, 1.1, shape) if is_positive else rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    return rng.integers(0, 2 if dtype == jnp.bool_ else 3, shape).astype(dtype)


def _evaluated(program: Any, arguments: Sequence[Any], axis_sizes: Mapping[str, int]) -> list[np.ndarray]:
    """Returns the outputs `[replica, ...]` of a closed jaxpr for arguments `[replica, ...]`."""
    run: Callable[..., Any] = jax_compat.jaxpr_function(program)
    sizes = list(axis_sizes.items())
    for axis, size in reversed(sizes):
        run = jax.vmap(run, axis_name=axis, axis_size=size)
    grid = [np.reshape(x, (*(size for _, size in sizes), *np.shape(x)[1:])) if not _is_key(x) else x.reshape(*(size for _, size in sizes), *x.shape[1:]) for x in arguments]
    shapes = [jax.ShapeDtypeStruct(x.shape, var.aval.dtype) for x, var in zip(grid, jax_compat.open_jaxpr(program).invars, strict=True)]
    outputs = evaluate(jax.make_jaxpr(run)(*shapes), grid, _MAX_OPERATIONS)
    return [np.reshape(x, (-1, *np.shape(x)[len(sizes) :])) if not _is_key(x) else np.asarray(jax.random.key_data(x)) for x in outputs]


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _differs(values: np.ndarray, one: np.ndarray, kind: Kind) -> bool | None:
    read = _READ.get(kind)
    if read is None:
        return None
    many = read(values)
    if many.shape[1:] != one.shape[1:]:
        return True
    many, one = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (many, one))
    if not (np.isfinite(many).all() and np.isfinite(one).all()):
        return None
    scale = max(np.abs(many).max(initial=0), np.abs(one).max(initial=0), 1e-3)
    return bool(np.abs(many - one).max(initial=0) > _TOLERANCE * scale)


_READ: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {
    "replicated": lambda values: values,
    "split": lambda values: values.reshape(1, -1, *values.shape[2:]) if values.ndim > 1 else values,
    "sum": lambda values: values.sum(0, keepdims=True, dtype=np.float64),
    "mean": lambda values: values.mean(0, keepdims=True, dtype=np.float64),
}
