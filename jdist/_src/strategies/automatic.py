"""`auto_strategy`: chooses a strategy for the available devices."""

import logging

import jax

from jdist._src.devices.mesh import REPLICA_AXIS, check_axis_name
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.mirrored import MirroredStrategy
from jdist._src.strategies.multi_worker import MultiWorkerMirroredStrategy, join_cluster, start_devices
from jdist._src.strategies.one_device import OneDeviceStrategy
from jdist._src.strategies.tpu import TPUStrategy

_log = logging.getLogger("jdist")


def auto_strategy(*, axis_name: str = REPLICA_AXIS) -> Strategy:
    """Returns a strategy for the available devices, and logs the choice to the logger `"jdist"` (level INFO, on process 0).

    Joins the other processes first, if `jdist.cluster.resolve()` finds a cluster: call it before the first use of JAX. Then
    `TPUStrategy` on TPUs; otherwise `MultiWorkerMirroredStrategy`, if there are several processes; `MirroredStrategy`, if this
    process has several devices; otherwise `OneDeviceStrategy`.

    Where no cluster is found, and the environment has variables of a launcher or a queue that no resolver accepts, it warns
    with their names.

    Args:
        axis_name: The name of the replica axis in replica functions; see `MirroredStrategy`.

    Raises:
        ValueError: The settings of a cluster are malformed.
        RuntimeError: JAX has started before the processes joined, or the processes cannot join.

    Example:
        >>> jdist.auto_strategy().num_replicas_in_sync
        8
    """
    check_axis_name(axis_name)
    resolver = join_cluster(None)
    devices = start_devices()
    platform, count, processes = devices[0].platform, len(devices), jax.process_count()
    if platform == "tpu":
        strategy, reason = (
            TPUStrategy(resolver, axis_name=axis_name),
            f"there are {count} TPU cores on {processes} hosts",
        )
    elif processes > 1:
        strategy, reason = (
            MultiWorkerMirroredStrategy(resolver, axis_name=axis_name),
            f"{processes} processes have {count} {platform} devices",
        )
    elif count > 1:
        strategy = MirroredStrategy(devices, axis_name=axis_name)
        reason = f"there are {count} {platform} devices, and one process"
    else:
        strategy = OneDeviceStrategy(devices[0], axis_name=axis_name)
        reason = f"there is one device, {platform}, and one process"
    if jax.process_index() == 0:
        _log.info("auto_strategy: %s, because %s.", type(strategy).__name__, reason)
    return strategy
