"""A state in the host memory of two processes is trained as on one process."""

import numpy as np
import pytest


@pytest.mark.slow
def test_state_in_host_memory_of_two_processes_is_trained_as_on_one_process_and_under_mirrored_strategy(
    four_devices, pair
):
    (one,) = four_devices.run("processes.central_worker:final_states")
    first, second = pair.run("processes.central_worker:final_states")
    assert one.keys() == first.keys() == second.keys()
    central = [name for name in one if name.startswith("central")]
    assert len(central) == 10
    for name in central:
        assert first[name].tobytes() == second[name].tobytes(), name
        mirrored = "mirrored" + name.removeprefix("central")
        for expected in (one[name], one[mirrored], first[mirrored]):
            np.testing.assert_allclose(first[name], expected, rtol=2e-5, atol=2e-6, err_msg=name)
