"""`auto_strategy`: the strategy for what there is, and what it says of it."""

import logging
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jdist


def run(code, **environment):
    """What a process of its own prints and logs, on so many devices as `environment` says."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=os.environ | environment, text=True, capture_output=True, timeout=120)


def test_several_devices_are_mirrored_over_and_it_is_said(caplog):
    with caplog.at_level(logging.INFO, "jdist"):
        strategy = jdist.auto_strategy()
    assert type(strategy) is jdist.MirroredStrategy
    assert list(strategy.mesh.devices.flat) == jax.devices()
    assert caplog.messages == ["auto_strategy: MirroredStrategy, as there are 8 cpu devices, and one process."]


def test_what_it_picks_runs():
    strategy = jdist.auto_strategy()
    rows = strategy.put(jdist.PerReplica(np.arange(8.0, dtype=np.float32)))
    assert float(strategy.run(lambda x: jdist.all_reduce("sum", x), (rows,))) == 28


def test_it_is_picked_anew_each_time():
    assert jdist.auto_strategy() is not jdist.auto_strategy()


def test_one_device_is_that_of_one_replica_and_it_is_said():
    code = "import jdist\nstrategy = jdist.auto_strategy()\nprint(repr(strategy), float(strategy.put(2.0)))"
    done = run(code, JAX_NUM_CPU_DEVICES="1")
    assert done.stdout == "OneDeviceStrategy(['cpu:0']) 2.0\n", done.stderr
    assert "auto_strategy: OneDeviceStrategy, as there is one device, cpu, and one process." in done.stderr


@pytest.mark.parametrize("libtpu", ["there", "not_there"])
def test_machine_without_accelerators_has_cpu_devices_whether_the_compiler_is_there(libtpu):
    block = "" if libtpu == "there" else "import sys\nsys.modules['libtpu'] = None\n"
    environment = {"JAX_PLATFORMS": "", "JAX_NUM_CPU_DEVICES": "2"}
    done = run(f"{block}import jdist\nprint(jdist.auto_strategy().num_replicas_in_sync)", **environment)
    assert done.stdout == "2\n", done.stderr


def test_described_devices_are_not_taken():
    jdist.topology_devices("v5e:2x2")
    assert jdist.auto_strategy().mesh.devices.flat[0].platform == "cpu"
