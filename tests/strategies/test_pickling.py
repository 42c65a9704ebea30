"""Strategies in pickles and copies: built again on the devices of the same names, here and in another process."""

import copy
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
from processes.runner import ROOT

OTHERS = {
    "virtual": lambda: jdist.MirroredStrategy(["cpu:1", "cpu:0"], virtual_replicas=6),
    "hierarchical": lambda: jdist.MirroredStrategy(cross_device_ops=jdist.HierarchicalAllReduce(group_size=4)),
    "packed": lambda: jdist.MirroredStrategy(communication_options=jdist.CommunicationOptions(0)),
    "central_on_a_device": lambda: jdist.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:5", "optimizer"),
    "model_axis": lambda: jdist.ShardedStrategy(
        "optimizer",
        Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("data", "model")),
        "model",
        {"kernel": PartitionSpec(None, "model")},
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
    """What is to be the same of a strategy that is built again."""
    view, context = strategy._backend, strategy._context
    layout = getattr(view, "layout", None)
    return (
        type(strategy),
        type(view),
        view.replicas,
        view.home,
        layout and (layout.shard, layout.patterns, layout.axis),
        context.cross_device_ops,
        context.communication_options,
    )


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_strategy_pickled_is_built_again_with_the_same_devices_and_options(make):
    strategy = make()
    again = pickle.loads(pickle.dumps(strategy))
    assert again is not strategy
    assert facts(again) == facts(strategy)
    assert facts(pickle.loads(pickle.dumps(again))) == facts(strategy)


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_strategy_copied_is_itself(make):
    strategy = make()
    assert copy.copy(strategy) is strategy
    assert copy.deepcopy({"strategy": [strategy]})["strategy"][0] is strategy


def test_strategy_pickled_goes_on_with_a_state_of_the_first(two):
    scale = lambda w: (w * jdist.num_replicas(), jdist.all_reduce("sum", jdist.replica_id()))
    state, _ = two.step(scale)(two.put(np.float32(1)))
    state, total = pickle.loads(pickle.dumps(two)).step(scale)(state)
    assert (float(state), int(total)) == (4.0, 1)


def read_elsewhere(path, strategy, devices):
    path.write_bytes(pickle.dumps(strategy))
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", READ, path], capture_output=True, text=True, timeout=120, env=environment
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_strategy_pickled_is_built_in_another_process_on_devices_of_the_same_names(tmp_path):
    strategy = jdist.MirroredStrategy(["cpu:2", "cpu:1"])
    assert read_elsewhere(tmp_path / "pickle", strategy, 3) == "MirroredStrategy(['cpu:2', 'cpu:1']) 2\n"


def test_strategy_pickled_is_refused_where_a_device_is_missing(tmp_path):
    text = read_elsewhere(tmp_path / "pickle", STRATEGIES["mirrored_3"](), 2)
    assert text.startswith(
        "A pickled MirroredStrategy is built on the devices of the same names, which this process does not"
    )
    assert "There is no device 'cpu:5'. This process has cpu:0, cpu:1." in text
    assert "`strategy.put(state)`" in text


def test_tpu_strategy_of_a_topology_is_built_again_by_its_name():
    strategy = jdist.TPUStrategy(topology="v5e:2x2")
    again = pickle.loads(pickle.dumps(strategy))
    assert repr(again) == repr(strategy)
    assert copy.deepcopy(strategy) is strategy


def test_strategy_on_a_topology_is_refused_with_what_to_pickle():
    strategy = jdist.MirroredStrategy(topology_devices("v5e:2x2"))
    says = r"A MirroredStrategy on the devices of a topology cannot be pickled.*build the strategy again on `jdist\.described"
    with pytest.raises(TypeError, match=says):
        pickle.dumps(strategy)
    assert copy.deepcopy(strategy) is strategy


def test_step_is_refused_by_pickle_and_copied_as_itself(two):
    step = two.step(lambda w: (w, None))
    with pytest.raises(
        TypeError, match=r"A step cannot be pickled.*Pickle its function, `step\.__wrapped__`.*`jdist\.export`"
    ):
        pickle.dumps(step)
    assert copy.copy(step) is copy.deepcopy(step) is step
