"""Strategies on the devices of a launched process, and variables of a cluster that no resolver accepts."""

import jax
import numpy as np
import pytest

import jdist
from jdist._src.cluster.detection import _SIZE_VARIABLES, launched_process, unresolved_variables
from jdist._src.strategies import current

LAUNCHED = {"JDIST_COORDINATOR_ADDRESS": "a:1", "JDIST_NUM_PROCESSES": "2", "JDIST_PROCESS_ID": "1"}
STRATEGIES = {  # strategies that use the devices of this process, without their names
    "mirrored": lambda: jdist.MirroredStrategy(),
    "mirrored, virtual": lambda: jdist.MirroredStrategy(virtual_replicas=8),
    "one device": lambda: jdist.OneDeviceStrategy(),
    "central": lambda: jdist.CentralStorageStrategy(),
    "sharded": lambda: jdist.ShardedStrategy(),
    "workers": lambda: jdist.ParameterServerStrategy(),
    "default init": lambda: jdist.init(lambda: np.float32(0)),
    "default step": lambda: jdist.step(lambda w: (w, None))(np.float32(0)),
}


@pytest.fixture
def launched(monkeypatch):
    """Gives this process the variables of process 1 of 2."""
    current._checked_default.cache_clear()
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_without_devices_is_refused_in_a_process_that_a_launcher_started_as_one_of_several(name, launched):
    message = (
        r"uses only the devices of this process, but a launcher has started it as process 1 of 2: .* write "
        r"`MultiWorkerMirroredStrategy\(\)` or `auto_strategy\(\)`"
    )
    with pytest.raises(RuntimeError, match=message):
        STRATEGIES[name]()


def test_explicit_devices_are_accepted_in_a_launched_process(launched):
    for strategy in (jdist.MirroredStrategy(jax.local_devices()), jdist.OneDeviceStrategy(jax.local_devices()[0])):
        with strategy.scope():
            assert int(jdist.init(lambda: np.int32(3))) == 3


def test_only_process_of_a_launcher_is_accepted(launched, monkeypatch):
    monkeypatch.setenv("JDIST_NUM_PROCESSES", "1")
    monkeypatch.setenv("JDIST_PROCESS_ID", "0")
    assert launched_process() is None
    assert jdist.MirroredStrategy().num_replicas_in_sync == 8


def test_incomplete_settings_warn_and_are_accepted(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.warns(
        UserWarning, match=r"settings of several processes that are not complete\. RANK is '3', but MASTER_ADDR"
    ):
        jdist.MirroredStrategy()


@pytest.mark.parametrize("size", _SIZE_VARIABLES)
def test_variables_of_several_processes_without_a_resolver_are_named(size):
    others = _SIZE_VARIABLES[size]
    assert unresolved_variables({size: "4", **dict.fromkeys(others, "1")}) == [size, *others]
    assert unresolved_variables({size: "1", **dict.fromkeys(others, "1")}) == []


def test_variables_with_other_uses_need_a_second_one():
    assert unresolved_variables({"NUM_PROCESSES": "8", "NNODES": "2"}) == []
    assert unresolved_variables({"PET_NNODES": "1:4"}) == ["PET_NNODES"]


@pytest.mark.parametrize("make", [jdist.auto_strategy, jdist.MultiWorkerMirroredStrategy])
def test_auto_strategy_warns_of_variables_that_no_resolver_accepts(make, monkeypatch):
    monkeypatch.setenv("LWS_GROUP_SIZE", "4")
    monkeypatch.setenv("LWS_WORKER_INDEX", "2")
    with pytest.warns(UserWarning, match="no resolver accepts them: LWS_GROUP_SIZE=4, LWS_WORKER_INDEX=2") as caught:
        make()
    assert caught[0].filename == __file__
