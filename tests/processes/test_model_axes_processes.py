"""Replicas that are groups of devices are the same on two processes as on one, also where a group has devices of both."""

import jax
import numpy as np
import pytest


@pytest.mark.slow
def test_groups_of_devices_train_the_same_on_two_processes(four_devices, pair):
    (expected,) = four_devices.run("processes.model_axes_worker:trained")
    results = pair.run("processes.model_axes_worker:trained")
    assert {name: value["ids"] for name, value in expected.items()} == {
        name: [0] if name.startswith("one") else [0, 1] for name in expected
    }
    for process, result in enumerate(results):
        assert result.keys() == expected.keys()
        for name, value in result.items():
            np.testing.assert_allclose(value["losses"], expected[name]["losses"], rtol=1e-4, err_msg=name)
            pairs = zip(*map(jax.tree.leaves, (value["params"], expected[name]["params"])), strict=True)
            for one, other in pairs:
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5, err_msg=name)
            is_within = name.startswith(("sizes", "within"))
            assert value["ids"] == ([process] if is_within else expected[name]["ids"])
            assert value["total"] == expected[name]["total"]


@pytest.mark.slow
def test_step_that_names_its_axis_runs_on_two_processes_under_every_strategy(pair):
    expected = 1 - 0.1 * np.arange(24, dtype=np.float32).reshape(8, 3).mean(0)
    for result in pair.run("processes.model_axes_worker:named_axis"):
        assert len(result) == 6
        for name, value in result.items():
            np.testing.assert_allclose(value, expected[: len(value)], rtol=1e-6, err_msg=name)
