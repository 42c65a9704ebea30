"""Forced CPU devices, for tests of multi-device programs on any machine."""

import sys

import jax

from jdist._src.core.arguments import as_int
from jdist._src.core.backend_start import backend_start_line
from jdist._src.core.jax_compat import has_backend


def use_cpu_devices(count: int) -> None:
    """Makes JAX create `count` CPU devices in this process, so that multi-device programs run without accelerators.

    Call it before JAX starts: before the first array, and before `jax.devices()`. It overrides `JAX_NUM_CPU_DEVICES` and the
    count in `XLA_FLAGS`. A call after the start has no effect if JAX has `count` CPU devices, so notebook cells can run
    twice. Where accelerators exist, strategies use these, and the call has no effect on them.

    Args:
        count: The number of CPU devices. With several processes, of this process.

    Raises:
        RuntimeError: JAX has started with another number of CPU devices.
        TypeError: `count` is not an integer.
        ValueError: `count` is less than 1.

    Example:
        >>> jdist.use_cpu_devices(8)
        >>> jdist.MirroredStrategy().num_replicas_in_sync
        8
    """
    count = as_int("`count`", count, minimum=1)
    if not has_backend():
        jax.config.update("jax_num_cpu_devices", count)
    elif jax.default_backend() == "cpu" and jax.local_device_count() != count:
        number = f"{jax.local_device_count()} CPU device{'s' * (jax.local_device_count() > 1)}"
        pytest = (
            f" With pytest, write `jdist_devices = {count}` in the configuration." if "pytest" in sys.modules else ""
        )
        raise RuntimeError(
            f"`jdist.use_cpu_devices({count})` is too late: JAX has started{backend_start_line()} with {number}. Restart the "
            "Python process (in a notebook: restart the runtime) and run this call first, before the first array is created."
            f"{pytest}"
        )
