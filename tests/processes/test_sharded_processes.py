"""A state that is sharded over two processes is trained as on one process."""

import pathlib

import numpy as np
import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "sharded_worker.py"


@pytest.mark.slow
def test_state_sharded_over_two_processes_is_trained_as_on_one(tmp_path):
    run_processes(WORKER, 1, 4, tmp_path)
    run_processes(WORKER, 2, 2, tmp_path)
    one, first, second = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("1_0", "2_0", "2_1"))
    assert len(one) == 3 * 12
    assert one.keys() == first.keys() == second.keys()
    for name, leaf in one.items():
        assert first[name].tobytes() == second[name].tobytes(), name
        np.testing.assert_allclose(first[name], leaf, rtol=2e-5, atol=2e-6, err_msg=name)
        layout, _, part = name.partition("/")
        np.testing.assert_allclose(leaf, one[f"all/{part}"], rtol=2e-5, atol=2e-6, err_msg=layout)
    np.testing.assert_array_equal(first["all/moved"], first["all/params['in']"])
