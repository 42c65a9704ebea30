"""Rows MW of `tests/parity/rows.txt`: what each replica of two real processes of two devices gets to read.

All but MW13 are asked of one replica a process.
"""

import json
import pathlib

import numpy as np
import pytest

from processes.runner import run_processes

WORKER = pathlib.Path(__file__).parent / "data_parity_worker.py"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data_parity")
    for i in range(4):
        np.savetxt(folder / f"{i}.txt", 10 * i + np.arange(3), "%d")
    run_processes(WORKER, 2, 2, folder)
    return [json.loads((folder / f"{number}.json").read_text()) for number in (0, 1)]


@pytest.fixture
def got(answers):
    """From the name of a question to the answers of the two processes."""
    return lambda name: tuple(answer[name] for answer in answers)


def _steps(*steps):
    """Steps of a process with one replica."""
    return [[list(step)] for step in steps]


@pytest.mark.parametrize("how", ["examples", "batches"])
@pytest.mark.parametrize("policy", ["auto", "data"])
def test_mw1_batches_are_split_over_the_processes(policy, how, got):
    assert got(f"mw1_{policy}_{how}") == (
        _steps([0, 1, 2, 3], [8, 9, 10, 11]),  # TensorFlow splits the last six anew, into three and three
        _steps([4, 5, 6, 7], [12, 13]),
    )


@pytest.mark.parametrize("how", ["examples", "batches"])
def test_mw2_off_gives_each_process_all_of_what_it_hands_in(how, got):
    all_of_it = _steps([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13])
    assert got(f"mw2_{how}") == (all_of_it, all_of_it)


@pytest.mark.parametrize("how", ["examples", "batches"])
def test_mw3_process_without_rows_of_the_last_batch_has_as_many_steps(how, got):
    assert got(f"mw3_{how}") == (_steps([0, 1], [4, 5], [8]), _steps([2, 3], [6, 7], []))


def test_mw4_batch_that_cannot_be_split_is_refused_or_filled_up(got):
    for name in ("mw4_refused", "mw4_batches_refused"):
        for said in got(name):
            assert "A batch of 5 examples cannot be split over 2 replicas (1 left over)" in said
    assert got("mw4_filled") == (_steps([0, 1, 2], [5, 6, 7]), _steps([3, 4], [8]))


@pytest.mark.parametrize("how", ["examples", "batches"])
def test_mw5_partial_batch_is_dropped_on_all(how, got):
    assert got(f"mw5_{how}") == (_steps([0, 1], [4, 5]), _steps([2, 3], [6, 7]))


def test_mw6_file_without_files_is_refused_and_auto_is_data(got):
    for said in got("mw6_file"):
        assert 'ValueError: auto_shard="file" needs files to share out, and the source is range' in said
    assert got("mw6_auto") == ([_steps([0, 1], [4, 5]), []], [_steps([2, 3], [6, 7]), []])


@pytest.mark.parametrize("policy", ["file", "auto"])
def test_mw7_each_process_reads_every_other_file(policy, got):
    assert got(f"mw7_mw8_{policy}") == (
        [_steps([0, 1], [2, 20], [21, 22]), []],
        [_steps([10, 11], [12, 30], [31, 32]), []],
    )


def test_mw8_data_reads_all_files_on_each_process_and_takes_its_rows(got):
    assert got("mw7_mw8_data") == (
        [_steps([0, 1], [11, 12], [22, 30]), []],
        [_steps([2, 10], [20, 21], [31, 32]), []],
    )


def test_mw9_process_with_fewer_files_fills_up_to_the_end_of_the_others(got):
    assert got("mw9") == (_steps([0, 1], [2, 20], [21, 22]), _steps([10, 11], [12], []))


def test_mw10_too_few_files_are_refused_on_all_and_auto_reads_them_on_each_and_says_so(got):
    for said in got("mw10_file"):
        assert 'ValueError: auto_shard="file": too few files (1) for 2 processes to read their own' in said
    for (steps, (message,)), expected in zip(got("mw10_auto"), (_steps([0], [2]), _steps([1], [])), strict=True):
        assert steps == expected
        assert "too few files (1) for 2 processes to read their own, so each reads them all (DATA)" in message
    assert got("mw10_later") == (_steps([0, 1], [2, 20], [21, 22]), _steps([10, 11], [12, 30], [31, 32]))


def test_mw11_policies_share_out_a_source_that_can_be_sharded(got):
    taken = _steps([0], [2], [4], [6]), _steps([1], [3], [5], [])
    assert got("mw11_auto") == got("mw11_data") == got("mw11_hint") == taken
    assert got("mw11_off") == (_steps(*([i] for i in range(7))),) * 2
    for said in got("mw11_no_hint"):
        assert 'ValueError: auto_shard="hint" asks the source for its `shard(num_shards, index)`, and ndarray' in said


def test_mw12_data_set_is_shared_out_and_what_a_function_makes_is_each_processs_own(got):
    assert got("mw12_dataset") == (_steps([0], [2]), _steps([1], [3]))
    assert got("mw12_function") == (_steps([0], [1], [2], [3]),) * 2


def test_mw13_two_replicas_a_process_take_its_batches_in_turn_and_a_data_sets_rows_in_order(got):
    assert got("mw13_function") == ([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]],) * 2
    assert got("mw13_dataset") == ([[[0, 1], [2, 3]], [[8], []]], [[[4, 5], [6, 7]], [[], []]])
    for said in got("mw13_refused"):
        assert "A batch of 2 examples cannot be split over 4 replicas (2 left over)" in said


def test_mw15_function_shards_by_the_number_of_its_pipeline(got):
    assert got("mw15_contexts") == ([[2, 0, 2]], [[2, 1, 2]])
    assert got("mw15") == (_steps([0, 1, 2, 3], [8, 9, 10, 11]), _steps([4, 5, 6, 7], [12, 13]))
