"""Rows MW of `tests/parity/rows.txt`: the examples of each replica of two processes with two devices each.

All except for MW13 have one replica per process.
"""

import numpy as np
import pytest


@pytest.fixture(scope="module")
def results(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data_parity")
    for i in range(4):
        np.savetxt(folder / f"{i}.txt", 10 * i + np.arange(3), "%d")
    return pair.run("processes.data_parity_worker:examples_by_case", folder)


@pytest.fixture
def result(results):
    """Returns a function from the name of a case to the results of the two processes."""
    return lambda name: tuple(of_process[name] for of_process in results)


def _steps(*steps):
    """Returns the steps of a process with one replica."""
    return [[list(step)] for step in steps]


@pytest.mark.parametrize("how", ["examples", "batches"])
@pytest.mark.parametrize("policy", ["auto", "data"])
def test_mw1_batches_are_split_over_the_processes(policy, how, result):
    assert result(f"mw1_{policy}_{how}") == (
        _steps([0, 1, 2, 3], [8, 9, 10, 11]),  # TensorFlow splits the last six examples into three and three
        _steps([4, 5, 6, 7], [12, 13]),
    )


@pytest.mark.parametrize("how", ["examples", "batches"])
def test_mw2_with_off_each_process_reads_all_of_its_own_source(how, result):
    all_steps = _steps([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13])
    assert result(f"mw2_{how}") == (all_steps, all_steps)


@pytest.mark.parametrize("how", ["examples", "batches"])
def test_mw3_process_without_examples_in_the_last_batch_has_the_same_number_of_steps(how, result):
    assert result(f"mw3_{how}") == (_steps([0, 1], [4, 5], [8]), _steps([2, 3], [6, 7], []))


def test_mw4_batch_that_cannot_be_split_is_refused_or_padded(result):
    for name in ("mw4_refused", "mw4_batches_refused"):
        for message in result(name):
            assert "A batch of 5 examples cannot be split over 2 replicas (1 left over)" in message
    for how in ("examples", "batches"):
        assert result(f"mw4_{how}") == (_steps([0, 1, 2], [5, 6, 7]), _steps([3, 4], [8]))


@pytest.mark.parametrize("how", ["examples", "batches"])
def test_mw5_partial_batch_is_dropped_on_all_processes(how, result):
    assert result(f"mw5_{how}") == (_steps([0, 1], [4, 5]), _steps([2, 3], [6, 7]))


def test_mw6_file_without_files_is_refused_and_auto_is_data(result):
    for message in result("mw6_file"):
        assert 'ValueError: auto_shard="file" needs a source of files, got range' in message
    assert result("mw6_auto") == ([_steps([0, 1], [4, 5]), []], [_steps([2, 3], [6, 7]), []])


@pytest.mark.parametrize("policy", ["file", "auto"])
def test_mw7_each_process_reads_every_other_file(policy, result):
    assert result(f"mw7_mw8_{policy}") == (
        [_steps([0, 1], [2, 20], [21, 22]), []],
        [_steps([10, 11], [12, 30], [31, 32]), []],
    )


def test_mw8_with_data_each_process_reads_all_files_and_takes_its_examples(result):
    assert result("mw7_mw8_data") == (
        [_steps([0, 1], [11, 12], [22, 30]), []],
        [_steps([2, 10], [20, 21], [31, 32]), []],
    )


def test_mw9_process_with_fewer_files_pads_until_the_others_end(result):
    assert result("mw9") == (_steps([0, 1], [2, 20], [21, 22]), _steps([10, 11], [12], []))


def test_mw10_too_few_files_are_refused_on_all_processes_and_with_auto_each_process_reads_all_and_logs_it(result):
    for message in result("mw10_file"):
        assert (
            'ValueError: auto_shard="file": the number of files (1) is less than the number of processes (2)' in message
        )
    for (steps, (log_line,)), expected in zip(result("mw10_auto"), (_steps([0], [2]), _steps([1], [])), strict=True):
        assert steps == expected
        assert (
            "the number of files (1) is less than the number of processes (2), so each process reads all files (DATA)"
            in log_line
        )
    assert result("mw10_later") == (_steps([0, 1], [2, 20], [21, 22]), _steps([10, 11], [12, 30], [31, 32]))


def test_mw11_policies_shard_a_source_with_a_shard_method(result):
    expected = _steps([0], [2], [4], [6]), _steps([1], [3], [5], [])
    assert result("mw11_auto") == result("mw11_data") == result("mw11_hint") == expected
    assert result("mw11_off") == (_steps(*([i] for i in range(7))),) * 2
    for message in result("mw11_no_hint"):
        assert 'ValueError: auto_shard="hint" calls `shard(num_shards, index)` of the source, but ndarray' in message


def test_mw12_data_set_is_sharded_and_the_batches_of_a_function_belong_to_its_process(result):
    assert result("mw12_dataset") == (_steps([0], [2]), _steps([1], [3]))
    assert result("mw12_function") == (_steps([0], [1], [2], [3]),) * 2


def test_mw13_two_replicas_per_process_take_batches_alternately_and_examples_of_a_data_set_in_order(result):
    assert result("mw13_function") == ([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]],) * 2
    assert result("mw13_dataset") == ([[[0, 1], [2, 3]], [[8], []]], [[[4, 5], [6, 7]], [[], []]])
    for message in result("mw13_refused"):
        assert "A batch of 2 examples cannot be split over 4 replicas (2 left over)" in message


def test_mw15_function_shards_by_the_index_of_its_input_pipeline(result):
    assert result("mw15_contexts") == ([[2, 0, 2]], [[2, 1, 2]])
    assert result("mw15") == (_steps([0, 1, 2, 3], [8, 9, 10, 11]), _steps([4, 5, 6, 7], [12, 13]))
