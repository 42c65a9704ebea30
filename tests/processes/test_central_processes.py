"""A state in the host memory of two processes is trained as on one process."""

import pathlib

import numpy as np
import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "central_worker.py"


@pytest.mark.slow
def test_state_in_host_memory_of_two_processes_is_trained_as_on_one_process_and_under_mirrored_strategy(tmp_path):
    run_processes(WORKER, 1, 4, tmp_path)
    run_processes(WORKER, 2, 2, tmp_path)
    one, first, second = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("1_0", "2_0", "2_1"))
    assert one.keys() == first.keys() == second.keys()
    central = [name for name in one if name.startswith("central")]
    assert len(central) == 10
    for name in central:
        assert first[name].tobytes() == second[name].tobytes(), name
        mirrored = "mirrored" + name.removeprefix("central")
        for expected in (one[name], one[mirrored], first[mirrored]):
            np.testing.assert_allclose(first[name], expected, rtol=2e-5, atol=2e-6, err_msg=name)
