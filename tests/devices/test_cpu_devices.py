"""`jdist.use_cpu_devices`: before JAX starts, again, too late, and with invalid numbers."""

import os
import subprocess
import sys

import jax
import pytest

import jdist

FRESH_PROCESS = """
import jax, jdist
jdist.use_cpu_devices(2)
jdist.use_cpu_devices(3)  # before the start, the last call decides
assert len(jax.devices()) == 3
jdist.use_cpu_devices(3)
"""


def test_number_of_devices_is_the_argument_of_the_last_call():
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "5", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run([sys.executable, "-c", FRESH_PROCESS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_same_number_after_the_start_has_no_effect():
    assert len(jax.devices()) == 8
    jdist.use_cpu_devices(8)


def test_other_number_after_the_start_is_an_error():
    assert len(jax.devices()) == 8
    with pytest.raises(
        RuntimeError,
        match=r"`jdist.use_cpu_devices\(4\)` is too late: JAX has started.* with 8 CPU devices. Restart.*`jdist_devices = 4`",
    ):
        jdist.use_cpu_devices(4)


@pytest.mark.parametrize("count, error", [(0, ValueError), (True, TypeError), ("8", TypeError)])
def test_count_is_a_positive_integer(count, error):
    with pytest.raises(error, match="`count` must be an integer >= 1, got"):
        jdist.use_cpu_devices(count)
