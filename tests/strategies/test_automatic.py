"""`auto_strategy`: the chosen strategy, and the log message."""

import logging
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jdist


def run(code, **environment):
    """Runs `code` in a new process with these environment variables, and returns the completed process."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=os.environ | environment, text=True, capture_output=True, timeout=120)


def test_several_devices_get_a_mirrored_strategy_and_a_log_message(caplog):
    with caplog.at_level(logging.INFO, "jdist"):
        strategy = jdist.auto_strategy()
    assert type(strategy) is jdist.MirroredStrategy
    assert list(strategy.mesh.devices.flat) == jax.devices()
    assert caplog.messages == ["auto_strategy: MirroredStrategy, because there are 8 cpu devices, and one process."]


def test_chosen_strategy_runs():
    strategy = jdist.auto_strategy()
    rows = strategy.put(jdist.PerReplica(np.arange(8.0, dtype=np.float32)))
    assert float(strategy.run(lambda x: jdist.all_reduce("sum", x), (rows,))) == 28


def test_each_call_returns_a_new_strategy():
    assert jdist.auto_strategy() is not jdist.auto_strategy()


def test_one_device_gets_a_one_device_strategy_and_a_log_message():
    code = "import logging, jdist\nlogging.basicConfig(level=logging.INFO)\nstrategy = jdist.auto_strategy()\nprint(repr(strategy), float(strategy.put(2.0)))"
    completed = run(code, JAX_NUM_CPU_DEVICES="1")
    assert completed.stdout == "OneDeviceStrategy(['cpu:0']) 2.0\n", completed.stderr
    assert "auto_strategy: OneDeviceStrategy, because there is one device, cpu, and one process." in completed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("libtpu", ["installed", "missing"])
def test_machine_without_accelerators_uses_cpu_devices_with_and_without_libtpu(libtpu):
    block = "" if libtpu == "installed" else "import sys\nsys.modules['libtpu'] = None\n"
    environment = {"JAX_PLATFORMS": "", "JAX_NUM_CPU_DEVICES": "2"}
    completed = run(f"{block}import jdist\nprint(jdist.auto_strategy().num_replicas_in_sync)", **environment)
    assert completed.stdout == "2\n", completed.stderr


def test_topology_devices_are_not_used():
    jdist.topology_devices("v5e:2x2")
    assert jdist.auto_strategy().mesh.devices.flat[0].platform == "cpu"
