"""Work that takes longer than the time limit of the watchdog, and is no hang, does not end the job."""

import threading
import time

import pytest

import jdist

pytestmark = pytest.mark.processes

RESULTS = {
    "trace": 1.5,
    "compilation": 3.0,
    "host_computation": 3.0,
    "checkpoint": 3.0,
    "debugger": 1.5,
    "steps_per_call": 12.0,
    "write_by_process_0": 3.0,
}
WORK = {"trace": "traces a function", "compilation": "compiles a program", "debugger": "is stopped in a debugger"}


@pytest.fixture(scope="module")
def joined():
    """Returns two joined processes. A process that the watchdog ends is an error of the call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")  # the compilation is patched
        patch.setenv("JDIST_WARNING_SECONDS", "1")
        with jdist.testing.processes(2) as joined:
            yield joined


@pytest.mark.slow
@pytest.mark.parametrize("case", RESULTS)
def test_work_is_no_hang_and_warnings_name_it(case, joined, tmp_path):
    assert joined.run("faults.slow_worker:run_case", case, tmp_path) == [RESULTS[case]] * 2
    if case in WORK:
        assert f", {WORK[case]} (" in joined.output(0)


@pytest.mark.slow
def test_time_in_which_the_job_is_stopped_does_not_count(joined, tmp_path):
    def stop_and_continue():
        wait_for(tmp_path / "waiting")
        time.sleep(1)  # in which the watchdog of process 0 observes the wait
        joined.stop(0)
        joined.stop(1)
        time.sleep(7)
        joined.resume(0)
        joined.resume(1)
        time.sleep(2)  # in which the processes could report a hang
        (tmp_path / "continued").touch()

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    joined.run("faults.slow_worker:run_case", "stopped_job", tmp_path, 5.0)  # returns when both processes are stopped
    thread.join()
    for process in range(2):
        wait_for(tmp_path / f"result_{process}")


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
