"""Mixed precision: the dtypes of parameters, of the computation in a step, and of its results.

`strategy.step(fn, precision=...)` sets the precision of a step, and `jdist.value_and_grad` applies it. In float16 small
gradients underflow to zero, so the loss is multiplied by a scale, which `jdist.sync.dynamic_loss_scale` stores in the state of
the step.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.call_errors import explain_constructor
from jdist._src.core.trace_key import keyed
from jdist._src.core.tree import PyTree, dtype_and_shape, is_float, named_leaves, one_line

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The floating-point dtypes of a step. Integers, booleans and keys are not cast.

    Attributes:
        param_dtype: The dtype in which parameters are stored and updated.
        compute_dtype: The dtype of the parameters and data that the loss function receives.
        output_dtype: The dtype to which the results of the loss function are cast.

    Raises:
        TypeError: An argument is not a floating-point dtype.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> @strategy.step(precision=jdist.Precision(compute_dtype=jnp.bfloat16))
        ... def descend(w, x):
        ...     loss, grad = jdist.value_and_grad(lambda w, x: (w * x) ** 2)(w, x)
        ...     return w - 0.1 * jdist.all_reduce("mean", grad), (loss, x * w)
        >>> x = strategy.put(jdist.PerReplica(np.float32([[1.5], [2.5]])))
        >>> w, _ = descend(strategy.put(np.float32(1.001)), x)
        >>> # stored in float32, computed with 1.0, which is 1.001 in bfloat16
        >>> w.dtype, float(w)
        (dtype('float32'), 0.15...)
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.bfloat16
    output_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype = float_dtype(f"`{field.name}` of `Precision`", getattr(self, field.name))
            object.__setattr__(self, field.name, dtype)

    def cast_params(self, tree: T) -> T:
        """Returns `tree` with its floats cast to `param_dtype`."""
        return _cast(tree, self.param_dtype)

    def cast_compute(self, tree: T) -> T:
        """Returns `tree` with its floats cast to `compute_dtype`."""
        return _cast(tree, self.compute_dtype)

    def cast_output(self, tree: T) -> T:
        """Returns `tree` with its floats cast to `output_dtype`."""
        return _cast(tree, self.output_dtype)

    def check_params(self, tree: PyTree) -> None:
        """Raises ValueError if a float among the parameters does not have the dtype `param_dtype`."""
        for name, leaf in named_leaves("params", tree):
            dtype = jax.dtypes.result_type(leaf)
            if jnp.issubdtype(dtype, jnp.floating) and dtype != self.param_dtype:
                raise ValueError(
                    f"{name} is {dtype_and_shape(leaf)}, and the `param_dtype` of the precision is {self.param_dtype}. Cast "
                    "the parameters once, where the state is created: `precision.cast_params(params)`."
                )


explain_constructor(Precision)


class LossScaleState(NamedTuple):
    """The state of `jdist.sync.dynamic_loss_scale`.

    Attributes:
        scale: The factor of the loss, float32 `[]`; replicated.
        finite_steps: The number of finite steps since the scale changed, int32 `[]`; replicated.
        skipped: The number of steps skipped so far, int32 `[]`; replicated.
        opt_state: The state of the optimizer.
    """

    scale: jax.Array
    finite_steps: jax.Array
    skipped: jax.Array
    opt_state: Any


@dataclasses.dataclass
class StepPrecision:
    """The precision of the step that is being traced.

    Attributes:
        precision: The dtypes; None for no casts.
        scale: The factor of the loss before differentiation; None for no scaling.
        is_used: Whether the step called `step_precision`.
    """

    precision: Precision | None = None
    scale: jax.Array | None = None
    is_used: bool = False


_current: ContextVar[StepPrecision | None] = ContextVar("jdist_precision", default=None)


@contextlib.contextmanager
def use_precision(precision: Precision | None, state: PyTree) -> Iterator[None]:
    """Makes `precision`, with the loss scale of `state`, the precision of the step that is traced within the context.

    Raises:
        ValueError: The state has several loss scales, or the step did not use the precision.
    """
    scales = [
        node.scale
        for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LossScaleState))
        if isinstance(node, LossScaleState)
    ]
    if len(scales) > 1:
        raise ValueError(
            f"The state has {len(scales)} loss scales, and a loss is multiplied by one. Use one "
            "`dynamic_loss_scale`, around the complete optimizer."
        )
    current = StepPrecision(precision, scales[0] if scales else None)
    # A cached trace of a helper would contain the precision and scale of another step, and would not set `is_used`.
    key = object() if precision or scales else None
    token = _current.set(current)
    try:
        with keyed(key):
            yield
    finally:
        _current.reset(token)
    if precision is not None and not current.is_used:
        raise ValueError(
            f"The step has the precision {precision}, and does not use it. Differentiate with `jdist.value_and_grad`, which "
            "casts parameters and data, or omit `precision`."
        )


def step_precision() -> StepPrecision:
    """Returns the precision of the step that is being traced, and marks it as used.

    Raises:
        ValueError: It computes in float16, and the state has no loss scale.
    """
    current = _current.get() or StepPrecision()
    current.is_used = True
    check_loss_scale(current.precision, current.scale)
    return current


def check_loss_scale(precision: Precision | None, scale: Any) -> None:
    """Raises ValueError if the precision needs a loss scale, and the state has none."""
    if precision and precision.compute_dtype == jnp.float16 and scale is None:
        raise ValueError(
            "Small gradients underflow in float16, so the loss needs a scale, and the state of the step has none. Wrap the "
            "optimizer, `tx = jdist.sync.dynamic_loss_scale(tx)`, and store `tx.init(params)` in the state; or compute in "
            "bfloat16."
        )


def float_dtype(name: str, dtype: Any) -> np.dtype:
    """Returns `dtype` as a numpy dtype.

    Raises:
        TypeError: It is not a floating-point dtype; the message calls the argument `name`.
    """
    try:
        numpy_dtype = None if dtype is None else np.dtype(dtype)
    except TypeError:
        numpy_dtype = None
    if numpy_dtype is None or not jnp.issubdtype(numpy_dtype, jnp.floating):
        raise TypeError(f"{name} is a floating-point dtype, such as jnp.bfloat16, got {one_line(dtype)}.")
    return numpy_dtype


def _cast(tree: T, dtype: Any) -> T:
    def cast_leaf(leaf: Any) -> Any:
        return jnp.asarray(leaf).astype(dtype) if is_float(leaf) else leaf

    return jax.tree.map(cast_leaf, tree)
