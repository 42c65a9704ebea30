"""Strategies on local devices in joined processes: an error without devices, and a warning for device names."""

import pickle

import pytest

import jdist

pytestmark = pytest.mark.slow

FUNCTION = "processes.local_devices_worker:warnings_and_devices"
REFUSED = {  # construction -> the strategy, the line for one model per process
    "mirrored": ("`MirroredStrategy`", "MirroredStrategy(jax.local_devices())"),
    "central": ("`CentralStorageStrategy`", "CentralStorageStrategy(jax.local_devices())"),
    "default init": ("The default strategy", "jdist.set_strategy(jdist.OneDeviceStrategy(jax.local_devices()[0]))"),
    "default step": ("The default strategy", "jdist.set_strategy(jdist.OneDeviceStrategy(jax.local_devices()[0]))"),
    "workers": ("`ParameterServerStrategy`", "ParameterServerStrategy(workers=jax.local_devices())"),
    "one device": ("`OneDeviceStrategy`", "OneDeviceStrategy(jax.local_devices()[0])"),
    "sharded": ("`ShardedStrategy`", 'ShardedStrategy(mesh=Mesh(np.array(jax.local_devices()), ("data",)))'),
}
WARNED = ("mirrored by name", "central by name", "one device by name")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of the pickles of two processes."""
    return tmp_path_factory.mktemp("pickles")


@pytest.fixture(scope="module")
def outputs(folder):
    """Returns the warnings and the device indices of each of two processes, which have not created a strategy before."""
    with jdist.testing.processes(2, devices_per_process=2) as pair:
        return pair.run(FUNCTION, folder)


def test_strategies_without_devices_are_refused_on_joined_processes_and_name_the_strategy_of_all(outputs):
    for number, (messages, _) in enumerate(outputs):
        refused = dict(line.split(": ", 1) for line in messages if "UserWarning" not in line)
        assert set(refused) == set(REFUSED)
        for name, (strategy, explicit) in REFUSED.items():
            assert refused[name].startswith(
                f"{strategy} uses only the devices of this process, but it is process {number} of 2: each process trains a "
                "separate model. For one model on the devices of all of them, write `MultiWorkerMirroredStrategy()` or "
                "`auto_strategy()`"
            )
            assert f"as in a sweep, pass device objects: `{explicit}`." in refused[name]


def test_strategies_on_named_devices_of_joined_processes_warn_once(outputs):
    for messages, _ in outputs:
        warned = [line.split(": ", 1) for line in messages if "UserWarning" in line]
        assert [name for name, _ in warned] == list(WARNED)
        assert all(text.startswith("UserWarning True `") for _, text in warned)


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


def test_strategies_on_local_devices_of_a_single_process_are_accepted(one_process, tmp_path):
    ((warned, _),) = one_process.run(FUNCTION, tmp_path)
    assert warned == []
