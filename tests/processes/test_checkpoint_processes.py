"""Checkpoints that two processes save and restore together, and one that a single process saved."""

import re

import numpy as np
import pytest

from laws import among


@pytest.mark.slow
def test_two_processes_save_and_restore_the_same_state_as_one(four_devices, pair, tmp_path):
    (one,) = four_devices.run("processes.checkpoint_worker:restored_states", tmp_path)
    first, second = pair.run("processes.checkpoint_worker:restored_states", tmp_path)
    assert len(one) == 2 * 4 and len(first) == 2 * len(one)
    for name, leaf in first.items():
        assert second[name].tobytes() == leaf.tobytes(), name
        np.testing.assert_array_equal(leaf, one[name.removeprefix("of one process ")], err_msg=name)
    assert one["mirrored/total"] == sum(range(1, 5)) + 4 * 3


@pytest.mark.slow
@pytest.mark.parametrize("failing", among([0, 1], 1))
def test_save_or_restore_that_fails_on_one_process_fails_on_both_and_the_next_succeeds(pair, tmp_path, failing):
    results = pair.run("processes.failures_worker:results_by_case", tmp_path, failing)
    for process, result in enumerate(results):
        prefix = "" if process == failing else f"Process {failing} failed: "
        assert result["before"] == "returned (1,)"
        assert re.search(
            rf"step 2 could not be written to .*checkpoints: {prefix}File too large\..*Complete checkpoints: step 1\..*tries again",
            result["in the background"],
        )
        assert re.search(rf"step 2 could not be written to .*: {prefix}File too large\.", result["before it begins"])
        assert result["after"] == "returned (1, 3)"
        assert result["training"] == results[0]["training"] == "returned ('CheckpointError', 4, 4, True)"
        assert re.search(rf"step 3 in .* is damaged or cannot be read: {prefix}.*OUT_OF_RANGE", result["damaged"])
        assert result["equal"]
        one_restore, six_restores = result["keys"]
        assert one_restore == six_restores  # no keys remain in the key-value store
    assert results[1 - failing]["late"] == "Another process did not reach the same point within 0.3 seconds."


DIFFERENT = {  # case -> the error of both processes
    "steps": r"differ in `step`: process 0 has {0}, process 1 has {1}\. Make the same call",
    "states": r"differ in `state`: process 0 has w float32\[8,{2}\], process 1 has w float32\[8,{3}\]\.",
    "positions": r'differ in `data_position`: process 0 has {{"batch": {4}}}, process 1 has {{"batch": {5}}}\.',
    "calls": r"differ in the call: process 0 has `{6}`, process 1 has `{7}`\.",
    "calls exchanged": r"differ in the call: process 0 has `{7}`, process 1 has `{6}`\.",
    "restored steps": r"differ in `step`: process 0 has {8}, process 1 has {9}\.",
    "resume": r"differ in the latest checkpoint: process 0 has {10}, process 1 has {11}\. .* a folder that all of them can read and write",
}
VALUES = [(2, 3), (4, 5), (7, 8), ("save", "restore"), (2, 1), ("step 3", "none")]
WRONG = {  # case -> the error of the process whose argument is wrong
    "leaf": "TypeError: state/w is str: devices hold numbers",
    "position": "TypeError: `data_position` is saved as JSON, which cannot represent <object",
    "extra": "TypeError: extra/f is builtin_function_or_method, a function: devices hold numbers",
    "step of a wrong kind": "TypeError: `step` must be an integer >= 0, got '1'",
    "earlier step": "ValueError: .* has a checkpoint of step 2, so a checkpoint of step 1 would not be the newest",
    "like": r"ValueError: .* does not match `like`\. .* w is float32\[8,4\] in the checkpoint and float32\[8,5\] in `like`",
    "no strategy": "TypeError: The first argument of `restore` must be the strategy .* got NoneType",
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", among([0, 1], 1))
def test_calls_that_fail_or_differ_on_one_process_fail_on_both_and_the_next_succeed(pair, tmp_path, wrong):
    values = [value for pair in VALUES for value in (pair if wrong == 1 else pair[::-1])]
    for process, result in enumerate(pair.run("processes.agreement_worker:results_by_case", tmp_path, wrong)):
        for case, error in WRONG.items():
            call = "restore" if case in ("like", "no strategy") else "save"
            prefix = "" if process == wrong else f"CheckpointError: `{call}` failed on process {wrong}: "
            assert re.match(prefix + error, result[case]), (case, result[case])
        for case, error in DIFFERENT.items():
            assert re.match(f"CheckpointError: The processes {error.format(*values)}", result[case]), (
                case,
                result[case],
            )
        for case in ("first", "second", "last", "one process"):
            assert result[case] == "returned True"
        assert result["restored"] == "returned 6.0"


@pytest.mark.slow
def test_processes_fall_back_to_the_same_checkpoint(pair, tmp_path):
    assert pair.run("processes.checkpoint_worker:restored_after_damage", tmp_path) == [(1, 1), (1, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "2.damaged", "3.damaged", "jdist.json"]


@pytest.mark.slow
def test_read_that_never_returns_on_one_process_is_a_timeout_on_both_and_the_next_succeeds(pair, tmp_path):
    first, second = pair.run("processes.checkpoint_worker:restored_from_a_store_that_stalls", tmp_path)
    manifest, arrays, step = second
    assert f"The read of {tmp_path}/1/2/manifest/manifest.json, of the checkpoint of step 2" in manifest
    assert f"The read of {tmp_path}/1/2/arrays, of the checkpoint of step 2" in arrays and step == 2
    assert first == [f"`restore` failed on process 1: {manifest}", f"Process 1 failed: {arrays}", 2]
