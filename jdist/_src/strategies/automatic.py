"""`auto_strategy`: the strategy for what there is."""

import logging

import jax

from jdist._src.strategies.base import Strategy
from jdist._src.strategies.mirrored import MirroredStrategy
from jdist._src.strategies.one_device import OneDeviceStrategy
from jdist._src.strategies.tpu import TPUStrategy

_log = logging.getLogger("jdist")


def auto_strategy() -> Strategy:
    """A strategy for the devices that are there, and says which, in the log of `"jdist"`.

    On TPUs `TPUStrategy`; else, where several processes have joined (`jax.distributed.initialize`), `MirroredStrategy` over the
    devices of all; else over those of this one, if it has several; else `OneDeviceStrategy`.

    Example:
        >>> jdist.auto_strategy().num_replicas_in_sync
        8
    """
    strategy, why = _chosen()
    _log.warning("auto_strategy: %s, as %s.", type(strategy).__name__, why)
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
