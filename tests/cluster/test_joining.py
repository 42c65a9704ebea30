"""Joining, with real processes that find each other by `JDIST_` variables."""

import os
import subprocess
import sys

import pytest

from jdist._src.launch.child_processes import reserved_address

_TRAIN = """
import jdist, jax
strategy = jdist.MultiWorkerMirroredStrategy()
total = strategy.run(lambda: jdist.all_reduce("sum", jdist.replica_id()))
print(strategy.num_replicas_in_sync, jax.process_count(), int(total), type(strategy.cluster_resolver).__name__)
"""


def run_processes(tmp_path, *variables, scripts=(_TRAIN,)):
    """Runs one process per mapping of variables, and returns the exit status and the output of each."""
    with reserved_address() as address:
        common = {"JDIST_COORDINATOR_ADDRESS": address, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        started = []
        try:
            for i, own in enumerate(variables):
                path = tmp_path / f"script{min(i, len(scripts) - 1)}.py"
                path.write_text(scripts[min(i, len(scripts) - 1)])
                environment = {**os.environ, **common, "JDIST_NUM_PROCESSES": str(len(variables)), **own}
                pipe = subprocess.PIPE
                started.append(
                    subprocess.Popen([sys.executable, path], env=environment, stdout=pipe, stderr=pipe, text=True)
                )
            outputs = [process.communicate(timeout=120) for process in started]
        finally:
            for process in started:
                process.kill()
        return [(p.returncode, out, err) for p, (out, err) in zip(started, outputs, strict=True)]


def ids(*numbers, **more):
    return [{"JDIST_PROCESS_ID": str(number), **more} for number in numbers]


def test_processes_join_and_train_together(tmp_path):
    for status, out, err in run_processes(tmp_path, *ids(0, 1, JAX_NUM_CPU_DEVICES="2")):
        assert status == 0, err
        assert out.splitlines()[-1] == "4 2 6 EnvironmentClusterResolver"  # gloo prints lines of its own


@pytest.mark.slow
def test_processes_with_one_index_all_get_the_error(tmp_path):
    for status, _, err in run_processes(tmp_path, *ids(0, 1, 1)):
        assert status == 1
        assert err.splitlines()[-1].startswith("RuntimeError: Two processes have the index 1: ")


@pytest.mark.slow
def test_processes_with_different_scripts_all_get_the_error(tmp_path):
    for status, _, err in run_processes(tmp_path, *ids(0, 1), scripts=(_TRAIN, _TRAIN)):
        assert status == 1
        assert "process 0" in err and "runs script0.py, and process 1" in err


@pytest.mark.slow
def test_different_numbers_of_devices_are_an_error_on_all_processes(tmp_path):
    variables = [{"JDIST_PROCESS_ID": str(i), "JAX_NUM_CPU_DEVICES": str(i + 1)} for i in range(2)]
    for status, _, err in run_processes(tmp_path, *variables):
        assert status == 1
        message = "ValueError: The processes have different numbers of devices: process 0 has 1, process 1 has 2. Each process"
        assert message in err


@pytest.mark.slow
def test_process_that_ends_without_the_step_is_an_error_on_the_others(tmp_path):
    script = _TRAIN.replace("total =", "total = jax.process_index() and")
    (status, out, _), (other_status, _, err) = run_processes(tmp_path, *ids(0, 1), scripts=(script,))
    assert (status, other_status) == (0, 43) and out.splitlines()[-1] == "2 2 0 EnvironmentClusterResolver"
    assert "RuntimeError: Process 0 has ended its program, and did not take part in the comparison of `<lambda>`" in err


@pytest.mark.slow
def test_missing_process_is_an_error_after_the_timeout(tmp_path):
    script = "import jdist\njdist.cluster.resolve().initialize(timeout_seconds=1)"
    ((status, _, err),) = run_processes(
        tmp_path, {"JDIST_PROCESS_ID": "0", "JDIST_NUM_PROCESSES": "2"}, scripts=(script,)
    )
    assert status == 1
    assert "RuntimeError: After 1 seconds, process 1 of 2 has not joined process 0 at 127.0.0.1:" in err


def test_error_after_the_start_of_jax_names_the_line(tmp_path):
    script = f"import jax, jdist\nx = jax.numpy.ones(3)\n{_TRAIN}"
    ((status, _, err),) = run_processes(
        tmp_path, {"JDIST_PROCESS_ID": "0", "JDIST_NUM_PROCESSES": "2"}, scripts=(script,)
    )
    assert status == 1
    assert "RuntimeError: Process 0 of 2 cannot join the others: JAX has started at " in err
    assert "script0.py:2, with the devices of this process only. Create the strategy" in err
