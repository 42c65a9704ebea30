"""Which strategy is in force."""

import functools

import jax

from jdist.context import current
from jdist.strategies.base import Strategy
from jdist.strategies.one_device import OneDeviceStrategy


def get_strategy() -> Strategy:
    """The strategy whose scope or replica function is around this call; else one replica on JAX's default device.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     jdist.get_strategy() is strategy
        True
    """
    return current().strategy or _default()


def has_strategy() -> bool:
    """Whether a strategy's scope or replica function is around this call.

    Example:
        >>> jdist.has_strategy()
        False
    """
    return current().strategy is not None


@functools.cache
def _default() -> Strategy:
    return OneDeviceStrategy(jax.local_devices()[0])
