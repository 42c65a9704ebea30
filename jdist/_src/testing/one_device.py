"""Compares training under a strategy with training on one device."""

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.tree import PyTree, describe_type
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.current import get_strategy, has_strategy
from jdist._src.strategies.one_device import OneDeviceStrategy
from jdist._src.strategies.variables import read_values
from jdist._src.values.per_replica import PerReplica

# pytest leaves the frames of this module out of the traceback of a failed assertion.
__tracebackhide__ = operator.methodcaller("errisinstance", AssertionError)


def assert_same_as_one_device(
    make_state: Callable[[], PyTree],
    step: Callable[..., tuple[PyTree, PyTree]],
    batches: Iterable[PyTree],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    strategy: Strategy | None = None,
) -> None:
    """Raises AssertionError unless training under a strategy computes the same numbers as training on one device.

    After each batch it compares the state, and those outputs that are replicated. Values per replica (`jdist.PerReplica`),
    such as the loss of the examples of one replica, differ by definition and are not compared. It finds mistakes that the
    replication proof accepts: a sum in place of a mean, a mean of means over parts of different sizes, statistics of one
    replica's examples.

    Args:
        make_state: Creates the state, as `strategy.init` accepts it.
        step: The function `(state, *inputs) -> (state, outputs)` of one replica, or a step of a strategy.
        batches: Global batches on the host. A tuple contains the inputs of the step, any other tree is its only input. Each
            array is `[batch, ...]`; the number of replicas divides `batch`.
        rtol: Tolerance relative to the value on one device; see `numpy.testing.assert_allclose`. Sums in another order change
            the last bits, and optimizers such as Adam amplify them for gradients near zero.
        atol: Absolute tolerance.
        strategy: The strategy; the current one by default.

    Raises:
        AssertionError: The numbers differ. The message names the batch, the leaf and the largest difference.
        TypeError: `step` is not a function.
        ValueError: `batches` is empty.
        RuntimeError: No strategy is passed or current, so one device would be compared with itself.

    Example:
        >>> def step(w, x):
        ...     return w - 0.1 * jdist.all_reduce("mean", x.mean()), None
        >>> with jdist.testing.strategy("mirrored_2").scope():
        ...     jdist.testing.assert_same_as_one_device(
        ...         lambda: jnp.zeros(()), step, [np.ones(8, np.float32)]
        ...     )
    """
    if not callable(step):
        raise TypeError(f"`step` must be a function `(state, *inputs) -> (state, outputs)`, got {describe_type(step)}.")
    if strategy is None and not has_strategy():
        raise RuntimeError(
            "No strategy is current, so one device would be compared with itself. Call it in `strategy.scope()`, pass "
            '`strategy=`, or write `@jdist.testing.strategies("mirrored_2")` above the test.'
        )
    strategy = strategy or get_strategy()
    one_device = OneDeviceStrategy(next(iter(strategy.replicas.local_devices.values())))
    fn = inspect.unwrap(step)  # a step of another strategy
    runs = [(each, each.step(fn)) for each in (strategy, one_device)]
    states = [each.init(make_state) for each, _ in runs]
    number = -1
    for number, batch in enumerate(batches):
        inputs = batch if isinstance(batch, tuple) else (batch,)
        results = [program(state, *each.split(inputs)) for (each, program), state in zip(runs, states, strict=True)]
        states = [state for state, _ in results]
        actual, expected = (_comparable({"state": state, "outputs": outputs}) for state, outputs in results)
        _assert_close(actual, expected, f"After batch {number}, {strategy!r}", rtol, atol)
    if number < 0:
        raise ValueError("`batches` is empty. Pass at least one global batch.")


def _comparable(results: dict[str, PyTree]) -> dict[str, PyTree]:
    """Returns the results as arrays of the host, without values per replica; the data of random keys."""
    is_varying = lambda node: isinstance(node, PerReplica)
    replicated = jax.tree.map(lambda node: None if is_varying(node) else node, results, is_leaf=is_varying)
    return jax.tree.map(_on_host, read_values(replicated))


def _on_host(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _assert_close(actual: PyTree, expected: PyTree, subject: str, rtol: float, atol: float) -> None:
    import chex

    try:
        chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        raise AssertionError(
            f"{subject} and one device computed different numbers (rtol={rtol}, atol={atol}). Actual: the "
            f"strategy; desired: one device.\n{error}"
        ) from error
