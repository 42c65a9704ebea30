"""Rows of `tests/parity/rows.txt` about several workers: two processes with two devices each."""

import numpy as np
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(pair):
    return pair.run("processes.parity_worker:results_by_case")


@pytest.fixture(params=[0, 1], ids=["process_0", "process_1"])
def result(request, results):
    """Returns the results of one of the two processes."""
    return results[request.param]


def test_rd34_value_on_the_devices_counts_once_per_process(result):
    assert result["sum_of_placed"].tolist() == [2.0]
    assert result["sum_of_list"].tolist() == [[2.0], [2.0]]
    assert "value is 1.0, a host value, held by none of the 2 replicas" in str(result["sum_of_host"])


def test_rd35_ga5_values_of_different_lengths_on_two_processes_are_reduced_and_concatenated(result):
    assert result["uneven"] == "PerReplica(float32[3] | float32[1])"
    assert result["mean_of_uneven"].tolist() == [2.5]
    assert result["sum_of_uneven"].tolist() == [10.0]
    assert result["gathered"].tolist() == [[1.0, 2.0, 3.0, 4.0]]
    assert "value has the shapes [3], [1] on the replicas" in str(result["uneven_by_element"])


def test_rd35_ga5_values_of_four_lengths_on_two_processes_are_reduced_and_concatenated(result):
    expected = [0.0, 0.0, 1.0, 0.0, 1.0, 2.0]
    assert result["gathered_of_four"].tolist() == [expected, expected]
    np.testing.assert_allclose(result["mean_of_four"], np.full(2, np.mean(expected)), rtol=1e-6)


def test_ga19_ga20_mismatch_between_processes_is_refused_on_both_and_later_reductions_are_correct(result):
    assert "value has the shapes [1, 1], [1, 2] on the replicas" in str(result["mismatch"])
    assert result["after_mismatch"].tolist() == result["new_after_mismatch"].tolist() == [3]
    assert result["wide_gathered"].tolist() == [[[1.0, 1.0, 1.0]]]


def test_va38_initial_value_per_process_is_refused_and_broadcast_takes_the_first(result):
    assert str(result["init_own"]).startswith("NotMirroredError: ")
    assert result["init_broadcast"].tolist() == result["init_broadcast_value"].tolist() == [5.0]


def test_va38_host_values_that_differ_between_processes_are_refused_on_all_processes(result):
    differs = "differs between the processes, and must be the same on every replica. Compute it from the"
    assert f"value['b'] (float64[2]) {differs}" in str(result["put_own"])
    assert differs in str(result["init_with_own"])
    assert result["after_refusals"].tolist() == [[0, 1]]
    assert result["put_key"].tolist() == [[0, 3]]


@pytest.mark.parametrize(
    "case", ["put_of_another_kind", *(f"values_of_another_{x}" for x in ("dtype", "rank", "structure"))]
)
def test_values_of_another_structure_or_dtype_on_each_process_are_refused_on_all(result, case):
    assert "The processes pass values of different structures, dtypes or shapes; this process has" in str(result[case])


def test_invalid_value_on_one_process_is_an_error_on_all(result):
    assert "The value of replica 3 has float32[] for value, and not the int32[] of replica 2." in str(
        result["values_wrong_on_one"]
    )


def test_global_batch_is_split_over_the_devices_of_both_processes(results):
    parts = np.concatenate([results[number]["split_here"] for number in (0, 1)])
    assert parts[..., 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(of_process["split_sum"].tolist() == [28.0, 28.0] for of_process in results)


def test_batch_that_differs_between_processes_or_does_not_divide_is_refused_on_both(result):
    assert "The processes pass values of different structures, dtypes or shapes; this process has batch float64" in str(
        result["split_other_size"]
    )
    assert "batch (float32[8]) differs between the processes" in str(result["split_other_values"])
    assert "its 6 examples cannot be split over 4 replicas (2 left over)" in str(result["split_rest"])


def test_va40_write_of_the_first_replica_is_broadcast_to_both_processes(result):
    assert result["first_replica_firsts"].tolist() == [1.0]
    assert result["first_replica_every"].tolist() == [1.0, 1.0]


def test_cd1_hierarchical_all_reduce_with_one_group_per_process_equals_one_all_reduce(result):
    assert result["groups"] == {"group": 2, "replica": 2}
    for leaf, expected in {
        "odd": np.arange(10, 60, 10)[:, None],
        "none": np.zeros((0, 2)),
        "one": np.array(10),
    }.items():
        np.testing.assert_array_equal(result[f"hierarchical_{leaf}"], np.stack([expected] * 2))
        np.testing.assert_array_equal(result[f"all_reduce_{leaf}"], result[f"hierarchical_{leaf}"])
