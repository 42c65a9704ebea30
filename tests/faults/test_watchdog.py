"""A job of two processes that hangs ends with exit status 43, and every process reports what it does. Real processes."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from jdist._src.core.exit_statuses import HUNG
from jdist._src.launch.child_processes import reserved_address

pytestmark = pytest.mark.processes

HERE = pathlib.Path(__file__).parent
STEP = r"waits (in|for the results of) step 4 \(`train`\): all_reduce at hanging_program\.py:\d+ "


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def run_job(case, folder, devices=1, **variables):
    """Runs the program on two processes; returns the exit status and the lines that each process wrote."""
    command = [sys.executable, "-m", "jdist", "run", "-n", "2", "--devices-per-process", str(devices)]
    command += ["--grace", "3", "hanging_program.py", case, str(folder / "checkpoints")]
    options = {"cwd": HERE, "env": {**environment(), **variables}}
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=120)
    lines = (done.stdout + done.stderr).splitlines()
    return done.returncode, [[line[4:] for line in lines if line.startswith(f"[{i}] ")] for i in range(2)], lines


def last_line(lines, process):
    """Returns the last line about a process."""
    return next(line for line in reversed(lines) if line.startswith(f"Process {process} "))


def check_report(status, lines, reporters, last_waiting=0):
    """Checks that each of `reporters` has printed the reason, its line and its stacks."""
    assert status == HUNG, lines
    for process in reporters:
        text = "\n".join(lines[process])
        assert f"jdist: process {last_waiting} has waited longer than its time limit, so all processes end" in text
        assert "Current thread 0x" in text
        assert re.search(r'File ".*hanging_program.py", line \d+ in <module>', text) or "has ended its program" in text
        assert re.search(r", since \d\d:\d\d:\d\d \(\d+ s\)\.$", last_line(lines[process], process))


@pytest.mark.slow
def test_hang_in_a_step_is_reported_by_all_processes_and_ends_the_job(tmp_path):
    status, lines, _ = run_job("early", tmp_path, JDIST_WARNING_SECONDS="1")
    check_report(status, lines, (0, 1))
    assert re.match(f"Process 0 of 2 {STEP}\\(`w, _ = step\\(w, batch\\)` at hanging_program", last_line(lines[0], 0))
    for reporter in (0, 1):
        assert "after step 3 (`train`), has ended its program, and waits" in last_line(lines[reporter], 1)
    first_warning = next(line for line in lines[0] if line.startswith("Process 0 "))
    assert "(1 s). Processes that do not wait:" in first_warning
    assert "has ended its program" in lines[0][lines[0].index(first_warning) + 1]
    assert next(line for line in lines[1] if line.startswith("Process 1 ")).endswith("(1 s).")


@pytest.mark.slow
def test_process_that_sleeps_in_its_loader(tmp_path):
    status, lines, _ = run_job("loader", tmp_path, devices=2)
    check_report(status, lines, (0, 1))
    loop = r"\(`for number, batch in enumerate\(batches\):` at hanging_program\.py:\d+\)"
    assert re.search(f"waits for other processes in an agreement on a batch {loop}", last_line(lines[0], 0))
    for reporter in (0, 1):
        line = last_line(lines[reporter], 1)
        assert re.search(f"waits for the next batch {loop}, while a thread runs `time.sleep\\(1000\\)` at hang", line)


@pytest.mark.slow
def test_process_that_traces_for_longer_than_the_limit_of_work(tmp_path):
    status, lines, _ = run_job("trace", tmp_path, JDIST_WORK_SECONDS="3")
    assert status == HUNG
    assert re.search(r"Process 1 of 2, after step 3 .*, traces a function .*, since", last_line(lines[1], 1))


@pytest.mark.slow
@pytest.mark.parametrize("process, devices", [(0, 1), (1, 2)])
def test_process_that_is_stopped_by_a_signal_does_not_answer(process, devices, tmp_path):
    status, lines, complete = run_job(f"stop_{process}", tmp_path, devices, JDIST_WARNING_SECONDS="2")
    other = 1 - process
    warning = rf"  Process {process} of 2 has not answered for \d+ s: it is stopped, .*( Its last report: Process {process} of 2|lost\.$)"
    assert any(re.match(warning, line) for line in lines[other]), lines[other]
    assert any(f"process {process} is stopped, by SIGSTOP or a debugger" in line for line in complete)
    check_report(status, lines, (other,), last_waiting=other)
    assert re.match(f"Process {other} of 2 {STEP}", last_line(lines[other], other))
    assert last_line(lines[other], process) == (
        f"Process {process} does not answer: it is stopped, or a C call holds Python's lock, or its machine is lost."
    )


@pytest.mark.slow
def test_process_that_sends_a_message_to_process_0_that_is_stopped(tmp_path):
    status, lines, _ = run_job("stop_0_first", tmp_path)
    check_report(status, lines, (1,), last_waiting=1)
    assert "Process 0 does not answer" in last_line(lines[1], 0)
    # It needs process 0 for its next batch or for the checkpoint, depending on the time at which process 0 was stopped.
    assert re.search(f"an agreement on a batch|{WAITS['checkpoint']}", last_line(lines[1], 1)), last_line(lines[1], 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="calls sleep of the C library")
def test_process_whose_lock_a_c_call_holds_does_not_answer(tmp_path):
    status, lines, _ = run_job("lock", tmp_path)
    check_report(status, lines, (0,))
    assert "Process 1 does not answer" in last_line(lines[0], 1)


def run_without_launcher(case, folder, count=2, limit="2.5"):
    """Runs the program on processes that no launcher observes; returns the exit status of each, and the lines of its errors."""
    with reserved_address() as address:
        variables = {
            "JDIST_COORDINATOR_ADDRESS": address,
            "JDIST_NUM_PROCESSES": str(count),
            "JAX_NUM_CPU_DEVICES": "1",
            "LIMIT": limit,
        }
        command = [sys.executable, "hanging_program.py", case, str(folder / "checkpoints")]
        processes = [
            subprocess.Popen(
                command,
                cwd=HERE,
                env={**environment(), **variables, "JDIST_PROCESS_ID": str(i)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(count)
        ]
        errors = [process.communicate(timeout=100)[1].splitlines() for process in processes]
    return [process.returncode for process in processes], errors


@pytest.mark.slow
def test_process_that_ends_with_an_error_is_reported_and_keeps_its_status(tmp_path):
    statuses, errors = run_without_launcher("error", tmp_path)
    assert statuses == [HUNG, 1]
    for reporter in range(2):
        assert "has ended its program with OSError: the file is damaged, and waits" in last_line(errors[reporter], 1)


@pytest.mark.slow
def test_processes_end_with_their_error_when_another_one_is_killed(tmp_path):
    """JAX would wait for it at exit, and then abort them."""
    statuses, errors = run_without_launcher("kill", tmp_path, count=3, limit="6")
    assert statuses == [1, -signal.SIGKILL, 1], errors
    for survivor in (0, 2):
        text = "\n".join(errors[survivor])
        assert re.search(r"Error: .*(closed|reset) by peer", text), text
        assert (
            "jdist: process 1 does not answer and has not ended, so this process ends without waiting for it." in text
        )
        assert "at exit" in text


@pytest.mark.slow
def test_process_that_calls_another_step(tmp_path):
    status, lines, _ = run_job("branch", tmp_path)
    assert status == HUNG, lines
    steps = [re.search(r"step 5 \(`(\w+)`\)", last_line(lines[process], process)) for process in (0, 1)]
    assert [step and step[1] for step in steps] == ["train", "other"]


ENDLESS = {
    "early": "jdist: process 0 waits for process 1, which has ended its program, so all processes end with exit status 43.",
    "chief": "jdist: the processes wait for each other in different calls, so none of them can continue, so all processes end",
    "after": "RuntimeError: Process 1 has ended its program, and did not take part in `Checkpointer.save`, which all processes",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDLESS)
def test_wait_that_can_never_end_ends_the_job_before_the_time_limit(case, tmp_path):
    status, lines, complete = run_job(case, tmp_path, LIMIT="600")
    assert status == HUNG, complete
    assert ENDLESS[case] in "\n".join(lines[0]), complete
    if case == "chief":
        assert re.search(WAITS["checkpoint"], last_line(lines[0], 0)), lines[0]
        assert re.match(f"Process 1 of 2 {STEP}", last_line(lines[1], 1)), lines[1]


WAITS = {
    "reduce": r"`strategy\.reduce` \(`strategy\.reduce\(",
    "checkpoint": r"`Checkpointer\.save`, which all processes have to call \(`checkpointer\.save\(number, w\)` at hang",
    "agreement": r"`an exchange of values` \(`strategy\.put\(1\.0\)` at hanging_program",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WAITS)
def test_report_names_the_call_that_waits_and_the_line_of_the_process_that_does_not_take_part(case, tmp_path):
    status, lines, _ = run_job(case, tmp_path)
    check_report(status, lines, (0, 1))
    assert re.search(WAITS[case], last_line(lines[0], 0)), last_line(lines[0], 0)
    assert re.search(r"runs `threading\.Event\(\)\.wait\(\)` at hanging_program\.py:\d+", last_line(lines[0], 1))
