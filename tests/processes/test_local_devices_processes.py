"""Strategies on local devices in real processes that have joined: each warns once, since each process trains its own model."""

import pathlib
import pickle

import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "local_devices_worker.py"
WARNED = {  # by construction: the strategy, and the advice
    "mirrored": ("MirroredStrategy", "MirroredStrategy(devices=jax.devices())"),
    "central by name": ("CentralStorageStrategy", "CentralStorageStrategy(compute_devices=jax.devices())"),
    "one device": ("OneDeviceStrategy", "MirroredStrategy(devices=jax.devices())"),
    "sharded": ("ShardedStrategy", 'ShardedStrategy(mesh=Mesh(np.array(jax.devices()), ("data",)))'),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes put their pickles."""
    return tmp_path_factory.mktemp("pickles")


@pytest.fixture(scope="module")
def printed(folder):
    """What each of two processes printed."""
    return run_processes(WORKER, 2, 2, folder)


def test_strategies_on_local_devices_of_joined_processes_warn_once_with_the_devices_of_all(printed):
    for number, text in enumerate(printed):
        expected = [
            f"{name}: UserWarning True `{strategy}` uses only the devices of process {number}, but there are 2 processes: each "
            f"process trains a separate model. For one model on the devices of all 2 processes, write `{advice}`. If one "
            "model per process is intended, pass device objects, such as `jax.local_devices()`."
            for name, (strategy, advice) in WARNED.items()
        ]
        assert [line for line in text.splitlines() if "UserWarning" in line] == expected


def test_pickled_strategy_has_the_same_devices_of_all_and_the_own_devices_of_the_process_that_reads_it(printed):
    for number, text in enumerate(printed):
        read = [line.split()[1:] for line in text.splitlines() if line.startswith("read:")]
        assert read == [["3", "2", "1", "0"], [str(2 * number + 1)]]


def test_pickled_strategy_of_several_processes_is_refused_in_a_process_that_has_not_joined(printed, folder):
    says = (
        r"A pickled MirroredStrategy is built on the devices of the same names, which this process does not have\. There is no "
        r"device cpu:1 of process 1: the number of joined processes is 1, and process 1 has 0 devices of platform 'cpu'\."
    )
    with pytest.raises(ValueError, match=says):
        pickle.loads((folder / "0").read_bytes())


def test_strategies_on_local_devices_of_a_single_process_warn_of_nothing(tmp_path):
    (text,) = run_processes(WORKER, 1, 2, tmp_path)
    assert "Warning" not in text
