"""The digits step over two real processes is the step of one process with as many devices."""

import pathlib

import numpy as np
import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "digits_worker.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    run_processes(WORKER, 1, 4, folder)
    run_processes(WORKER, 2, 2, folder)
    return {path.stem: dict(np.load(path)) for path in folder.glob("*.npz")}


@pytest.mark.slow
def test_two_processes_train_the_model_that_one_does(results):
    one, first, second = results["1_0"], results["2_0"], results["2_1"]
    states = [name for name in one if name.startswith("state")]
    assert len(states) == 26
    for name in states:
        assert first[name].tobytes() == second[name].tobytes(), name
        # Sums of another order, and an optimizer that divides by their square roots.
        np.testing.assert_allclose(first[name], one[name], rtol=1e-4, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(first["losses"], one["losses"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("process", ["1_0", "2_0", "2_1"])
def test_every_process_sees_all_rows_and_its_own_replicas(results, process):
    got = results[process]
    assert got["replicas"] == 4
    assert got["rows"] == 100 % 32  # the last batch of the epoch, its padding not counted
    assert got["sum"] == 0 + 1 + 2 + 3
    assert got["gathered"].tolist() == [0, 1, 2, 3]
    assert got["local_ids"].tolist() == {"1_0": [0, 1, 2, 3], "2_0": [0, 1], "2_1": [2, 3]}[process]
    np.testing.assert_array_equal(got["put"], np.arange(3.0))


def test_a_process_that_fails_ends_the_others_and_is_quoted(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys, time\nif sys.argv[3] == '1': sys.exit('no such luck')\ntime.sleep(60)\n")
    with pytest.raises(RuntimeError, match="no such luck"):
        run_processes(script, 2, 1)
