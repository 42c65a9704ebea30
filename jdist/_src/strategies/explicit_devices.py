"""The check of a strategy that uses only local devices: in one process of several, they must be explicit."""

import warnings
from typing import Any

import jax

from jdist._src.cluster.detection import launched_process
from jdist._src.core.jax_compat import has_backend
from jdist._src.core.source_lines import levels_to_user, warn_at_caller


def check_devices_are_explicit(strategy: str, devices: Any, explicit: str, of_all: str = "") -> None:
    """Raises if a strategy uses only the devices of this process, no devices were passed, and this process is one of several.

    Each process would train a separate model. Device objects are explicit. Device names are relative to a process, and are also
    written in programs for one process, so there is a warning, once per process and strategy. Called by the strategy's
    `__init__`: the warning names the line that calls it.

    Args:
        strategy: The name of the strategy's class.
        devices: The devices, as objects or names, that the program has passed; None if it has passed none.
        explicit: The line to write for one model per process.
        of_all: The line to write for this strategy on the devices of all processes, if it can use them.

    Raises:
        RuntimeError: No devices were passed.
    """
    if not isinstance(devices, list | tuple | None):
        return  # `replica_mesh` checks it
    passed = devices or ()
    if any(isinstance(device, jax.Device) for device in passed) or (passed and strategy in _warned_strategies):
        return
    if not (reason := _reason_for_several_processes()):
        return
    or_all = f", or, after `jdist.cluster.resolve().initialize()`, `{of_all}`"
    message = (
        f"{strategy} uses only the devices of this process, but {reason}: each process trains a separate model. For one model "
        f"on the devices of all of them, write `MultiWorkerMirroredStrategy()` or `auto_strategy()`{of_all and or_all}. If one "
        f"model per process is intended, as in a sweep, pass device objects: `{explicit}`."
    )
    if not passed:
        raise RuntimeError(message)
    _warned_strategies.add(strategy)
    warnings.warn(message, stacklevel=levels_to_user())


_warned_strategies: set[str] = set()


def _reason_for_several_processes() -> str:
    """Returns why this process is one of several; an empty string if it is the only one. It does not start JAX."""
    is_joined = jax.distributed.is_initialized()
    if (is_joined or has_backend()) and jax.process_count() > 1:
        return f"it is process {jax.process_index()} of {jax.process_count()}"
    if is_joined:
        return ""
    try:
        launched = launched_process()
    except ValueError as error:
        warn_at_caller(f"The environment has settings of several processes that are not complete. {error}")
        return ""
    if launched is None:
        return ""
    return f"a launcher has started it as process {launched.process_id} of {launched.num_processes}"
