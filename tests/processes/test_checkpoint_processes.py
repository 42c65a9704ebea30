"""Checkpoints that two real processes save and restore together, and that one saved for both."""

import pathlib

import numpy as np
import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "checkpoint_worker.py"


@pytest.mark.slow
def test_two_processes_save_and_restore_together_what_one_does_alone(tmp_path):
    run_processes(WORKER, 1, 4, tmp_path)
    run_processes(WORKER, 2, 2, tmp_path)
    one, first, second = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("1_0", "2_0", "2_1"))
    assert len(one) == 2 * 4 and len(first) == 2 * len(one)
    for name, leaf in first.items():
        assert second[name].tobytes() == leaf.tobytes(), name
        np.testing.assert_array_equal(leaf, one[name.removeprefix("from one on ")], err_msg=name)
    assert one["mirrored/total"] == sum(range(1, 5)) + 4 * 3
