"""Strategies on local devices in joined processes: each warns once, because each process trains its own model."""

import pickle

import pytest

import jdist

pytestmark = pytest.mark.slow

FUNCTION = "processes.local_devices_worker:warnings_and_devices"
WARNED = {  # construction -> the strategy, and the advice of the warning
    "mirrored": ("MirroredStrategy", "MultiWorkerMirroredStrategy()"),
    "central by name": ("CentralStorageStrategy", "CentralStorageStrategy(compute_devices=jax.devices())"),
    "one device": ("OneDeviceStrategy", "MultiWorkerMirroredStrategy()"),
    "sharded": ("ShardedStrategy", 'ShardedStrategy(mesh=Mesh(np.array(jax.devices()), ("data",)))'),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of the pickles of two processes."""
    return tmp_path_factory.mktemp("pickles")


@pytest.fixture(scope="module")
def outputs(folder):
    """Returns the warnings and the device indices of each of two processes, which have not created a strategy before."""
    with jdist.testing.processes(2, devices_per_process=2) as pair:
        return pair.run(FUNCTION, folder)


@pytest.mark.slow
def test_strategies_on_local_devices_of_joined_processes_warn_once_and_advise_all_devices(outputs):
    for number, (warned, _) in enumerate(outputs):
        expected = [
            f"{name}: UserWarning True `{strategy}` uses only the devices of process {number}, but there are 2 processes: each "
            f"process trains a separate model. For one model on the devices of all 2 processes, write `{advice}`. If one "
            "model per process is intended, pass device objects, such as `jax.local_devices()`."
            for name, (strategy, advice) in WARNED.items()
        ]
        assert [line for line in warned if "UserWarning" in line] == expected


def test_unpickled_strategy_has_the_same_global_devices_or_the_local_devices_of_its_process(outputs):
    for number, (_, indices) in enumerate(outputs):
        assert indices == [[3, 2, 1, 0], [2 * number + 1]]


def test_pickled_strategy_of_several_processes_cannot_be_loaded_in_a_process_that_has_not_joined(outputs, folder):
    message = (
        r"A pickled MirroredStrategy is built on the devices of the same names, which this process does not have\. Device "
        r"cpu:1 of process 1 does not exist: the number of joined processes is 1, and process 1 has 0 devices of platform 'cpu'\."
    )
    with pytest.raises(ValueError, match=message):
        pickle.loads((folder / "0").read_bytes())


def test_strategies_on_local_devices_of_a_single_process_do_not_warn(one_process, tmp_path):
    ((warned, _),) = one_process.run(FUNCTION, tmp_path)
    assert warned == []
