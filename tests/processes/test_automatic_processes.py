"""`auto_strategy` in real processes: the devices of all of them."""

import pathlib

import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "automatic_worker.py"


@pytest.mark.parametrize("count, each", [(2, 1), (2, 2)])
def test_processes_that_have_joined_share_one_strategy(count, each):
    printed = run_processes(WORKER, count, each)
    devices = count * each
    said = f"jdist: auto_strategy: MirroredStrategy, because {count} processes have {devices} cpu devices."
    for lines in printed:
        assert said in lines
        assert f"MirroredStrategy {devices} {each} {devices * (devices + 1) / 2}" in lines


def test_processes_that_have_not_joined_know_nothing_of_each_other():
    (printed,) = run_processes(WORKER, 1, 2)
    assert "jdist: auto_strategy: MirroredStrategy, because there are 2 cpu devices, and one process." in printed
