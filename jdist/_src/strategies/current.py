"""Which strategy is in force."""

import dataclasses
import functools

import jax

from jdist._src.replica.context import CrossReplicaContext, ReplicaContext, current_context, set_default_context
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.one_device import OneDeviceStrategy


def get_strategy() -> Strategy:
    """The strategy whose scope or replica function is around this call; else one replica on JAX's default device.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     jdist.get_strategy() is strategy
        True
    """
    return current_context().strategy or _default()


def has_strategy() -> bool:
    """Whether a strategy's scope or replica function is around this call.

    Example:
        >>> jdist.has_strategy()
        False
    """
    strategy = current_context().strategy
    return strategy is not None and strategy is not _default()


def set_strategy(strategy: Strategy | None) -> None:
    """Makes `strategy` the one in force wherever no scope is entered, in all threads; None goes back to the default.

    For notebooks, where a `with` around every cell is a burden. It is as if the whole program stood in `strategy.scope()`.

    Raises:
        RuntimeError: Called inside a scope or a replica function.
        TypeError: It is no strategy.

    Example:
        >>> jdist.set_strategy(jdist.MirroredStrategy(["cpu:0", "cpu:1"]))
        >>> jdist.get_strategy().num_replicas_in_sync
        2
        >>> jdist.set_strategy(None)
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"A strategy is needed, or None, got {type(strategy).__name__}.")
    set_default_context(CrossReplicaContext(strategy) if strategy else None)


def get_replica_context() -> ReplicaContext | None:
    """What this replica knows of the others; None in the cross-replica context, where no replica is asking.

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
