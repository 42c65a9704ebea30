"""Profiles of several processes: one summary of all, stragglers, and processes that do not take part."""

import threading
import time

import pytest

import jdist


def test_the_process_that_others_wait_for_is_named(pair, tmp_path):
    results = pair.run("processes.profile_worker:straggler", tmp_path, 1)
    assert all(result == results[0] for result in results)
    summary, is_read, text, folders = results[0]
    assert summary["stragglers"] == (1,) and is_read and "stragglers      process 1" in text
    assert folders == ["process_0", "process_1"]
    assert [process["process"] for process in summary["processes"]] == [0, 1]
    assert [device["process"] for device in summary["devices"]] == [0, 0, 1, 1]
    waits, works = summary["processes"]
    assert works["working"] > 0.3 > waits["working"]  # it sleeps five times 0.1 s
    assert all(device["exposed_collectives"] > 0.3 for device in summary["devices"][:2])
    assert summary["missing"] == ()
    # Five steps on four devices; the lines may differ between processes that read an old program from the cache.
    assert sum(operation["count"] for operation in summary["operations"] if operation["is_collective"]) == 20


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 2, 9])
def test_of_three_processes_the_slow_one_is_named(slow, tmp_path):
    with jdist.testing.processes(3, devices_per_process=2) as three:
        results = three.run("processes.profile_worker:straggler", tmp_path, slow)
    assert all(result[0] == results[0][0] for result in results)
    if slow < 3:
        assert results[0][0]["stragglers"] == (slow,)


def test_examples_of_all_processes_are_counted(pair, tmp_path):
    for counts, imbalance in pair.run("processes.profile_worker:examples", tmp_path):
        assert sum(counts) == 10 and len(counts) == 4
        assert imbalance == pytest.approx(max(counts) * 4 / 10)


def test_a_process_whose_block_fails_is_missing_and_the_next_profile_is_complete(pair, tmp_path):
    results = pair.run("processes.profile_worker:error_in_block", tmp_path)
    assert results == [[[1, 1], []], ["The disk is full.", []]]


def test_a_process_that_does_not_open_the_profile_is_missing(tmp_path):
    with jdist.testing.processes(2) as two:
        (messages, files, missing), _ = two.run("processes.profile_worker:only_process_0", tmp_path)
    assert missing == (1,)
    (message,) = messages
    assert "has only the part of this process: within 2 s there was no part of process 1. Open it on all" in message
    assert files[0].endswith("profile_worker.py")


@pytest.mark.slow
def test_a_process_that_is_killed_in_the_block_does_not_block_the_others(tmp_path):
    def kill():
        while not (tmp_path / "in_block").exists():
            time.sleep(0.05)
        two.kill(1)

    with jdist.testing.processes(2, timeout=100) as two:
        thread = threading.Thread(target=kill)
        thread.start()
        assert two.run("processes.profile_worker:process_that_is_killed", tmp_path) == [[1], None]
        thread.join()
