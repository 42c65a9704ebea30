"""A state that is sharded over two processes is trained as on one process."""

import numpy as np
import pytest


@pytest.mark.slow
def test_state_sharded_over_two_processes_is_trained_as_on_one(four_devices, pair):
    (one,) = four_devices.run("processes.sharded_worker:final_states")
    first, second = pair.run("processes.sharded_worker:final_states")
    assert len(one) == 3 * 12
    assert one.keys() == first.keys() == second.keys()
    for name, leaf in one.items():
        assert first[name].tobytes() == second[name].tobytes(), name
        np.testing.assert_allclose(first[name], leaf, rtol=2e-5, atol=2e-6, err_msg=name)
        layout, _, part = name.partition("/")
        np.testing.assert_allclose(leaf, one[f"all/{part}"], rtol=2e-5, atol=2e-6, err_msg=layout)
    np.testing.assert_array_equal(first["all/moved"], first["all/params['in']"])
