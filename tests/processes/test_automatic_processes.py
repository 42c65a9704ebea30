"""`auto_strategy` in several processes uses the devices of all of them."""

import pathlib

import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "automatic_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("count, each", [(2, 1), (2, 2)])
def test_joined_processes_share_one_strategy(count, each):
    outputs = run_processes(WORKER, count, each)
    devices = count * each
    message = f"jdist: auto_strategy: MirroredStrategy, because {count} processes have {devices} cpu devices."
    for output in outputs:
        assert message in output
        assert f"MirroredStrategy {devices} {each} {devices * (devices + 1) / 2}" in output


def test_process_that_has_not_joined_uses_its_own_devices():
    (output,) = run_processes(WORKER, 1, 2)
    assert "jdist: auto_strategy: MirroredStrategy, because there are 2 cpu devices, and one process." in output
