"""`ParameterServerStrategy(engine="ray")` on a real Ray cluster, whose processes are killed for real.

The programs are in `ray_cases.py`.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jdist._src.parameter_server.ray_actors import ActorProcess
from jdist._src.parameter_server.ray_cluster import check_versions

from ray_namespace import environment, ray_cluster

pytestmark = pytest.mark.slow
FOLDER = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def call():
    """Returns a function that calls a function of `ray_cases.py` in a process beside the cluster."""
    with ray_cluster(num_cpus=16, store_bytes=400_000_000) as prefix:
        read, write = os.pipe()
        paths = os.pathsep.join([environment()["PYTHONPATH"], str(FOLDER), str(FOLDER.parent / "kit")])
        process = subprocess.Popen(
            [*prefix, "--pid", "--mount", sys.executable, "-u", str(FOLDER / "ray_cases.py"), str(write)],
            env={**environment(), "PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "2"},
            stdin=subprocess.PIPE,
            pass_fds=[write],
            text=True,
        )
        os.close(write)
        with process, os.fdopen(read) as results:

            def call(name, *arguments):
                process.stdin.write(json.dumps([name, *arguments]) + "\n")
                process.stdin.flush()
                kind, result = json.loads(results.readline())
                assert kind == "returned", result
                return result

            yield call
            process.kill()


@pytest.mark.parametrize("name", ["adam_clipped", "delay_compensated"])
def test_without_staleness_it_equals_one_device(call, name):
    assert call("equals_one_device", name) == {"0": 30}


def test_tables_of_which_rows_are_looked_up_equal_the_dense_table(call):
    assert call("tables") == 1


def test_trainer_and_checkpoints(call, tmp_path):
    accuracy, step, is_same_loss = call("fit_and_checkpoints", str(tmp_path))
    assert accuracy > 0.8 and step == 11 and is_same_loss


def test_keys_small_dtypes_outputs_and_several_states(call):
    assert call("values_and_states") == [[2, 2, 2], 12, "bfloat16", 6, 3]


def test_values_that_are_not_finite_are_not_applied_and_the_worker_is_named(call):
    total, output, skipped, messages = call("not_finite", "skip")
    assert (total, output, skipped) == (6, 3, 2)
    (message,) = messages
    assert "Worker 0 computed values that are not finite in call 2 of a step, `add`." in message
    message = call("not_finite", "stop")
    assert message.startswith("Worker 0 computed values that are not finite in call 2 of a step, `add`.")


def test_lost_server_without_snapshots_is_an_error_rows_ft6_ft8(call):
    message = call("lost_server_without_snapshots")
    assert message.startswith("Server 0 was lost, and the values of the state with it.") and "worker" not in message


def test_every_batch_is_applied_exactly_once_while_processes_are_killed(call):
    assert call("chaos", 4) == [1, 1, True, True, ["server", "worker"]]


def test_host_program_that_was_killed_resumes_from_the_snapshot(call, tmp_path):
    assert call("killed_host_program", str(tmp_path)) == [-9, "40 1 1\n"]


def test_recorded_run_in_which_a_worker_was_killed_has_a_bitwise_equal_replay(call, tmp_path):
    assert call("replay", str(tmp_path))[2:] == [True, True, True]


def test_scheduled_functions_run_on_the_workers(call):
    squares, total, workers, is_independent, error = call("scheduled_functions")
    assert squares == [0, 1, 4, 9] and total == 10 and set(workers) <= {0, 1} and is_independent
    assert error[0] == "EndOfDataError" and "`next` raised StopIteration" in error[1]


def test_functions_that_raise_or_cannot_be_sent(call):
    failed, with_strategy, with_leaf = call("functions_that_cannot_run")
    assert failed[:2] == ["KeyError", "'bad row'"] and "In the process of the worker" in failed[2]
    assert failed[3].startswith("Raised by the scheduled function `fail` on worker 0 (Ray actor 0)")
    assert (
        with_strategy[0] == "TypeError" and "cannot be sent to a worker, which is another process" in with_strategy[1]
    )
    assert with_leaf[0] == "TypeError" and "cannot be sent" in with_leaf[1]


def test_killed_workers_are_replaced_rows_ft3_ft4_ft10_ft12(call):
    values, value_read_while_a_worker_is_down, error = call("lost_workers_ft3_ft4_ft12")
    assert values == list(range(12)) and value_read_while_a_worker_is_down == 1
    assert error == ["KeyError", "'bad row'"]


def test_bad_input(call):
    too_many, callback, devices = call("bad_input")
    assert too_many[0] == "ValueError" and "100 workers and 2 servers need 102 CPUs" in too_many[1]
    assert callback[0] == "ValueError" and "Callbacks into Python, such as `jax.debug.print`" in callback[1]
    assert devices[0] == "ValueError" and "`workers` must be a number" in devices[1]


def test_other_version_of_jax_is_refused():
    with pytest.raises(RuntimeError, match="The Ray node 10.0.0.1 has JAX 0.1, and the host program JAX"):
        check_versions([ActorProcess("cpu", jax.__version__, 1, "10.0.0.2"), ActorProcess("cpu", "0.1", 2, "10.0.0.1")])


def test_missing_cluster_is_an_error():
    pytest.importorskip("ray", reason="Ray is optional and not installed.")
    program = "import jdist; jdist.ParameterServerStrategy(engine='ray')"
    variables = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    assert "no Ray cluster was found at '127.0.0.1:1'. Start one with `ray start --head`" in done.stderr
