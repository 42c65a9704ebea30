"""Checkpoints that two real processes save and restore together, and that one saved for both."""

import ast
import pathlib
import re

import numpy as np
import pytest

from laws import among
from processes.runner import run_processes

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


def heard_by(printed):
    """What a process printed, by what it was about."""
    return dict(
        re.findall(
            r"^(before|in the background|before it begins|after|training|damaged|whole|keys|late): (.*)$", printed, re.M
        )
    )
