"""`auto_strategy` in several processes uses the devices of all of them."""

import pytest

import jdist

DESCRIBE = "processes.automatic_worker:strategy_and_total"


@pytest.mark.slow
@pytest.mark.parametrize("count, each", [(2, 1), (2, 2)])
def test_joined_processes_share_one_strategy(count, each):
    devices = count * each
    message = f"auto_strategy: MultiWorkerMirroredStrategy, because {count} processes have {devices} cpu devices.\n"
    with jdist.testing.processes(count, devices_per_process=each) as joined:
        for process, (log, *description) in enumerate(joined.run(DESCRIBE)):
            assert log == (message if process == 0 else "")
            assert description == ["MultiWorkerMirroredStrategy", devices, each, devices * (devices + 1) / 2]


def test_process_that_has_not_joined_uses_its_own_devices(one_process):
    ((log, *_),) = one_process.run(DESCRIBE)
    assert "auto_strategy: MirroredStrategy, because there are 2 cpu devices, and one process." in log


def test_resolver_of_another_cluster_than_the_joined_one_is_an_error(pair):
    results = pair.run("processes.automatic_worker:joined_as_another_process")
    for process, (message, resolver) in enumerate(results):
        assert "describes process 2 of 3, but this process has joined as process" in message
        assert f"process {process} of 2. Omit the resolver" in message
        assert resolver is None
