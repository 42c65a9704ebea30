"""`auto_strategy`: chooses a strategy for the available devices."""

import logging

import jax

from jdist._src.strategies.base import Strategy
from jdist._src.strategies.mirrored import MirroredStrategy
from jdist._src.strategies.one_device import OneDeviceStrategy
from jdist._src.strategies.tpu import TPUStrategy

_log = logging.getLogger("jdist")


def auto_strategy() -> Strategy:
    """Returns a strategy for the available devices, and logs the choice to the logger `"jdist"`.

    On TPUs `TPUStrategy`. Otherwise `MirroredStrategy` over the devices of all processes, if several processes have joined
    (`jax.distributed.initialize`), or over the devices of this process, if it has several. Otherwise `OneDeviceStrategy`.

    Example:
        >>> jdist.auto_strategy().num_replicas_in_sync
        8
    """
    strategy, reason = _chosen()
    _log.warning("auto_strategy: %s, because %s.", type(strategy).__name__, reason)
    return strategy


def _chosen() -> tuple[Strategy, str]:
    devices = jax.devices()
    platform, count, processes = devices[0].platform, len(devices), jax.process_count()
    if platform == "tpu":
        return TPUStrategy(), f"there are {count} TPU cores on {processes} hosts"
    if processes > 1:
        return MirroredStrategy(devices), f"{processes} processes have {count} {platform} devices"
    if count > 1:
        return MirroredStrategy(devices), f"there are {count} {platform} devices, and one process"
    return OneDeviceStrategy(devices[0]), f"there is one device, {platform}, and one process"
