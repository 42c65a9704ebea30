"""The current strategy, and the functions that use it: `get_strategy`, `set_strategy`, `init`, `step` and others."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import jax

from jdist._src.core.arguments import check_callable
from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.tree import PyTree
from jdist._src.execution.backend import Equivalence
from jdist._src.execution.build_programs import StepOptions, View
from jdist._src.replica.context import CrossReplicaContext, ReplicaContext, current_context, set_default_context
from jdist._src.replica.precision import Precision
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.explicit_devices import check_devices_are_explicit
from jdist._src.strategies.keras_distribution import keras_distribution
from jdist._src.strategies.late_bound_step import Step
from jdist._src.strategies.one_device import OneDeviceStrategy

_StateT = TypeVar("_StateT")
_InputsT = ParamSpec("_InputsT")
_OutputsT = TypeVar("_OutputsT")

_keras = contextlib.ExitStack()  # the distribution of Keras that `set_strategy` has set


def get_strategy() -> Strategy:
    """Returns the strategy of the enclosing scope or replica function, or a strategy of one replica on the default device.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     jdist.get_strategy() is strategy
        True
    """
    return current_context().strategy or _default()


def has_strategy() -> bool:
    """Returns whether this call is inside a scope or a replica function of a strategy, or after `set_strategy`.

    Example:
        >>> jdist.has_strategy()
        False
    """
    strategy = current_context().strategy
    return strategy is not None and strategy is not _default()


def set_strategy(strategy: Strategy | None) -> None:
    """Makes `strategy` the current strategy outside any scope, in all threads; None restores the default.

    For notebooks, where every cell would need a `with` block. It has the effect of `strategy.scope()` around the program.
    Import Keras before, if its own `fit` is used.

    Raises:
        RuntimeError: Called inside a scope or a replica function.
        TypeError: `strategy` is not a strategy.

    Example:
        >>> jdist.set_strategy(jdist.MirroredStrategy(["cpu:0", "cpu:1"]))
        >>> jdist.get_strategy().num_replicas_in_sync
        2
        >>> jdist.set_strategy(None)
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"`strategy` must be a strategy or None, got {type(strategy).__name__}.")
    set_default_context(CrossReplicaContext(strategy) if strategy else None)
    _keras.close()
    if strategy:
        _keras.enter_context(keras_distribution(strategy))


def get_replica_context() -> ReplicaContext | None:
    """Returns the replica context; None in the cross-replica context.

    Example:
        >>> jdist.get_replica_context().num_replicas_in_sync
        1
    """
    context = current_context()
    if not isinstance(context, ReplicaContext):
        return None
    return dataclasses.replace(context, strategy=get_strategy())


@explains_arguments("init", "jdist.init")
def init(make_state: Callable[..., _StateT], *args: PyTree) -> _StateT:
    """Creates a state on the devices of the current strategy: `jdist.get_strategy().init(make_state, *args)`.

    Args:
        make_state: A replica function that creates the state from `args`.
        args: Its arguments: trees of arrays and numbers.

    Raises:
        RuntimeError: There is no strategy, and this process is one of several: each would train a separate model.
        NotMirroredError: A leaf that is not wrapped may differ between the replicas.
        RuntimeError: Called inside a replica function.
        TypeError: See `jdist.Strategy.init`.
        ValueError: See `jdist.Strategy.init`.

    Example:
        >>> with jdist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     state = jdist.init(
        ...         lambda key: {"w": jax.random.normal(key, (3,))}, jax.random.key(0)
        ...     )
        >>> len(state["w"].sharding.device_set)
        2
    """
    return _strategy_of_program().init(make_state, *args)


@overload
def step(
    fn: Callable[Concatenate[_StateT, _InputsT], tuple[Any, _OutputsT]],
    *,
    precision: Precision | None = None,
    steps_per_call: None = None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
    view: View = "replica",
    equivalence: Equivalence = "warn",
    static_argnames: str | Sequence[str] = (),
) -> Step[_StateT, _InputsT, _OutputsT]: ...
@overload
def step(
    fn: Callable[Concatenate[_StateT, ...], tuple[Any, _OutputsT]],
    *,
    precision: Precision | None = None,
    steps_per_call: int | None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
    view: View = "replica",
    equivalence: Equivalence = "warn",
    static_argnames: str | Sequence[str] = (),
) -> Step[_StateT, ..., _OutputsT]: ...
@overload
def step(
    *,
    precision: Precision | None = None,
    steps_per_call: None = None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
    view: View = "replica",
    equivalence: Equivalence = "warn",
    static_argnames: str | Sequence[str] = (),
) -> Callable[
    [Callable[Concatenate[_StateT, _InputsT], tuple[Any, _OutputsT]]], Step[_StateT, _InputsT, _OutputsT]
]: ...
@overload
def step(
    *,
    precision: Precision | None = None,
    steps_per_call: int | None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
    view: View = "replica",
    equivalence: Equivalence = "warn",
    static_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[Concatenate[_StateT, ...], tuple[Any, _OutputsT]]], Step[_StateT, ..., _OutputsT]]: ...
@explains_arguments("step", "jdist.step")
def step(
    fn: Any = ...,
    *,
    precision: Precision | None = None,
    steps_per_call: int | None = None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
    view: View = "replica",
    equivalence: Equivalence = "warn",
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Returns a training step that is compiled for the current strategy when it is called.

    The strategy does not have to exist when the step is defined, so a step can be a function of a module. A call is a call of
    the program that `strategy.step(fn)` returns for the current strategy (`strategy.scope()`, `jdist.set_strategy`; without
    one, a strategy of one replica on the default device), with the same results and the same proof.

    Args:
        fn: A replica function `(state, *inputs) -> (state, outputs)`, see `jdist.Strategy.step`; omitted in
            `@jdist.step(precision=...)`. Inputs are passed by position or by name.
        precision: See `jdist.Strategy.step`.
        steps_per_call: See `jdist.Strategy.step`.
        donate: See `jdist.Strategy.step`.
        compiler_options: See `jdist.Strategy.step`.
        static_argnames: See `jdist.Strategy.step`.
        view: See `jdist.Strategy.step`.
        equivalence: See `jdist.Strategy.step`.

    Returns:
        A `jdist.Step`. `step.on(strategy)` is its program for a strategy, and `step.__wrapped__` is `fn`, which outside any
        strategy runs as plain JAX.

    Raises:
        TypeError: An argument has the wrong type. When called: the arguments do not fit the parameters of `fn`; and as the
            steps of `jdist.Strategy.step`.
        ValueError: `steps_per_call` is less than 1, or `static_argnames` are not the last parameters.
        NotMirroredError: When called: a leaf of the new state may differ between the replicas.
        RuntimeError: When called: there is no strategy, and this process is one of several.

    Example:
        >>> @jdist.step(static_argnames="rate")
        ... def descend(w, x, *, rate=0.1):
        ...     loss, grad = jax.value_and_grad(lambda w: jax.numpy.mean((w * x) ** 2))(w)
        ...     return w - rate * jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     w = jdist.init(lambda: jax.numpy.float32(1.0))
        ...     w, loss = descend(w, strategy.split(np.float32([1, 2])), rate=0.25)
        >>> float(w), float(loss)
        (-0.25, 2.5)
        >>> print(descend.proof)
        2 of 2 results are replicated
        2 of 2 results are what one device computes from the global batch
    """
    options = StepOptions(precision, steps_per_call, donate, compiler_options, static_argnames, view, equivalence)
    if fn is ...:
        return functools.partial(step, **vars(options))
    check_callable(fn)
    return Step(fn, options, _strategy_of_program)


def _strategy_of_program() -> Strategy:
    """Returns the current strategy. A default that would train a separate model per process is an error."""
    return current_context().strategy or _checked_default()


@functools.cache
def _checked_default() -> Strategy:
    line = "jdist.set_strategy(jdist.OneDeviceStrategy(jax.local_devices()[0]))"
    check_devices_are_explicit("The default strategy", None, line)
    return _default()


@functools.cache
def _default() -> Strategy:
    return OneDeviceStrategy(jax.local_devices()[0])
