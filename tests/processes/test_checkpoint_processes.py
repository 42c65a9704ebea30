"""Checkpoints that two real processes save and restore together, and that one saved for both."""

import ast
import pathlib
import re

import numpy as np
import pytest

from laws import among
from processes.runner import run_processes

AGREEMENT = pathlib.Path(__file__).parent / "agreement_worker.py"
FAILURES = pathlib.Path(__file__).parent / "failures_worker.py"
WORKER = pathlib.Path(__file__).parent / "checkpoint_worker.py"


@pytest.mark.slow
def test_two_processes_save_and_restore_together_what_one_does_alone(tmp_path):
    run_processes(WORKER, 1, 4, tmp_path)
    run_processes(WORKER, 2, 2, tmp_path)
    one, first, second = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("1_0", "2_0", "2_1"))
    assert len(one) == 2 * 4 and len(first) == 2 * len(one)
    for name, leaf in first.items():
        assert second[name].tobytes() == leaf.tobytes(), name
        np.testing.assert_array_equal(leaf, one[name.removeprefix("from one on ")], err_msg=name)
    assert one["mirrored/total"] == sum(range(1, 5)) + 4 * 3


@pytest.mark.parametrize("who", among([0, 1], 1))
def test_what_fails_on_one_process_fails_on_all_at_once_and_the_next_goes_well(tmp_path, who):
    heard = [heard_by(printed) for printed in run_processes(FAILURES, 2, 2, tmp_path, who, seconds=60)]
    other = 1 - who
    for process, there in enumerate(heard):
        where = "" if process == who else f"It failed on process {who}: "
        assert there["before"] == "went well (1,)"
        assert re.search(
            rf"step 2 could not be written to .*checkpoints: {where}File too large\..*those of the steps 1\..*will be tried",
            there["in the background"],
        )
        assert re.search(rf"step 2 could not be written to .*: {where}File too large\.", there["before it begins"])
        assert there["after"] == "went well (1, 3)"
        assert there["training"] == heard[0]["training"] == "went well ('CheckpointError', 4, 4, True)"
        assert re.search(rf"step 3 in .* is damaged, or cannot be read: {where}.*OUT_OF_RANGE", there["damaged"])
        assert there["whole"] == "True"
        one_loop, six_loops = ast.literal_eval(there["keys"])
        assert one_loop == six_loops  # nothing is left in the store
    assert heard[other]["late"] == "Another process was waited for, and did not come within 0.3 seconds."


DIFFERENT = {  # by the call: what both processes hear
    "steps": r"differ in `step`: process 0 has {0}, process 1 has {1}\. Make the same call",
    "states": r"differ in `state`: process 0 has w float32\[8,{2}\], process 1 has w float32\[8,{3}\]\.",
    "positions": r'differ in `data_position`: process 0 has {{"batch": {4}}}, process 1 has {{"batch": {5}}}\.',
    "calls": r"differ in the call: process 0 has `{6}`, process 1 has `{7}`\.",
    "calls the other way round": r"differ in the call: process 0 has `{7}`, process 1 has `{6}`\.",
    "restored steps": r"differ in `step`: process 0 has {8}, process 1 has {9}\.",
    "resume": r"differ in the latest checkpoint: process 0 has {10}, process 1 has {11}\. .* a folder that all of them see",
}
VALUES = [(2, 3), (4, 5), (7, 8), ("save", "restore"), (2, 1), ("step 3", "none")]
WRONG = {  # by the call: the error of the process whose argument is wrong
    "leaf": "TypeError: state/w is str: devices hold numbers",
    "position": "TypeError: `data_position` is kept as JSON, and <object",
    "extra": "TypeError: extra/f is builtin_function_or_method: devices hold numbers",
    "step of a wrong kind": "TypeError: `step` must be an integer >= 0, got '1'",
    "behind": "ValueError: .* has a checkpoint of step 2, and one of step 1 would not be found",
    "like": r"ValueError: .* another state than `like`\. .* w was float32\[8,4\] and is to be float32\[8,5\]",
    "no strategy": "TypeError: `restore` takes a strategy first, .* got NoneType",
}


@pytest.mark.parametrize("who", among([0, 1], 1))
def test_calls_that_fail_or_differ_on_one_process_fail_on_both_and_the_next_go_well(tmp_path, who):
    printed = run_processes(AGREEMENT, 2, 2, tmp_path, who, seconds=60)
    heard = [dict(re.findall(r"^([a-z ]+): (.*)$", text, re.M)) for text in printed]
    values = [value for pair in VALUES for value in (pair if who == 1 else pair[::-1])]
    for process, there in enumerate(heard):
        for what, error in WRONG.items():
            call = "restore" if what in ("like", "no strategy") else "save"
            where = "" if process == who else f"CheckpointError: `{call}` failed on process {who}: "
            assert re.match(where + error, there[what]), (what, there[what])
        for what, error in DIFFERENT.items():
            assert re.match(f"CheckpointError: The processes {error.format(*values)}", there[what]), (what, there[what])
        for what in ("first", "second", "last", "alone"):
            assert there[what] == "went well True"
        assert there["restored"] == "went well 6.0"


def heard_by(printed):
    """What a process printed, by what it was about."""
    return dict(
        re.findall(
            r"^(before|in the background|before it begins|after|training|damaged|whole|keys|late): (.*)$", printed, re.M
        )
    )
