"""Rows of `tests/parity/rows.txt` about several workers: two real processes of two devices each."""

import pathlib

import numpy as np
import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "parity_worker.py"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    run_processes(WORKER, 2, 2, folder)
    return {number: dict(np.load(folder / f"{number}.npz")) for number in (0, 1)}


@pytest.fixture(params=[0, 1], ids=["process_0", "process_1"])
def got(request, answers):
    """What each of the two processes was answered."""
    return answers[request.param]


def test_rd34_value_on_the_devices_counts_once_a_process(got):
    assert got["sum_of_placed"].tolist() == [2.0]
    assert got["sum_of_list"].tolist() == [[2.0], [2.0]]
    assert "value is 1.0, a host value, held by none of the 2 replicas" in str(got["sum_of_host"])


def test_rd35_ga5_rows_of_different_lengths_on_two_processes_are_reduced_and_joined_over_elements(got):
    assert got["uneven"] == "PerReplica(float32[3] | float32[1])"
    assert got["mean_of_uneven"].tolist() == [2.5]
    assert got["sum_of_uneven"].tolist() == [10.0]
    assert got["gathered"].tolist() == [[1.0, 2.0, 3.0, 4.0]]
    assert "value has the shapes [3], [1] on the replicas" in str(got["uneven_by_element"])


def test_rd35_ga5_rows_of_four_lengths_on_two_processes_are_reduced_and_joined_over_elements(got):
    joined = [0.0, 0.0, 1.0, 0.0, 1.0, 2.0]
    assert got["gathered_of_four"].tolist() == [joined, joined]
    np.testing.assert_allclose(got["mean_of_four"], np.full(2, np.mean(joined)), rtol=1e-6)


def test_ga19_ga20_mismatch_between_processes_is_refused_on_both_and_leaves_later_sums_alone(got):
    assert "value has the shapes [1, 1], [1, 2] on the replicas" in str(got["mismatch"])
    assert got["after_mismatch"].tolist() == got["new_after_mismatch"].tolist() == [3]
    assert got["wide_gathered"].tolist() == [[[1.0, 1.0, 1.0]]]


def test_va38_initial_value_of_each_process_is_refused_and_broadcast_is_that_of_the_first(got):
    assert str(got["init_own"]).startswith("NotMirroredError: ")
    assert got["init_broadcast"].tolist() == got["init_broadcast_value"].tolist() == [5.0]


def test_va38_host_values_that_differ_between_processes_are_refused_on_all(got):
    differs = "differs between the processes, and must be the same on every replica. Compute it from the same seed"
    assert f"value['b'] (float64[2]) {differs}" in str(got["put_own"])
    assert differs in str(got["init_with_own"])
    assert got["after_refusals"].tolist() == [[0, 1]]
    assert got["put_key"].tolist() == [[0, 3]]


@pytest.mark.parametrize(
    "what", ["put_of_another_kind", *(f"values_of_another_{x}" for x in ("dtype", "rank", "structure"))]
)
def test_values_of_other_kinds_on_each_process_are_refused_on_all(got, what):
    assert "The processes pass values of different structures, dtypes or shapes; this process has" in str(got[what])


def test_problem_that_one_process_sees_is_raised_on_all(got):
    assert "The processes pass values of different structures, dtypes or shapes; this process has" in str(
        got["values_wrong_on_one"]
    )


def test_global_batch_is_split_over_the_devices_of_both_processes(answers):
    parts = np.concatenate([answers[number]["split_here"] for number in (0, 1)])
    assert parts[..., 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(answer["split_sum"].tolist() == [28.0, 28.0] for answer in answers.values())


def test_batch_that_differs_between_processes_or_does_not_divide_is_refused_on_both(got):
    assert "The processes pass values of different structures, dtypes or shapes; this process has batch float64" in str(
        got["split_other_size"]
    )
    assert "batch (float32[8]) differs between the processes" in str(got["split_other_values"])
    assert "its 6 examples do not split over 4 replicas (2 left over)" in str(got["split_rest"])


def test_va40_write_of_the_first_replica_arrives_on_both_processes(got):
    assert got["first_replica_firsts"].tolist() == [1.0]
    assert got["first_replica_every"].tolist() == [1.0, 1.0]


def test_cd1_sums_in_groups_of_a_process_are_those_of_one_all_reduce(got):
    assert got["groups"].tolist() == [["group", "2"], ["replica", "2"]]
    for leaf, expected in {
        "odd": np.arange(10, 60, 10)[:, None],
        "none": np.zeros((0, 2)),
        "one": np.array(10),
    }.items():
        np.testing.assert_array_equal(got[f"hierarchical_{leaf}"], np.stack([expected] * 2))
        np.testing.assert_array_equal(got[f"all_reduce_{leaf}"], got[f"hierarchical_{leaf}"])
