"""`jdist run --engine ray` and `RayClusterResolver` with a real Ray cluster, in a network that has only loopback.

Ray listens on all interfaces, so its processes run in namespaces of their own, which also end with the test.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jdist._src.cluster.ray import RayClusterResolver
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.command_line.main import main
from jdist._src.launch import ray_engine
from jdist._src.launch.ray_worker import Node

from ray_namespace import ROOT, ray_cluster

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def enter():
    """Returns the command in front of a command that runs beside a Ray cluster of one node with two CPUs."""
    with ray_cluster(num_cpus=2, store_bytes=80_000_000) as prefix:
        yield prefix


@pytest.fixture
def start(enter, tmp_path):
    """Returns a function that starts `jdist run --engine ray OPTIONS train.py` with the lines of the program."""
    with contextlib.ExitStack() as stack:

        def start(options, program):
            header = 'import os, signal, sys, time; i = int(os.environ["JDIST_PROCESS_ID"])\n'
            (tmp_path / "train.py").write_text(header + program)
            engine = [sys.executable, "-m", "jdist_tools", "run", "--engine", "ray"]
            command = [*enter, *engine, *options.split(), "train.py"]
            launcher = subprocess.Popen(
                command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(launcher)
            stack.callback(launcher.kill)
            return launcher

        yield start


@pytest.mark.slow
def test_processes_on_ray_join_each_other_and_their_output_is_shown(start):
    program = """
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
from jdist.cluster import resolve
resolve().initialize()
total = multihost_utils.process_allgather(jnp.float32(i + 1)).sum()
print(jax.device_count(), total, os.environ["NPROC"], os.environ["JDIST_LOCAL_PROCESS_ID"], file=sys.stderr)
"""
    launcher = start("-n 2 --devices-per-process 2", program)
    _, errors = launcher.communicate(timeout=280)
    assert launcher.returncode == 0, errors
    assert {"[0] 4 3.0 1 0", "[1] 4 3.0 1 1"} <= set(errors.splitlines())


@pytest.mark.slow
def test_first_failure_on_ray_ends_the_other_processes_and_is_reported(start):
    launcher = start("-n 2", "print('line')\nif i == 1: raise ValueError('no')\ntime.sleep(100)")
    output, errors = launcher.communicate(timeout=280)
    assert launcher.returncode == 1, errors
    assert "[1] line\n" in output
    assert "process 1 of 2 failed first: exit status 1. The end of its output:\nTraceback" in errors
    assert errors.endswith("ValueError: no\n")


@pytest.mark.slow
def test_signal_is_forwarded_to_the_processes_on_ray_and_ends_the_job_without_a_restart(start):
    launcher = start(
        "-n 1 --max-restarts 3",
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print('ready')\nwhile 1: time.sleep(0.01)",
    )
    assert launcher.stdout.readline() == "[0] ready\n"
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=280)
    assert launcher.returncode == 3 and "received SIGTERM, and forwarded it to 1 processes" in errors
    assert "restart" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, reason",
    {
        "os.kill(os.getpid(), signal.SIGKILL)": r"ended by SIGKILL \(the machine may be out of memory\)",
        "os.kill(os.getpid(), signal.SIGSTOP)": "no answer for 4 seconds",
    }.items(),
)
def test_job_on_ray_starts_again_after_a_failure(start, line, reason):
    program = "r = int(os.environ['JDIST_RESTARTS']); print('attempt', r)\nif r == 0:\n"
    program += "    if i == 0: open('printed', 'w').close()\n"
    program += "    while not os.path.exists('printed'): time.sleep(0.01)\n"
    program += f"    if i == 1: {line}\n    time.sleep(100)"
    launcher = start("-n 2 --max-restarts 1 --answer-timeout 4", program)
    output, errors = launcher.communicate(timeout=280)
    assert launcher.returncode == 0, errors
    assert sorted(output.splitlines()) == [f"[{i}] attempt {r}" for i in range(2) for r in range(2)]
    assert re.search(f"restart 1 of 1, [0-9.]+ seconds after this: process 1 failed: {reason}.\n", errors), errors


@pytest.mark.slow
def test_processes_on_ray_end_with_a_launcher_that_is_killed(start, tmp_path):
    def running():
        """Returns the processes of this test, which have other ids in their namespace."""
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                is_child = b"launch/child.py" in path.read_bytes()
                if is_child and os.readlink(path.parent / "cwd") == str(tmp_path):
                    yield path

    launcher = start("-n 2", "print('ready'); time.sleep(100)")
    lines = {launcher.stdout.readline() for _ in range(2)}
    assert lines == {"[0] ready\n", "[1] ready\n"} and len(list(running())) == 2
    launcher.kill()
    deadline = time.monotonic() + 60
    while list(running()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_processes_that_the_cluster_cannot_run_are_an_error(start):
    launcher = start("-n 3", "")
    _, errors = launcher.communicate(timeout=280)
    assert launcher.returncode == 2
    assert (
        "3 processes with 1 CPU each need 3, but the Ray cluster has 2. Start fewer processes, or add nodes" in errors
    )


@pytest.mark.slow
def test_workers_of_ray_train_join_each_other(enter, tmp_path):
    pytest.importorskip(
        "ray.train", reason="Ray Train needs further packages, which are not installed.", exc_type=ImportError
    )
    program = """
import pathlib, ray, ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
def train(config):
    import jax, jdist
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    resolver = jdist.cluster.RayClusterResolver()
    resolver.initialize()
    total = multihost_utils.process_allgather(jnp.float32(jax.process_index() + 1)).sum()
    result = pathlib.Path(config["folder"], f"result_{resolver.process_id}")
    result.write_text(f"{jax.process_index()} {jax.process_count()} {total} {resolver.environment}")
if __name__ == "__main__":
    ray.init(address="auto")
    scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
    run = ray.train.RunConfig(storage_path=FOLDER)
    DataParallelTrainer(train, train_loop_config={"folder": FOLDER}, scaling_config=scaling, run_config=run).fit()
"""
    (tmp_path / "train.py").write_text(program.replace("FOLDER", repr(str(tmp_path))))
    done = subprocess.run(
        [*enter, sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"result_{i}").read_text() for i in range(2)] == ["0 2 3.0 ray.train", "1 2 3.0 ray.train"]


def test_resolver_outside_a_trainer_has_no_cluster():
    pytest.importorskip("ray.train", reason="Ray Train is optional and not installed.", exc_type=ImportError)
    with pytest.raises(
        ClusterNotFoundError, match="This process is not a worker of `ray.train`. Create the resolver in the tr"
    ):
        RayClusterResolver()


# Without Ray.


@pytest.fixture
def without_ray(monkeypatch):
    for name in ("ray", "ray.train", "ray.train.collective"):  # other tests may have imported them
        monkeypatch.setitem(sys.modules, name, None)


def test_engine_without_ray_is_an_error_with_the_command_that_installs_it(without_ray, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["run", "--engine", "ray", "-n", "2", "train.py"]) == 2
    assert capsys.readouterr().err.endswith(': `python -m pip install "jdist[ray]"`.\n')
    nodes = ["--nodes", "1", "--node-rank", "0", "--coordinator", "h:1"]
    assert main(["run", "--engine", "ray", "-n", "2", *nodes, "train.py"]) == 2
    assert "--engine ray takes the nodes of the Ray cluster. Remove --nodes, --node-r" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r'needs ray.train, .*: `python -m pip install "ray\[train\]"'):
        RayClusterResolver()


def test_bundle_has_the_gpus_of_a_process_where_jax_uses_gpus():
    resources = {"CPU": 16.0, "GPU": 8.0}
    assert ray_engine.process_bundle(resources, {}, 8, None) == {"CPU": 1, "GPU": 1}
    assert ray_engine.process_bundle(resources, {"JAX_PLATFORMS": "cuda,cpu"}, 2, 4) == {"CPU": 1, "GPU": 4}
    assert ray_engine.process_bundle(resources, {"JAX_PLATFORMS": "cpu"}, 16, 4) == {"CPU": 1}
    with pytest.raises(ValueError, match="4 processes with 4 GPU each need 16, but the Ray cluster has 8. Start fewer"):
        ray_engine.process_bundle(resources, {}, 4, 4)


def test_processes_of_a_node_have_consecutive_indices_and_share_its_cores():
    nodes = [Node("a", "10.0.0.1", 8), Node("b", "10.0.0.2", 6), Node("a", "10.0.0.1", 8)]
    workers, nodes = ray_engine.in_order_of_nodes(["first", "second", "third"], nodes)
    assert workers == ["first", "third", "second"] and [node.id for node in nodes] == ["a", "a", "b"]
    environ = {"JAX_ENABLE_X64": "1", "HOME": "/home", "NPROCS": "9"}
    variables = ray_engine.variables_on_nodes(environ, nodes, "10.0.0.1:1", 2)
    names = ["JDIST_PROCESS_ID", "JDIST_LOCAL_PROCESS_ID", "NPROC", "JAX_NUM_CPU_DEVICES"]
    names += ["JAX_ENABLE_X64", "HOME", "NPROCS"]
    assert [[variables[i].get(name) for name in names] for i in range(3)] == [
        ["0", "0", "4", "2", "1", None, None],
        ["1", "1", "4", "2", "1", None, None],
        ["2", "0", None, "2", "1", None, None],
    ]
