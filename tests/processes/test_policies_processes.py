"""Sync policies on several processes give the results of one process, bit for bit under `sync.exact`."""

import numpy as np
import pytest

import jdist


def run(*runs):
    """Returns the results of each process; the keys are the numbers of processes and devices, and the process index."""
    results = {}
    for count, each, policies in runs:
        with jdist.testing.processes(count, devices_per_process=each, timeout=250) as joined:
            parameters = joined.run("processes.policies_worker:final_parameters", count * each, *policies)
        results |= {f"{count}_{count * each}_{number}": of_process for number, of_process in enumerate(parameters)}
    return results


@pytest.fixture(scope="module")
def results():
    exact, every = ["exact"], ["exact", "int8", "diloco", "streaming"]
    return run((1, 1, exact), (1, 2, every), (2, 1, every), (2, 2, exact))


def leaves(result, policy):
    return {name: leaf for name, leaf in result.items() if name.startswith(policy)}


@pytest.mark.slow
def test_exact_gives_the_same_bits_on_any_number_of_devices_and_processes(results):
    one = leaves(results["1_1_0"], "exact")
    assert len(one) == 6
    for process, result in results.items():
        for name, leaf in leaves(result, "exact").items():
            assert leaf.tobytes() == one[name].tobytes(), (process, name)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["int8", "diloco", "streaming"])
def test_policy_on_two_processes_equals_the_policy_on_two_devices(results, policy):
    one = leaves(results["1_2_0"], policy)
    for number in (0, 1):
        for name, leaf in leaves(results[f"2_2_{number}"], policy).items():
            np.testing.assert_allclose(leaf, one[name], rtol=2e-2, atol=2e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["exact", "int8", "diloco", "streaming"])
def test_all_processes_have_the_same_bits(results, policy):
    for processes in ("2_2", "2_4") if policy == "exact" else ("2_2",):
        first, second = (leaves(results[f"{processes}_{number}"], policy) for number in (0, 1))
        assert first.keys() == second.keys()
        assert all(leaf.tobytes() == second[name].tobytes() for name, leaf in first.items())
