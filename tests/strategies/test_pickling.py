"""Pickles and copies of strategies: built again on the devices of the same names, in this and in another process."""

import copy
import pathlib
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jdist
from jdist._src.devices.topology import topology_devices

from laws import STRATEGIES

OTHERS = {
    "virtual": lambda: jdist.MirroredStrategy(["cpu:1", "cpu:0"], virtual_replicas=6),
    "hierarchical": lambda: jdist.MirroredStrategy(cross_device_ops=jdist.HierarchicalAllReduce(group_size=4)),
    "packed": lambda: jdist.MirroredStrategy(communication_options=jdist.CommunicationOptions(0)),
    "central_on_a_device": lambda: jdist.CentralStorageStrategy(
        ["cpu:1", "cpu:2"], parameter_device="cpu:5", offload="optimizer"
    ),
    "model_axis": lambda: jdist.ShardedStrategy(
        "optimizer",
        mesh=Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("data", "model")),
        model_axis="model",
        layout={"kernel": PartitionSpec(None, "model")},
    ),
}
ALL = STRATEGIES | OTHERS
READ = """
import pathlib, pickle, sys
import jax
text = pathlib.Path(sys.argv[1]).read_bytes()
try:
    strategy = pickle.loads(text)
    print(strategy, strategy.num_replicas_in_sync)
except ValueError as error:
    print(error)
"""


def facts(strategy):
    """Returns the properties that a strategy and its pickled copy share."""
    backend, context = strategy._backend, strategy._context
    rules = backend.state_sharding
    return (
        type(strategy),
        type(backend),
        backend.replicas,
        strategy.shardings({"w": jax.ShapeDtypeStruct((8, 8), np.float32)}),
        rules and (rules.shard, rules.patterns, rules.axis),
        context.cross_device_ops,
        context.communication_options,
    )


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_pickled_strategy_has_the_same_devices_and_options(make):
    strategy = make()
    again = pickle.loads(pickle.dumps(strategy))
    assert again is not strategy
    assert facts(again) == facts(strategy)
    assert facts(pickle.loads(pickle.dumps(again))) == facts(strategy)


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_copy_of_a_strategy_is_the_strategy(make):
    strategy = make()
    assert copy.copy(strategy) is strategy
    assert copy.deepcopy({"strategy": [strategy]})["strategy"][0] is strategy


def test_pickled_strategy_continues_with_a_state_of_the_original(two):
    scale = lambda w: (w * jdist.num_replicas(), jdist.all_reduce("sum", jdist.replica_id()))
    state, _ = two.step(scale)(two.put(np.float32(1)))
    state, total = pickle.loads(pickle.dumps(two)).step(scale)(state)
    assert (float(state), int(total)) == (4.0, 1)


def read_elsewhere(path, strategy, devices):
    path.write_bytes(pickle.dumps(strategy))
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(pathlib.Path(jdist.__file__).parent.parent),
    }
    completed = subprocess.run(
        [sys.executable, "-c", READ, path], capture_output=True, text=True, timeout=120, env=environment
    )
    assert not completed.returncode, completed.stderr
    return completed.stdout


@pytest.mark.slow
def test_pickled_strategy_uses_devices_of_the_same_names_in_another_process(tmp_path):
    strategy = jdist.MirroredStrategy(["cpu:2", "cpu:1"])
    assert read_elsewhere(tmp_path / "pickle", strategy, 3) == "MirroredStrategy(['cpu:2', 'cpu:1']) 2\n"


@pytest.mark.slow
def test_pickled_strategy_raises_in_a_process_without_its_devices(tmp_path):
    text = read_elsewhere(tmp_path / "pickle", STRATEGIES["mirrored_3"](), 2)
    assert text.startswith(
        "A pickled MirroredStrategy is built on the devices of the same names, which this process does not"
    )
    assert "Device 'cpu:5' not found. This process has cpu:0, cpu:1." in text
    assert "`strategy.put(state)`" in text


def test_pickled_tpu_strategy_of_a_topology_is_built_again_by_its_name():
    strategy = jdist.TPUStrategy(topology="v5e:2x2")
    again = pickle.loads(pickle.dumps(strategy))
    assert repr(again) == repr(strategy)
    assert copy.deepcopy(strategy) is strategy


def test_pickling_a_strategy_on_topology_devices_raises():
    strategy = jdist.MirroredStrategy(topology_devices("v5e:2x2"))
    message = r"A MirroredStrategy on topology devices cannot be pickled.*build the strategy again on `jdist\.topology_devices"
    with pytest.raises(TypeError, match=message):
        pickle.dumps(strategy)
    assert copy.deepcopy(strategy) is strategy


def test_pickling_a_step_raises_and_its_copy_is_the_step(two):
    step = two.step(lambda w: (w, None))
    with pytest.raises(
        TypeError, match=r"A step cannot be pickled.*Pickle its function, `step\.__wrapped__`.*`jdist\.export`"
    ):
        pickle.dumps(step)
    assert copy.copy(step) is copy.deepcopy(step) is step
