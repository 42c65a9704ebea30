"""The slots of the attempts of a job. No process runs."""

import pytest

from jdist._src.launch.end_rules import AttemptResult, EndRules, EndTimes, Failure
from jdist._src.launch.job import CapacityError, Job, JobSettings
from jdist._src.launch.output import Console
from jdist._src.launch.signals import received_signals


def run_job(run, minimum=1, maximum=3, *, max_restarts=9, rejoin_seconds=1000.0, join_seconds=0.0, capacity=lambda: 3):
    """Returns the exit status of a job whose attempts are calls of `run`."""
    settings = JobSettings(maximum, minimum, max_restarts, rejoin_seconds, join_seconds, EndTimes(1.0))
    with received_signals() as signals:
        return Job(settings, run, signals, Console(), capacity, "the cluster").run()


def failed(process, status=5):
    return AttemptResult((status, -15), Failure(process, status, "text"), None)


SUCCEEDED = AttemptResult((0,), None, None)


@pytest.mark.parametrize(
    "minimum, failing, slots",
    [
        (1, [1], [[0, 1, 2], [0, 2]]),
        (1, [1, 1, 0, 0], [[0, 1, 2], [0, 2], [0], [1], [2]]),  # too few are free: the slot that has rested longest
        (2, [2, 1, 0], [[0, 1, 2], [0, 1], [0, 2], [1, 2]]),
        (3, [1, 1], [[0, 1, 2]] * 3),
    ],
)
def test_slot_of_a_failed_process_rests_unless_too_few_are_left(minimum, failing, slots):
    results, used = [*map(failed, failing), SUCCEEDED], []

    def run(plan, check):
        assert (plan.restarts, plan.num_processes, plan.first_process) == (len(used), len(plan.slots), 0)
        used.append(plan.slots)
        return results[plan.restarts]

    assert (run_job(run, minimum), used) == (0, slots)


@pytest.mark.parametrize("max_restarts, failures", [(0, [7]), (1, [3, 7])])
def test_last_failure_is_the_exit_status_and_is_reported(max_restarts, failures, capsys):
    run = lambda plan, check: failed(0, failures[plan.restarts])
    assert run_job(run, 2, 2, max_restarts=max_restarts) == 7
    errors = capsys.readouterr().err
    assert errors.endswith("jdist run: process 0 of 2 failed first: exit status 7. The end of its output:\ntext\n")
    assert errors.count("restart 1 of 1, ") == max_restarts


def test_job_continues_with_the_processes_that_can_run_and_with_more_when_a_node_is_added(capsys):
    capacities, used = [3, 1, 3, 3], []  # at the start, after the failure, at the check, and after it

    def run(plan, check):
        used.append(plan.slots)
        if plan.restarts == 0:
            return failed(2)
        rules = EndRules([], EndTimes(1.0), Console(), [])
        check(rules)
        assert rules.is_ending() == (plan.restarts == 1)
        return AttemptResult((42,), None, None) if plan.restarts == 1 else SUCCEEDED

    assert (
        run_job(run, rejoin_seconds=0.0, max_restarts=1, capacity=lambda: capacities.pop(0) if capacities else 3) == 0
    )
    assert used == [[0, 1, 2], [0], [0, 1, 2]]
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("process 2 failed: exit status 5. The job continues with 1 instead of 3 processes.")
    assert "2 more processes can run on the cluster. The job continues with 3 instead of 1 processes." in second


def test_job_waits_for_nodes_and_ends_without_them(capsys):
    capacities = [2]
    run = lambda plan, check: failed(1, 7)
    assert run_job(run, 2, 2, capacity=lambda: capacities.pop() if capacities else 1) == 7
    least = "at least 2 processes must run, and 1 can run now."
    assert (
        f"jdist run: the job ends: {least} No node was added to the cluster within 0 seconds."
        in capsys.readouterr().err
    )


def test_attempt_that_finds_too_few_nodes_is_tried_again_and_does_not_count():
    def run(plan, check):
        used.append(plan.restarts)
        if len(used) == 1:
            raise CapacityError
        return SUCCEEDED

    used = []
    assert (run_job(run, max_restarts=0), used) == (0, [0, 0])
