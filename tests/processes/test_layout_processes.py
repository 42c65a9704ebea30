"""Batches that are split along other dimensions than the first are the same on two processes as on one."""

import numpy as np
import pytest


@pytest.mark.slow
def test_batches_with_a_layout_are_the_same_on_two_processes(four_devices, pair):
    (one,) = four_devices.run("processes.layout_worker:batches")
    results = pair.run("processes.layout_worker:batches")
    assert len(one) == (4 * 4 + 2) * (3 * 2 + 1)
    for result in results:
        assert result.keys() == one.keys()
        for name, leaf in one.items():
            np.testing.assert_allclose(result[name], leaf, rtol=1e-6, err_msg=name)
    for message in pair.run("processes.layout_worker:refusal"):
        assert "a process needs examples of others" in message and 'auto_shard="data"' in message
