"""The current strategy: `get_strategy`, `has_strategy`, `set_strategy` and `get_replica_context`."""

import contextlib
import dataclasses
import functools

import jax

from jdist._src.replica.context import CrossReplicaContext, ReplicaContext, current_context, set_default_context
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.keras_distribution import keras_distribution
from jdist._src.strategies.one_device import OneDeviceStrategy

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


@functools.cache
def _default() -> Strategy:
    return OneDeviceStrategy(jax.local_devices()[0])
