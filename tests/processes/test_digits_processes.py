"""A training step on two processes equals the step on one process with the same number of devices."""

import numpy as np
import pytest


@pytest.fixture(scope="module")
def results(four_devices, pair):
    """Returns the results of each process; the keys are the number of processes and the process index."""
    function = "processes.digits_worker:results_of_training"
    return dict(zip(("1_0", "2_0", "2_1"), four_devices.run(function) + pair.run(function), strict=True))


@pytest.mark.slow
def test_two_processes_train_the_same_model_as_one(results):
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
def test_results_are_global_and_local_results_are_of_the_replicas_of_the_process(results, process):
    result = results[process]
    assert result["replicas"] == 4
    assert result["examples"] == 100 % 32  # the last batch of the epoch, its padding not counted
    assert result["sum"] == 0 + 1 + 2 + 3
    assert result["gathered"].tolist() == [0, 1, 2, 3]
    assert result["local_ids"] == {"1_0": [0, 1, 2, 3], "2_0": [0, 1], "2_1": [2, 3]}[process]
    np.testing.assert_array_equal(result["put"], np.arange(3.0))
