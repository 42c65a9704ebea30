"""Mixed precision: the dtypes in which parameters are kept, a step computes, and a loss is given.

`strategy.step(fn, precision=...)` says it for a step, and `jdist.value_and_grad` within does it. Where float16 computes,
the loss is multiplied by a scale, or small gradients would be zero; the scale is found in the state of the step, where
`jdist.sync.dynamic_loss_scale` keeps it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.trace_key import keyed
from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves


@dataclasses.dataclass(frozen=True)
class Precision:
    """The floating-point dtypes of a step; whole numbers, booleans and keys stay as they are.

    Attributes:
        params: In which parameters are kept and updated.
        compute: In which the loss function gets parameters and data.
        output: In which what it returns goes on.

    Raises:
        TypeError: One is no floating-point dtype.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> @strategy.step(precision=jdist.Precision(compute=jnp.bfloat16))
        ... def descend(w, x):
        ...     loss, grad = jdist.value_and_grad(lambda w, x: (w * x) ** 2)(w, x)
        ...     return w - 0.1 * jdist.all_reduce("mean", grad), (loss, x * w)
        >>> x = strategy.put(jdist.PerReplica(np.float32([[1.5], [2.5]])))
        >>> w, _ = descend(strategy.put(np.float32(1.001)), x)
        >>> w.dtype, float(w)  # kept in float32, computed with 1.0, which is 1.001 in bfloat16
        (dtype('float32'), 0.15...)
    """

    params: Any = jnp.float32
    compute: Any = jnp.bfloat16
    output: Any = jnp.float32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype = float_dtype(f"`{field.name}` of `Precision`", getattr(self, field.name))
            object.__setattr__(self, field.name, dtype)

    def cast_params(self, tree: PyTree) -> PyTree:
        """`tree` with its floats as parameters are kept."""
        return _cast(tree, self.params)

    def cast_compute(self, tree: PyTree) -> PyTree:
        """`tree` with its floats as they are computed with."""
        return _cast(tree, self.compute)

    def cast_output(self, tree: PyTree) -> PyTree:
        """`tree` with its floats as they go on."""
        return _cast(tree, self.output)

    def check_params(self, tree: PyTree) -> None:
        """Raises ValueError if a float among the parameters is kept in another dtype."""
        for name, leaf in named_leaves("params", tree):
            dtype = jax.dtypes.result_type(leaf)
            if jnp.issubdtype(dtype, jnp.floating) and dtype != self.params:
                raise ValueError(
                    f"{name} is {dtype_and_shape(leaf)}, and this precision keeps parameters in {self.params}. Cast "
                    "them once, where the "
                    "state is made: `precision.cast_params(params)`."
                )


class LossScaleState(NamedTuple):
    """The state of `jdist.sync.dynamic_loss_scale`.

    Attributes:
        scale: What the loss is multiplied by, float32 `[]`; mirrored.
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
        precision: The dtypes; None to leave all as they are.
        scale: What a loss is multiplied by before it is differentiated; None for nothing.
        is_used: Whether somebody has asked.
    """

    precision: Precision | None = None
    scale: jax.Array | None = None
    is_used: bool = False


_in_force: ContextVar[StepPrecision | None] = ContextVar("jdist_precision", default=None)


@contextlib.contextmanager
def use_precision(precision: Precision | None, state: PyTree) -> Iterator[None]:
    """Makes `precision` that of the step which is traced within, with the loss scale of its state.

    Raises:
        ValueError: There are two loss scales in the state; or the step has not used the precision.
    """
    scales = [
        node.scale
        for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LossScaleState))
        if isinstance(node, LossScaleState)
    ]
    if len(scales) > 1:
        raise ValueError(
            f"The state has {len(scales)} loss scales, and a loss is multiplied by one. Put one around the others."
        )
    here = StepPrecision(precision, scales[0] if scales else None)
    # A cached trace of a helper would hold another step's precision and scale, and would not set `is_used`.
    key = object() if here.precision or scales else None
    token = _in_force.set(here)
    try:
        with keyed(key):
            yield
    finally:
        _in_force.reset(token)
    if precision is not None and not here.is_used:
        raise ValueError(
            f"The step is to run in {precision}, and nothing in it does so. Differentiate with `jdist.value_and_grad`, which "
            "casts parameters and data, or leave `precision` out."
        )


def step_precision() -> StepPrecision:
    """The precision in force, for one who applies it.

    Raises:
        ValueError: It computes in float16, and there is no loss scale.
    """
    here = _in_force.get() or StepPrecision()
    here.is_used = True
    check_loss_scale(here.precision, here.scale)
    return here


def check_loss_scale(precision: Precision | None, scale: Any) -> None:
    """Raises ValueError if the precision needs a loss scale, and there is none."""
    if precision and precision.compute == jnp.float16 and scale is None:
        raise ValueError(
            "float16 has no room for small gradients, so the loss needs a scale, and there is none in the state of the step. "
            "Wrap the optimizer, `tx = jdist.sync.dynamic_loss_scale(tx)`, and keep `tx.init(params)` in the state; or compute "
            "in bfloat16."
        )


def float_dtype(what: str, dtype: Any) -> np.dtype:
    """`dtype` as a dtype.

    Raises:
        TypeError: It is none of floating-point numbers; the message calls it `what`.
    """
    try:
        found = None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{what} is a floating-point dtype, such as jnp.bfloat16, got {dtype!r}.")
    return found


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    def one(leaf: Any) -> Any:
        floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf).astype(dtype) if floating else leaf

    return jax.tree.map(one, tree)
