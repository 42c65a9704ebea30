"""Waits that can never end are errors on all processes, which name the calls."""

import pytest

import jdist

pytestmark = pytest.mark.slow


def test_processes_that_wait_in_different_calls_all_get_an_error_with_the_call_of_each(tmp_path):
    with jdist.testing.processes(3) as three:
        texts = three.run("processes.waits_worker:error_of_different_calls", tmp_path)
    assert texts == [texts[0]] * 3
    heading, *lines, advice = texts[0].splitlines()
    assert heading == "The processes wait for each other in different calls, so none of them can continue:"
    assert lines[0].startswith(
        "  Process 0 waits in `Checkpointer.save`, which all processes have to call (`checkpointer.save(1,"
    )
    for number in (1, 2):
        assert lines[number].startswith(
            f"  Process {number} waits in the comparison of `<lambda>`, which all processes have to call (`strategy.run("
        )
    assert all("waits_worker.py:" in line for line in lines)
    assert advice.startswith("Every process must call the same functions in the same order")
